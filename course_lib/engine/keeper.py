"""What the trainer does with snapshots: resume from one, write one, and undo a throw-away step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from course_lib.engine.errors import UsageError
from course_lib.engine.identity import Identity
from course_lib.engine.order import Plan, Position
from course_lib.engine.progress import LIMIT, Deaths, hopeless_step, last_words, merge, suspects
from course_lib.engine.runlog import RunLog
from course_lib.engine.saver import Saver
from course_lib.engine.snapshots import Heartbeat, Restored, SnapshotStore, claim_generation, find_snapshot
from course_lib.engine.state import TrainState
from course_lib.engine.step import Step
from course_lib.engine.tree import HostCopy, portable
from course_lib.engine.world import World, shared

Hook = Callable[[str, int], None]


@dataclass
class Progress:
    """Where the run stands, its record of each epoch, the epoch's running totals, and the last step's rate."""

    position: Position = field(default_factory=Position)
    history: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, float] = field(default_factory=dict)
    lr: float = 0.0


@dataclass
class Keeper:
    """Keeps a run's state in snapshots, as one generation of it."""

    world: World
    state: TrainState
    store: SnapshotStore
    log: RunLog
    hook: Hook
    plan: Plan
    strict: bool
    identity: Identity
    saver: Saver = field(init=False)  # it writes this generation's snapshots, once `resume` has claimed it
    _end: ExitStack = field(default_factory=ExitStack, init=False)

    def resume(self, epochs: int, say: Callable[[str], None]) -> Progress:
        """Restore the newest good snapshot and claim the next generation; when all is done, claim nothing."""
        found = find_snapshot(self.store, self.world)
        progress = Progress()
        notes: list[str] = []
        if found.manifest is not None:
            progress = _progress(found.content)
            if differences := self.identity.differences(found.content):
                raise shared(
                    UsageError(
                        f"the snapshots in {self.store.directory} are of another job ({'; '.join(differences[:5])}): "
                        "use the options it had, or another --run-dir"
                    )
                )
            notes = self.state.load_state_dict(found.content["state"])
            if (done := progress.position.epoch) >= epochs:
                say(f"nothing to do: this run has finished {done} of {epochs} epochs ({self.store.directory.parent})")
                return progress
            notes += self.identity.changes(found.content, found.manifest, self.world)
        claim = claim_generation(self.store, self.world, found)
        self.world = replace(self.world, generation=claim.generation)
        self.log.generation = claim.generation
        self.log.open()
        if self.world.rank == 0:
            self._end.callback(Heartbeat(self.store.directory, claim).stop)
        self.saver = Saver(self.world, self.state, self.store, claim, self.log, self.strict)
        self._end.callback(self.saver.close)
        self._log_resume(found, progress, notes, say)
        self._refuse_hopeless(found, progress.position)
        self.hook("load", progress.position.step)
        return progress

    def _refuse_hopeless(self, found: Restored, at: Position) -> None:
        """Stop when the same step has killed several generations; the start after this one tries it again."""
        generations = [claim.generation for claim in suspects(found.claims)]
        if not generations:
            return  # most starts: no log has to be read
        deaths: Deaths = {}
        for others in self.world.gather(
            last_words(self.store.directory.parent, generations) if self.world.local_rank == 0 else {}
        ):
            merge(deaths, others)
        step = hopeless_step(found.claims, deaths)
        if step is None:
            return
        while at.step < step:
            at = self.plan.next_epoch(at) if self.plan.epoch_done(at) else self.plan.after_step(at)
        if self.plan.epoch_done(at):  # in the next epoch's first step, or in the evaluation before it
            at = self.plan.next_epoch(at)
        low, high = self.plan.batch(at)
        indices = self.plan.permutation(at.epoch)[low:high].tolist()
        self.log("no_progress", step=step, epoch=at.epoch, indices=indices)
        shown = ", ".join(map(str, indices[:16])) + ", …" * (len(indices) > 16)
        raise shared(
            UsageError(
                f"the last {LIMIT} generations have all died in step {step}, on the samples {shown} of the data set: "
                "no progress, so the job stops; the event log has each rank's last words; mend the cause, start again"
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
        before = HostCopy()(self.state.state_dict())  # in host memory: a GPU may have no room for a second state
        step.warmup = True
        self.log("warm_up", step=step.number)
        self.hook("warmup", step.number)
        yield step
        step.warmup = False
        step.parts.clear()
        self.saver.prepare()  # by now there is each tensor that a snapshot will hold
        self.state.load_state_dict(before)
        for parameter in self.state.module.parameters():
            parameter.grad = None

    def save(self, progress: Progress) -> None:
        """Begin a snapshot of this moment, on all ranks together; once for each step."""
        position = progress.position
        facts = {"epoch": position.epoch, "world_size": self.world.world_size, "config": self.identity.config}
        if self.saver.save(position.step, lambda: self._content(progress), **facts):
            self.hook("snapshot", position.step)

    def _content(self, progress: Progress) -> dict[str, Any]:
        return {
            "progress": portable(asdict(progress), "progress"),
            "identity": self.identity.fixed,
            "settings": self.identity.settings,
        }

    def saved(self, progress: Progress) -> bool:
        """Whether the snapshot of this moment, the last thing to do, is published; waits for it."""
        self.saver.wait()  # with patience, since nothing else is to do
        self.save(progress)
        self.saver.wait()
        return self.saver.saved_step == progress.position.step

    def close(self) -> None:
        """End the generation in order."""
        self._end.close()


def _progress(content: Mapping[str, Any]) -> Progress:
    saved = content["progress"]
    return Progress(Position(**saved["position"]), list(saved["history"]), dict(saved["running"]), saved["lr"])
