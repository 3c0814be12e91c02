"""The loop over Trainer.steps() in a run without failures."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from toys import Toy, crash_at, events, one_job

from course_lib.engine import Best
from course_lib.engine.snapshots.store import SnapshotStore
from course_lib.engine.step import MicroBatch, Step


class Clipped(Toy):
    """The loop as one writes it out, with everything that `fit` knows."""

    def body(self, step: Step) -> None:
        self.optimizer.zero_grad()
        for batch in step:
            batch.backward(self.loss(step, batch))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


@pytest.mark.parametrize("full", [False, True], ids=["plain", "with schedule, scaler and split"])
def test_fit_is_the_written_out_loop(tmp_path: Path, full: bool) -> None:
    def make(run_dir: Path) -> Clipped:
        more: dict[str, Any] = {}
        if full:
            more["schedule"] = lambda o: torch.optim.lr_scheduler.StepLR(o, 3)
            more["scaler"] = torch.amp.GradScaler("cpu", growth_interval=4)
            more["max_local_batch"] = 3
        return Clipped(run_dir, **more)

    written, fitted = make(tmp_path / "written").run(), make(tmp_path / "fitted")

    def loss(data: Any) -> Tensor:
        x, y = data
        return mse_loss(fitted.model(x), y)

    with one_job(fitted.world):
        fitted.trainer.fit(loss, max_norm=0.1)
    assert fitted.digests() == written.digests()
    assert fitted.trainer.progress == written.trainer.progress
    unclipped = Toy(tmp_path / "unclipped").run()
    assert unclipped.digests() != written.digests()


class Counting(Toy):
    """Looks at everything that the throw-away step could leave behind."""

    def __init__(self, run_dir: Path, **given: Any) -> None:
        self.best = Best()
        super().__init__(
            run_dir, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2), extra={"best": self.best}, **given
        )
        self.before_first: list[Any] = []

    def body(self, step: Step) -> None:
        if len(self.yielded) <= 2:
            gradients = [parameter.grad for parameter in self.model.parameters()]
            self.before_first.append((self.digests(), gradients, dict(step.totals), float(torch.rand(()))))
        super().body(step)
        self.best.update(step.number)
        for parameter in self.model.parameters():
            assert parameter.grad is not None


def test_the_throw_away_step_leaves_no_trace(tmp_path: Path) -> None:
    for until, first in ((5, 0), (None, 3)):
        toy = Counting(tmp_path).run(until)
        (state, gradients, totals, _), (after, no_gradients, no_totals, _) = toy.before_first
        assert state == after
        assert gradients == no_gradients == [None] * len(gradients)
        assert totals == no_totals == {}
        assert toy.yielded[0] is toy.yielded[1]  # the first real step is the one that was thrown away
        assert [step.number for step in toy.yielded[1:]] == list(range(first, until or 10))
        assert not any(step.warmup for step in toy.yielded)
    steps = [event["step"] for event in events(tmp_path, "step")]
    assert steps == [*range(5), *range(3, 10)]
    assert [record["epoch"] for record in toy.trainer.progress.history] == [0, 1]


class InPlace(Toy):
    """Changes its input, as some augmentations on the device do."""

    def loss(self, step: Step, batch: MicroBatch) -> Tensor:
        x, y = batch.data
        return mse_loss(self.model(x.mul_(3.0)), y)


def test_the_throw_away_step_does_not_eat_the_first_batch(tmp_path: Path) -> None:
    class Copying(Toy):
        def loss(self, step: Step, batch: MicroBatch) -> Tensor:
            x, y = batch.data
            return mse_loss(self.model(x * 3.0), y)

    assert InPlace(tmp_path / "a").run().digests() == Copying(tmp_path / "b").run().digests()


class Mixing(Toy):
    """Draws a number before the first micro-batch, as mixup does."""

    def body(self, step: Step) -> None:
        self.factor = torch.rand(())
        super().body(step)

    def loss(self, step: Step, batch: MicroBatch) -> Tensor:
        return super().loss(step, batch) * self.factor


def test_what_the_body_draws_between_steps_survives_a_death(tmp_path: Path) -> None:
    whole = Mixing(tmp_path / "whole").run()
    assert crash_at(tmp_path / "again", [3, 5], Mixing).digests() == whole.digests()


def test_the_last_snapshot_is_that_of_an_evaluated_run(tmp_path: Path) -> None:
    """Though the interval divides the number of steps, and would publish it before the evaluation."""
    toy = Toy(tmp_path, snapshot_every=5, evaluate=lambda: {"test_accuracy": 0.5}).run()
    newest = max(SnapshotStore(tmp_path).listing().manifests, key=lambda manifest: manifest.step)
    assert (newest.step, newest.epoch) == (10, 2)
    assert toy.lines[-1].startswith("finished after 10 steps")


def test_a_trainer_can_be_run_again(tmp_path: Path) -> None:
    """In a notebook the cell with the loop is run once more, and goes on from the newest snapshot."""
    toy = Toy(tmp_path / "run", snapshot_every=5).run(until=5)
    again = toy.run()
    assert sorted(again.losses) == list(range(10))
    newest = max(SnapshotStore(tmp_path / "run").listing().manifests, key=lambda m: (m.generation, m.step))
    assert (newest.generation, newest.step, newest.epoch) == (2, 10, 2)
    assert again.digests() == Toy(tmp_path / "whole").run().digests()


def test_a_trainer_whose_directory_was_emptied_publishes_again(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run", snapshot_every=5).run(until=5)
    shutil.rmtree(tmp_path / "run")
    toy.run(until=6)
    assert [manifest.step for manifest in SnapshotStore(tmp_path / "run").listing().manifests] == [5]


def test_the_generation_and_its_heartbeat_end_with_the_loop(tmp_path: Path) -> None:
    """Also when the loop is left early, or never reaches its first step."""

    def failing(point: str, step: int) -> None:
        if point == "load":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Toy(tmp_path, hook=failing).run()
    Toy(tmp_path).run(until=2)
    assert not list(tmp_path.rglob("*.beat"))
    toy = Toy(tmp_path)
    assert toy.trainer.world.generation is None
    toy.run()
    assert toy.trainer.world.generation == 3
    assert not list(tmp_path.rglob("*.beat"))
