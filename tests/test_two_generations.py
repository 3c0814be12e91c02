"""A generation that was paused in the middle of a save wakes up when a newer one has taken over: the newer one stands.

The victim stops itself with a real SIGSTOP before one of its I/O operations (and so after the one before), as a
process does whose machine was suspended or cut off. Meanwhile the job starts again and trains on. Then the victim
goes on, publishes what it can, retires what it thinks is old, and saves once more.
"""

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REPO, Completed
from snapshot_tools import Generation, everything, find, names, start
from toys import Toy, events

from course_lib.engine.snapshots import SnapshotStore, open_payload
from course_lib.engine.snapshots.draft import _Hashed
from course_lib.engine.snapshots.records import lineage
from course_lib.engine.tree import digest

IO_EVENTS = {"open", "os.link", "os.remove", "os.rename", "os.mkdir", "os.listdir", "os.scandir"}
REFUSED = 3  # the exit code of a victim whose save failed, which is as good as a snapshot that nobody uses
LIMIT_S = 120


class StopBefore:
    """Stops this process before its I/O operation number `count` on snapshots, from now on; says which it was.

    Operations count whose names begin with `kind`, once one whose name begins with `after` has come. Of the hundreds
    of writes of a payload only every `writes`-th does. An audit hook cannot be taken away: this is for a process that
    lives only for it.
    """

    def __init__(self, run_dir: Path, count: int, kind: str = "", after: str = "", writes: int = 1) -> None:
        self._directory, self._left, self._kind, self._after = str(run_dir / "snapshots"), count, kind, after
        self._writes, self._written, self.done = writes, 0, False
        fsync, write = os.fsync, _Hashed.write

        def stopping_fsync(file: int) -> None:
            self.step("fsync")
            fsync(file)

        def stopping_write(file: _Hashed, data: bytes) -> int:
            self._written += 1
            if self._written % self._writes == 0:
                self.step("write")
            return write(file, data)

        os.fsync = stopping_fsync
        _Hashed.write = stopping_write  # type: ignore[method-assign]
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in IO_EVENTS and arguments and self._directory in str(arguments[0]) and self._left > 0:
            self.step(f"{event} {Path(str(arguments[0])).name}")

    def step(self, what: str) -> None:
        if what.startswith(self._after):
            self._after = ""
        self._left -= not self._after and what.startswith(self._kind)
        if self._left == 0 and not self.done:
            self.done = True
            print(what, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


def child(work: Callable[[], object]) -> int:
    """The pid of a forked process that does `work` and ends with 0, REFUSED after an OSError, else 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except OSError as error:
            print(f"refused: {error}", flush=True)
            code = REFUSED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def state_of(pid: int) -> int | None:
    """Wait until the process has stopped (None) or ended (its exit code; negative: a signal)."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if done:
            return None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the process neither stopped nor ended")


def newer_files(run_dir: Path) -> dict[str, bytes]:
    """What generations after the first have written."""
    return {name: content for name, content in everything(run_dir).items() if "gen-0001" not in name}


def line_of(run_dir: Path) -> dict[str, str]:
    """Each snapshot that the newest generation may load, with the digest of its content, which is opened."""
    store = SnapshotStore(run_dir)
    seen = store.listing()
    return {m.name: digest(open_payload(store.read(m))) for m in lineage(seen.claims, seen.manifests)}


def victim(generation: Generation, count: int, writes: int) -> None:
    stop = StopBefore(generation.store.directory.parent, count, writes=writes)
    generation.save(30)
    if stop.done:
        generation.save(40)  # it still does not know


def pause_at(run_dir: Path, count: int, keep: int, saves: int, writes: int) -> bool:
    """One pause, at operation `count` of the victim's save; False when it makes fewer until its end."""
    old = start(run_dir, keep)
    for step in (10, 20):
        old.save(step)
    pid = child(lambda: victim(old, count, writes))
    if state_of(pid) is not None:
        return False
    newer = start(run_dir, keep=2)
    for step in range(31, 31 + saves):
        newer.save(step)
    files, line, before = newer_files(run_dir), line_of(run_dir), find(run_dir)
    os.kill(pid, signal.SIGCONT)
    assert state_of(pid) in (0, REFUSED)

    assert newer_files(run_dir) == files
    after = find(run_dir)
    assert after.manifest == before.manifest and digest(after.content) == digest(before.content)
    # What the victim's own snapshots had made superfluous it may still remove; the `keep` newest of them stay.
    superfluous = sorted(name for name in line if name.startswith("gen-0001"))[:-keep]
    assert line.items() - line_of(run_dir).items() <= {(name, line[name]) for name in superfluous}
    assert line_of(run_dir).items() <= line.items()

    newer.save(50)
    third = start(run_dir, keep=2)
    assert (third.claim.generation, third.claim.parent) == (3, "gen-0002-step-00000050")
    assert third.found.content["generation"] == 2
    third.save(51)
    assert names(run_dir) == ["gen-0002-step-00000050", "gen-0003-step-00000051"] and names(run_dir, ".tmp") == []
    return True


def every_point(directory: str, keep: int, saves: int, writes: int) -> None:
    """In a process of its own, so that it can fork: pause the victim at one operation after another."""
    torch.set_num_threads(1)
    os.fsync = lambda file: None  # a stopped process loses nothing, and a disk takes its time for each
    count = 1
    while pause_at(Path(directory) / str(count), count, keep, saves, writes):
        count += 1
    print(f"paused at {count - 1} operations", flush=True)


def in_a_process(launch: Callable[..., Completed], call: str) -> Completed:
    code = f"import test_two_generations; test_two_generations.{call}"
    env = {"PYTHONPATH": f"{REPO}:{REPO / 'tests'}", "TORCHELASTIC_RUN_ID": "two"}
    done = launch([sys.executable, "-c", code], timeout=280, env=env)
    assert done.returncode == 0, done.tail()
    return done


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("keep", "saves", "writes"),
    [(1, 0, 20), (1, 3, 20), (3, 1, 20), *(pytest.param(k, s, 1, marks=slow) for k in (1, 2, 3) for s in (0, 1, 3))],
)
def test_at_every_point_of_a_save(
    launch: Callable[..., Completed], tmp_path: Path, keep: int, saves: int, writes: int
) -> None:
    done = in_a_process(launch, f"every_point({str(tmp_path)!r}, {keep}, {saves}, {writes})")
    assert int(done.tail(1).split()[2]) > 20, done.tail()
    retired = {1: ["os.remove gen-0001-step-00000020.pt"], 2: ["os.remove gen-0001-step-00000010.pt"], 3: []}
    for what in ("write", "fsync", "os.link .gen-0001-step-00000030.json", "os.scandir snapshots", *retired[keep]):
        assert f"\n{what}" in done.output, what


def trained(run_dir: Path, until: int | None, stop: dict[str, Any] | None = None, **options: Any) -> None:
    """A process of a small training job, which may be stopped on its way; leaves the digests of its state."""
    if stop is not None:
        StopBefore(run_dir, **stop)
    toy = Toy(run_dir, snapshot_every=2, say=lambda text: None, **options).run(until)
    (run_dir / "digests").write_text(" ".join(toy.digests()))


def whole_jobs(directory: str, stop: dict[str, Any]) -> None:
    """In a process of its own: a training job is paused in a save, its next generation overtakes it, and it goes on."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # every optimizer imports it, so each child would
    run_dir, whole = Path(directory) / "run", Path(directory) / "whole"
    assert state_of(child(lambda: trained(whole, None))) == 0
    pid = child(lambda: trained(run_dir, None, stop, keep=1))
    assert state_of(pid) is None, "it did not come to this operation"
    assert state_of(child(lambda: trained(run_dir, 7))) == 0
    files, before = newer_files(run_dir / "snapshots"), find(run_dir)
    assert before.manifest is not None and (before.manifest.generation, before.manifest.step) == (2, 6)
    os.kill(pid, signal.SIGCONT)
    assert state_of(pid) == 0
    assert newer_files(run_dir / "snapshots") == files
    assert find(run_dir).manifest == before.manifest

    assert state_of(child(lambda: trained(run_dir, None))) == 0
    loaded = {event["generation"]: event["snapshot"] for event in events(run_dir, "snapshot_loaded")}
    assert loaded[3] == before.manifest.name
    assert (run_dir / "digests").read_text() == (whole / "digests").read_text()
    last = find(run_dir).manifest
    assert last is not None and (last.generation, last.step) == (3, 10)


LINK = "os.link .gen-0001-step-00000004"
POINTS: dict[str, dict[str, Any]] = {
    "in the middle of the payload": {"kind": "write", "count": 150},
    "before the payload has its name": {"kind": f"{LINK}.pt", "count": 1},
    "before it is published": {"kind": f"{LINK}.json", "count": 1},
    "before its check for a newer one": {"kind": "os.scandir", "count": 3, "after": f"{LINK}.json"},
    "after its check for a newer one": {"kind": "os.scandir", "count": 5, "after": f"{LINK}.json"},
    "in the middle of the retirement": {"kind": "os.remove gen-0001-step-00000002", "count": 2},
}
QUICK = ("before it is published", "after its check for a newer one")


@pytest.mark.parametrize("point", [name if name in QUICK else pytest.param(name, marks=slow) for name in POINTS])
def test_a_whole_training_job_that_was_paused_in_a_save(
    launch: Callable[..., Completed], tmp_path: Path, point: str
) -> None:
    in_a_process(launch, f"whole_jobs({str(tmp_path)!r}, {POINTS[point]!r})")
