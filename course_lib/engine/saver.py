"""Snapshots while training goes on: the training thread copies, another one writes, and the ranks agree in between."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from course_lib.engine.errors import NonFiniteError, SnapshotError
from course_lib.engine.runlog import RunLog
from course_lib.engine.snapshots import Claim, Manifest, SnapshotStore
from course_lib.engine.state import TrainState
from course_lib.engine.tree import HostCopy, all_finite, digest
from course_lib.engine.world import World, shared

# How long training waits for a slow disk before it goes on without a snapshot that is due; how long at its end,
# when there is nothing else to do; and how long a process that leaves in disorder still gives its writer.
PATIENCE_S, LAST_PATIENCE_S, FAREWELL_S = 5.0, 600.0, 1.0
_SLICE_S, _POLL_S = 0.2, 0.005

# What became of a snapshot: it is published, training must stop, or why there is none; None where nothing is written.
SaveResult = Manifest | Exception | str | None
Verdict = tuple[str, bool]  # the digest of a rank's parameters, and whether all that it copied is finite


@dataclass
class _Flight:
    """The snapshot that is being written."""

    step: int
    work: "Future[SaveResult]"
    started: float
    waited_s: float  # for the snapshot before it; a part of the stall
    stall_s: float
    write_s: float = 0.0

    def note_end(self, _: object) -> None:
        self.write_s = time.monotonic() - self.started


@dataclass
class Saver:
    """Publishes a generation's snapshots, at most one at a time. All ranks call its methods, in the same order.

    Rank 0 writes. It gives a snapshot its name only after every rank has posted the digest of its own parameters and
    all are equal. They meet in the process group's store: a collective would have to wait for the next step.
    """

    world: World
    state: TrainState
    store: SnapshotStore
    claim: Claim
    log: RunLog
    strict: bool
    saved_step: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._copy = HostCopy()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._leaving = threading.Event()
        self._flight: _Flight | None = None
        self._count = 0

    def prepare(self) -> None:
        """Take the memory for the copies, and touch it, so that no snapshot has to wait for that."""
        self._copy(self._to_copy())

    def save(self, step: int, content: Callable[[], dict[str, Any]], **facts: Any) -> bool:
        """Begin a snapshot of this moment; False when there is one, or when the disk is too slow for it.

        `content()` is called on rank 0 alone, for what is not in the TrainState; `facts` go into the manifest.
        """
        if step == self.saved_step or (self._flight is not None and step == self._flight.step):
            return False
        started = time.monotonic()
        if not self.wait(PATIENCE_S):
            self._skip(step, "the one before is still being written, so the disk is slower than the interval")
            return False
        waited = time.monotonic() - started
        self.state.broadcast_buffers()
        self._count += 1
        key = f"snapshot/{self.claim.token}/{self._count}"
        try:
            copy = self._copy(self._to_copy())
            if self.world.rank == 0:
                work = self._writer.submit(self._write, key, copy, content(), facts | {"step": step})
            else:
                work = self._writer.submit(self._post, key, copy)
        except TypeError as error:  # the state holds what no snapshot can: all ranks will hear of it
            work = Future()
            work.set_result(error)
        self._flight = _Flight(step, work, started, waited, time.monotonic() - started)
        work.add_done_callback(self._flight.note_end)
        return True

    def vote(self) -> float:
        """1.0 when this rank has nothing left to do for the snapshot in flight; the ranks' sum goes to `settle`."""
        if self._flight is None or not self._flight.work.done():
            return 0.0
        self._flight.work.result()  # raises what went wrong on this rank, which the others cannot know
        return 1.0

    def settle(self, votes: float) -> None:
        """Once all ranks are ready, take note of what became of the snapshot; raises what makes training stop."""
        if self._flight is None or votes < self.world.world_size:
            return
        flight, self._flight = self._flight, None
        result = self.world.broadcast(flight.work.result())
        if isinstance(result, Exception):
            raise shared(result)  # no later snapshot would go better, so it ends the run, on all ranks
        if isinstance(result, str):
            self._skip(flight.step, result)
        elif result is not None:
            self.saved_step = flight.step
            times = {"stall_s": flight.stall_s, "waited_s": flight.waited_s, "write_s": flight.write_s}
            if self.world.rank == 0:
                self.log("snapshot_saved", step=flight.step, bytes=result.bytes, sha256=result.sha256, **times)

    def wait(self, patience_s: float | None = None) -> bool:
        """Wait for the snapshot in flight; False when a rank has run out of patience.

        In slices, so that no rank waits in a collective for longer than one, however slow the disk is.
        """
        deadline = time.monotonic() + (LAST_PATIENCE_S if patience_s is None else patience_s)
        while self._flight is not None:
            wait([self._flight.work], timeout=_SLICE_S)
            done, patient = self.world.sum([self.vote(), float(time.monotonic() < deadline)])
            self.settle(done)
            if done < self.world.world_size and patient < self.world.world_size:
                return False
        return True

    def close(self) -> None:
        """Let the writer go; a snapshot that is nearly there still gets its chance."""
        if self._flight is not None:
            wait([self._flight.work], timeout=None if self.world.world_size == 1 else FAREWELL_S)
        self._leaving.set()
        self._writer.shutdown(wait=False)

    def _skip(self, step: int, reason: str) -> None:
        self.log("snapshot_skipped", step=step, reason=reason)
        if self.strict:
            raise shared(SnapshotError(f"no snapshot after step {step}: {reason}"))
        if self.world.rank == 0:
            print(f"no snapshot after step {step}, training goes on: {reason}", file=sys.stderr, flush=True)

    def _to_copy(self) -> dict[str, Any]:
        """The parameters, for the comparison of the replicas; on rank 0 everything (what is in both is copied once)."""
        parameters = {name: p.detach() for name, p in self.state.module.named_parameters()}
        return {"parameters": parameters, "state": self.state.state_dict() if self.world.rank == 0 else None}

    # What follows runs in the writer's thread, and reads nothing but the copy.

    def _post(self, key: str, copy: dict[str, Any]) -> None:
        weights, finite = self._verdict(copy)
        self.world.store.set(f"{key}/{self.world.rank}", f"{weights} {int(finite)}")

    def _verdict(self, copy: dict[str, Any]) -> Verdict:
        finite = all_finite(copy["parameters"]) if copy["state"] is None else self.state.finite(copy["state"])
        return digest(copy["parameters"]), finite

    def _write(self, key: str, copy: dict[str, Any], content: dict[str, Any], facts: dict[str, Any]) -> SaveResult:
        try:
            mine = self._verdict(copy)
            vanished = not self.store.directory.is_dir()
            with self.store.draft(self.claim, {"state": copy["state"], **content}, **facts) as draft:
                if (error := _unfit([mine, *self._other_verdicts(key)], facts["step"])) is not None:
                    return error
                self.store.publish(draft)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            return RuntimeError(f"no snapshot after step {facts['step']}: {type(error).__name__}: {error}")
        if vanished:
            text = f"the directory {self.store.directory} had vanished, with the snapshots in it: it was made anew"
            print(text, file=sys.stderr, flush=True)
        return draft.manifest

    def _other_verdicts(self, key: str) -> Iterator[Verdict]:
        """What the other ranks have posted, in rank order."""
        store = self.world.store
        keys = [f"{key}/{rank}" for rank in range(1, self.world.world_size)]
        while keys and not store.check(keys):
            if self._leaving.wait(_POLL_S):
                raise InterruptedError("the process leaves, and not every rank has said that its weights are the same")
        for name in keys:
            weights, finite = store.get(name).decode().split()
            store.delete_key(name)
            yield weights, finite == "1"


def _unfit(verdicts: list[Verdict], step: int) -> Exception | None:
    """Why no snapshot may be published: weights that are not finite, or that not all ranks share."""
    if not all(finite for _, finite in verdicts):
        return NonFiniteError(
            f"the weights or the optimizer's state are not finite after step {step - 1}: no snapshot of them"
        )
    drifted = [rank for rank, (weights, _) in enumerate(verdicts) if weights != verdicts[0][0]]
    if drifted:
        ranks = ", ".join(map(str, drifted))
        return SnapshotError(
            f"the weights of rank {ranks} differ from rank 0's after step {step - 1}: no snapshot of them"
        )
    return None
