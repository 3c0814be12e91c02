"""Trainer.steps(): the loop's iterator, which resumes, saves and stops."""

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from course_lib.engine.errors import Preempted, SnapshotError, UsageError
from course_lib.engine.feed import seed_everything
from course_lib.engine.identity import Identity
from course_lib.engine.keeper import Hook, Keeper, Progress
from course_lib.engine.order import Plan, Position
from course_lib.engine.report import epoch_line, write_report
from course_lib.engine.runlog import RunLog
from course_lib.engine.saver import PATIENCE_S
from course_lib.engine.shards import refuse_unfit
from course_lib.engine.snapshots import SnapshotStore
from course_lib.engine.state import TrainState
from course_lib.engine.step import Step, refuse_nonfinite, steps_from, totals_over_ranks
from course_lib.engine.stragglers import Stragglers
from course_lib.engine.world import World, shared


@dataclass
class Trainer:
    """Runs a training job that survives the death of its processes.

    Iterate over `steps()` and write the loop's body yourself, or call `fit`. `identity` holds what a resumed run
    must share with the snapshot (a difference is refused), `settings` what may change (a change is logged).
    `evaluate` is called on all ranks after each epoch and returns the epoch's metrics; it is called again when a
    process dies in it. `hook(point, step)` is called at the points load, warmup, data, snapshot and eval.
    `snapshot_every` counts optimizer steps, `keep` snapshots, `max_local_batch` the most samples that a rank puts
    through the model at once. `virtual_shards`, with a model that is not wrapped, is the number of parts of a step
    that gives the same bits on any number of ranks. `time_limit` counts seconds from the start of the agent, then the
    job stops as if it had been preempted. `strict` makes a snapshot that cannot be written fatal.
    """

    here: InitVar[World]
    state: TrainState
    dataset: Dataset[Any]
    run_dir: str | Path
    _: KW_ONLY
    epochs: int
    global_batch_size: int
    seed: int = 0
    snapshot_every: int = 100
    keep: int = 3
    strict: bool = False
    num_workers: int = 0
    max_local_batch: int | None = None
    virtual_shards: int | None = None
    time_limit: float | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    identity: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Callable[[], Mapping[str, float]] | None = None
    log: RunLog | None = None
    hook: Hook = lambda point, step: None
    say: Callable[[str], None] = print

    def __post_init__(self, here: World) -> None:
        if self.snapshot_every < 1 or self.epochs < 1:
            raise UsageError("epochs and snapshot_every must be at least 1")
        self.plan = Plan(len(self.dataset), self.global_batch_size, self.seed)  # type: ignore[arg-type]  # map-style
        self.progress = Progress()
        self._log = self.log or RunLog(self.run_dir)
        self._log.rank, self._log.world_size = here.rank, here.world_size  # `mp.spawn` sets no environment
        self._log("group_ready", joined=here.joined)
        self._say: Callable[[str], None] = self.say if here.rank == 0 else lambda text: None
        self._stragglers = Stragglers(self.state.model, here, self._log, self._say)
        identity = dict(self.identity)
        if self.virtual_shards is not None:
            refuse_unfit(self.state.model, self.max_local_batch)
            identity["virtual_shards"] = self.virtual_shards
            torch.set_num_threads(1)
        settings = {"epochs": self.epochs, "snapshot_every": self.snapshot_every} | dict(self.settings)
        self._keeper = Keeper(
            here,
            self.state,
            SnapshotStore(self.run_dir, self.keep),
            self._log,
            self.hook,
            plan=self.plan,
            strict=self.strict,
            identity=Identity(self.state, self.plan, identity, settings),
        )

    @property
    def world(self) -> World:
        """The World, with the run's generation once `steps()` has begun."""
        return self._keeper.world

    def fit(self, loss: Callable[[Any], torch.Tensor], max_norm: float | None = None) -> None:
        """The loop over `steps()` that most jobs need; `loss(data)` is the mean loss of a micro-batch."""
        for step in self.steps():
            self.state.optimizer.zero_grad()
            for batch in step:
                batch.backward(loss(batch.data))
            self.state.update(max_norm)

    def steps(self) -> Generator[Step, None, None]:
        """Yield each step that is still to do; its effects count once the loop's body has come back for the next.

        It resumes from the newest good snapshot first, and begins with one throw-away step whose effects on the
        model, the optimizer and everything in the TrainState are undone. Raises Preempted after a clean stop,
        UsageError when the run directory or its snapshots cannot be used, NonFiniteError when the loss is NaN.
        """
        try:
            with closing(self._keeper):
                self.progress = self._keeper.resume(self.epochs, self._say)
                if self.virtual_shards is not None:
                    self.state.broadcast_parameters()
                if self.progress.position.epoch >= self.epochs:
                    # A process may have died between the last snapshot and the report.
                    if self.world.rank == 0 and not (Path(self.run_dir) / "report.json").exists():
                        self._report()
                    return
                self.world.stop.start()
                self.world.stop.armed = True
                self.world.stop.stop_after(self.time_limit)
                yield from self._remaining_steps()
                self._finish()  # and from now on a request to stop changes nothing
        except GeneratorExit:  # the loop was left early: from now on nobody looks at a request to stop
            self.world.stop.armed = False
            raise

    def _remaining_steps(self) -> Iterator[Step]:
        steps: Iterator[Step] | None = None
        while (at := self.progress.position).epoch < self.epochs:
            if not self.plan.epoch_done(at):
                started = self._stragglers.begin()
                if steps is None:
                    steps = self._steps(at)
                    step = next(steps)
                    yield from self._keeper.warm_up(step)
                    started = self._stragglers.begin()
                else:
                    step = next(steps)
                self.hook("data", step.number)
                self.progress.lr = self.state.lr
                # What the body draws before its first micro-batch must not depend on the past either.
                seed_everything(self.plan.seed, step.number, self.world.rank, -1)
                yield step
                self._after_step(step, started)
            if self.plan.epoch_done(self.progress.position):
                self._after_epoch()

    def _steps(self, at: Position) -> Iterator[Step]:
        options: dict[str, Any] = {"num_workers": self.num_workers, "collate": self.collate}
        options |= {"scaler": self.state.scaler, "max_local_batch": self.max_local_batch, "shards": self.virtual_shards}
        return steps_from(at, self.epochs, self.dataset, self.plan, self.world, self.state.model, **options)

    def _after_step(self, step: Step, started: float) -> None:
        """Agree on what the step was, advance, log it, and save or stop when that is due."""
        size = step.samples[1] - step.samples[0]
        own = [0.0] * self.world.world_size
        own[self.world.rank] = self._stragglers.own_seconds(step)
        votes = [*self._stop_votes(), self._keeper.saver.vote()]
        totals, (asked, by_agent, saved, *own) = totals_over_ranks(step, [*votes, *own])
        means = {name: total / size for name, total in totals.items()}
        totals["samples"] = float(size)
        if not math.isfinite(loss := means.get("loss", 0.0)):
            self._keeper.saver.wait(PATIENCE_S)  # what is in flight is from before, and good
            refuse_nonfinite(step, loss, self.state)
        running = self.progress.running
        running.update({name: running.get(name, 0.0) + total for name, total in totals.items()})
        self.progress.position = self.plan.after_step(self.progress.position)
        self._log(
            "step",
            step=step.number,
            epoch=step.epoch,
            samples=list(step.samples),
            lr=self.progress.lr,
            seconds=time.monotonic() - started,
            own_seconds=own[self.world.rank],
            **means,
        )
        self._stragglers.note(step.number, own)
        self._keeper.saver.settle(saved)
        # The last step's snapshot waits for the evaluation, so that a finished run is one that was evaluated.
        last = step.last_of_epoch and step.epoch == self.epochs - 1
        if not last and self.progress.position.step % self.snapshot_every == 0:
            self._keeper.save(self.progress)
        self._stop_if_asked(asked, by_agent)

    def _after_epoch(self) -> None:
        """Evaluate, print, and go on to the next epoch; a resume in between evaluates again, and trains nothing."""
        position, running = self.progress.position, self.progress.running
        self.hook("eval", position.step)
        self.state.broadcast_buffers()
        seed_everything(self.plan.seed, position.step, self.world.rank, -2)
        measured = self.evaluate() if self.evaluate is not None else {}
        samples = running.pop("samples", 1.0)
        metrics = {f"train_{name}": total / samples for name, total in running.items()}
        metrics |= {name: float(value) for name, value in measured.items()}
        record = {"epoch": position.epoch, "steps": self.plan.steps_per_epoch, "lr": self.progress.lr, **metrics}
        self._log("epoch", step=position.step, **record)
        self._say(epoch_line(record, self.epochs, self.plan.global_batch_size))
        self.progress = Progress(self.plan.next_epoch(position), [*self.progress.history, record])
        if position.epoch + 1 < self.epochs:
            self._stop_if_asked(*self.world.sum(self._stop_votes()))

    def _stop_votes(self) -> list[float]:
        """Whether this rank was asked to stop, and whether its agent asked."""
        return [float(self.world.stop.asked), float(self.world.stop.from_agent)]

    def _stop_if_asked(self, asked: float, by_agent: float) -> None:
        """Leave in order when any rank was asked to: all are here, at the same step, and publish a snapshot."""
        if asked == 0:
            return
        saved, steps = self._keeper.saved(self.progress), self.progress.position.step
        self._log("stop_requested", step=steps)
        if not saved:
            raise shared(SnapshotError(f"asked to stop after {steps} steps, but no snapshot could be published"))
        raise shared(
            Preempted(
                f"stopped as asked after {steps} steps, with a snapshot: the same command goes on from there",
                tell_agent=by_agent < asked,
            )
        )

    def _finish(self) -> None:
        if not self._keeper.saved(self.progress):
            raise shared(SnapshotError("training is done, but its last snapshot could not be published"))
        self._log("finish", step=self.progress.position.step)
        self.world.gather(None)  # all ranks' events are written before rank 0 reads them
        if self.world.rank == 0:
            self._report()

    def _report(self) -> None:
        history, steps = self.progress.history, self.progress.position.step
        write_report(
            Path(self.run_dir),
            {
                "steps": steps,
                "epochs": len(history),
                "test_accuracy": history[-1].get("test_accuracy") if history else None,
                "weights_sha256": self.state.weights_digest(),
                "optimizer_sha256": self.state.optimizer_digest(),
            },
        )
        self._say(f"finished after {steps} steps: {Path(self.run_dir) / 'report.json'}")
