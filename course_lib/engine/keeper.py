"""What the trainer does with snapshots: resume from one, write one, and undo a throw-away step."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from course_lib.engine.errors import NonFiniteError, SnapshotError, UsageError
from course_lib.engine.identity import Identity
from course_lib.engine.order import Position
from course_lib.engine.runlog import RunLog
from course_lib.engine.snapshots import (
    Claim,
    Heartbeat,
    Manifest,
    Restored,
    SnapshotStore,
    claim_generation,
    find_snapshot,
)
from course_lib.engine.state import TrainState
from course_lib.engine.step import Step
from course_lib.engine.tree import map_tensors, portable
from course_lib.engine.world import World, shared

Hook = Callable[[str, int], None]


@dataclass
class Progress:
    """Where the run stands, its record of each epoch, the epoch's running totals, and the last step's rate."""

    position: Position = field(default_factory=Position)
    history: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, float] = field(default_factory=dict)
    lr: float = 0.0


class Keeper:
    """Keeps a run's state in snapshots, as one generation of it."""

    def __init__(
        self,
        world: World,
        state: TrainState,
        store: SnapshotStore,
        log: RunLog,
        hook: Hook,
        *,
        strict: bool,
        identity: Identity,
    ) -> None:
        self.world = world
        self.state = state
        self.store = store
        self.log = log
        self._hook = hook
        self._strict = strict
        self._identity = identity
        self._claim: Claim | None = None
        self._heartbeat: Heartbeat | None = None
        self.saved_step: int | None = None

    def resume(self, epochs: int, say: Callable[[str], None]) -> Progress:
        """Restore the newest good snapshot and claim the next generation; when all is done, claim nothing."""
        self.saved_step = None
        found = find_snapshot(self.store, self.world)
        progress = Progress()
        notes: list[str] = []
        if found.manifest is not None:
            progress = _progress(found.content)
            self._refuse_another_job(found)
            notes = self.state.load_state_dict(found.content["state"])
            if (done := progress.position.epoch) >= epochs:
                say(f"nothing to do: this run has finished {done} of {epochs} epochs ({self.store.directory.parent})")
                return progress
            notes += self._identity.changes(found.content, found.manifest, self.world)
        self._claim = claim_generation(self.store, self.world, found)
        self.world = replace(self.world, generation=self._claim.generation)
        self.log.generation = self._claim.generation
        self.log.open()
        if self.world.rank == 0:
            self._heartbeat = Heartbeat(self.store.directory, self._claim)
        self._log_resume(found, progress, notes, say)
        self._hook("load", progress.position.step)
        return progress

    def _refuse_another_job(self, found: Restored) -> None:
        differences = self._identity.differences(found.content)
        if differences:
            raise shared(
                UsageError(
                    f"the snapshots in {self.store.directory} are of another job ({'; '.join(differences[:5])}): "
                    "use the options it had, or another --run-dir"
                )
            )

    def _log_resume(self, found: Restored, progress: Progress, notes: list[str], say: Callable[[str], None]) -> None:
        for bad, reason in found.skipped:
            self.log("snapshot_skipped", snapshot=bad, reason=reason)
            say(f"passed over snapshot {bad}: {reason}")
        step = progress.position.step
        name = found.manifest.name if found.manifest else None
        self.log("snapshot_loaded", step=step, snapshot=name, fresh=name is None, changes=notes)
        if name is not None:
            say(f"resumed from {name}: epoch {progress.position.epoch + 1}, {step} steps done")
        for note in notes:
            say(f"changed at this resume: {note}")

    def warm_up(self, step: Step) -> Iterator[Step]:
        """One step whose effects are undone, at every start of a process.

        DDP puts its gradient buckets into another order after the first backward pass. With three or more ranks
        the first step after a resume would therefore sum in another order than the uninterrupted run, and its bits
        would differ. With a throw-away step at every start, a fresh one too, all real steps are alike.
        """
        before = map_tensors(self.state.state_dict(), torch.clone)
        step.warmup = True
        self._hook("warmup", step.number)
        yield step
        step.warmup = False
        step.totals.clear()
        self.state.load_state_dict(before)
        for parameter in self.state.module.parameters():
            parameter.grad = None

    def save(self, progress: Progress) -> None:
        """Publish a snapshot of this moment, on all ranks together; once for each step."""
        step = progress.position.step
        if step == self.saved_step:
            return
        self.state.broadcast_buffers()
        self._refuse_bad_weights(step)
        outcome: Manifest | TypeError | str | None = None
        if self.world.rank == 0:
            outcome = self._write(progress)
        else:
            self._hook("snapshot", step)
        outcome = self.world.broadcast(outcome)
        if isinstance(outcome, Manifest):
            self.saved_step = step
            return
        if isinstance(outcome, TypeError):
            raise shared(outcome)  # no later snapshot would go better, so it ends the run, on all ranks
        self.log("snapshot_skipped", step=step, reason=outcome)
        if self._strict:
            raise shared(SnapshotError(f"no snapshot after step {step}: {outcome}"))
        if self.world.rank == 0:
            print(f"no snapshot after step {step}, training goes on: {outcome}", file=sys.stderr, flush=True)

    def _write(self, progress: Progress) -> Manifest | TypeError | str:
        """The manifest of the published snapshot, or why there is none: the disk, or what it cannot hold."""
        assert self._claim is not None
        started = time.monotonic()
        try:
            content = {
                "state": self.state.state_dict(),
                "progress": portable(asdict(progress), "progress"),
                "identity": self._identity.fixed,
                "settings": self._identity.settings,
            }
            manifest = self.store.save(
                self._claim,
                content,
                step=progress.position.step,
                epoch=progress.position.epoch,
                world_size=self.world.world_size,
                config=self._identity.fixed | self._identity.settings,
                before_publish=lambda: self._hook("snapshot", progress.position.step),
            )
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        except TypeError as error:
            return error
        seconds = time.monotonic() - started
        self.log("snapshot_saved", step=manifest.step, stall_s=seconds, write_s=seconds, bytes=manifest.bytes)
        return manifest

    def _refuse_bad_weights(self, step: int) -> None:
        """Never publish weights that are not finite, or that not all ranks share."""
        views = self.world.gather((self.state.replica_digest(), self.state.is_finite()))
        if not all(finite for _, finite in views):
            raise shared(
                NonFiniteError(
                    f"the weights or the optimizer's state are not finite after step {step - 1}: no snapshot of them"
                )
            )
        drifted = [rank for rank, (weights, _) in enumerate(views) if weights != views[0][0]]
        if drifted:
            raise shared(
                SnapshotError(
                    f"the weights of rank {', '.join(map(str, drifted))} differ from rank 0's after step {step - 1}: "
                    "no snapshot of them"
                )
            )

    def close(self) -> None:
        """End the generation in order."""
        if self._heartbeat is not None:
            self._heartbeat.stop()


def _progress(content: Mapping[str, Any]) -> Progress:
    saved = content["progress"]
    return Progress(Position(**saved["position"]), list(saved["history"]), dict(saved["running"]), saved["lr"])
