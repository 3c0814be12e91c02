"""Every part of a TrainState goes on after a death: optimizer, schedule, best metric, average, loss scaler."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from toys import Toy, crash_at, momentum, net

from course_lib.engine import Best
from course_lib.engine.step import MicroBatch, Step

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd with momentum": momentum,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
}
Schedule = Callable[[torch.optim.Optimizer], Any]
lr = torch.optim.lr_scheduler


def sequence(optimizer: torch.optim.Optimizer) -> lr.SequentialLR:
    parts = [lr.LinearLR(optimizer, 0.1, total_iters=4), lr.ExponentialLR(optimizer, 0.9)]
    return lr.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULES: dict[str, Schedule] = {
    "milestones": lambda o: lr.MultiStepLR(o, [2, 9]),
    "stairs": lambda o: lr.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 20),
    "warm-up": lambda o: lr.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10)),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=21),
    "sequence": sequence,
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


@pytest.mark.parametrize("per_epoch", [False, True], ids=["per step", "per epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rates_go_on(tmp_path: Path, name: str, per_epoch: bool) -> None:
    """Case A3: an LR drop that comes late, because the schedule's state was older than the counters."""

    def make(run_dir: Path) -> Toy:
        return Toy(run_dir, epochs=4, schedule=SCHEDULES[name], per_epoch=per_epoch)

    whole = make(tmp_path / "whole").run()
    again = crash_at(tmp_path / "again", [5, 8, 16], make)
    assert len(set(whole.lrs.values())) > 1
    assert again.lrs == {step: whole.lrs[step] for step in range(15, 20)}
    assert again.digests() == whole.digests()
    assert again.trainer.progress == whole.trainer.progress


class Noting(Toy):
    """Keeps the digest of the weights after each step."""

    def __init__(self, run_dir: Path, **given: Any) -> None:
        super().__init__(run_dir, **given)
        self.weights: dict[int, str] = {}

    def body(self, step: Step) -> None:
        super().body(step)
        if not step.warmup:
            self.weights[step.number] = self.state.weights_digest()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_update_after_a_resume_is_the_same(tmp_path: Path, name: str) -> None:
    """Case A4: moments that start again from zero give another update."""
    whole = Noting(tmp_path / "whole", optimizer=OPTIMIZERS[name]).run()
    Noting(tmp_path / "again", optimizer=OPTIMIZERS[name]).run(until=6)
    again = Noting(tmp_path / "again", optimizer=OPTIMIZERS[name]).run(until=7)
    assert again.weights == {6: whole.weights[6]}


@pytest.mark.parametrize(
    "values", [(0.9, 0.5, 0.95), (0.0, -1.0, 0.5), (-3.0, -5.0, -1.0)], ids=["positive", "zero", "negative"]
)
def test_a_worse_model_does_not_become_the_best_after_a_resume(tmp_path: Path, values: tuple[float, ...]) -> None:
    """Case A8."""
    best_file, run_dir = tmp_path / "best", tmp_path / "run"

    def make() -> Toy:
        best = Best()

        def evaluate() -> dict[str, float]:
            metric = values[len(toy.trainer.progress.history)]
            if best.update(metric):
                best_file.write_text(f"{metric}")
            return {"metric": metric}

        toy = Toy(run_dir, epochs=3, snapshot_every=2, extra={"best": best}, evaluate=evaluate)
        return toy

    make().run(until=7)
    assert best_file.read_text() == str(values[0])
    make().run(until=13)
    assert best_file.read_text() == str(values[0])
    last = make().run()
    assert best_file.read_text() == str(values[2])
    assert last.state.extra["best"].state_dict() == {"value": values[2]}
    assert [record["metric"] for record in last.trainer.progress.history] == list(values)


class WarmAverage:
    """An exponential average whose decay depends on a counter that is a plain int."""

    def __init__(self, model: nn.Module) -> None:
        self.updates = 0
        self.average = AveragedModel(model, avg_fn=self._mix)

    def _mix(self, old: torch.Tensor, new: torch.Tensor, _: Any) -> torch.Tensor:
        decay = min(0.9, (1 + self.updates) / (10 + self.updates))
        return decay * old + (1 - decay) * new

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        self.average.update_parameters(model)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": self.average.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.updates = state_dict["updates"]
        self.average.load_state_dict(state_dict["average"])


class Overflowing(Toy):
    """Mixed precision in miniature, with an overflow in step 4, and an average of the weights."""

    def __init__(self, run_dir: Path) -> None:
        model = net()
        self.ema = WarmAverage(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        super().__init__(run_dir, model=model, scaler=scaler, extra={"ema": self.ema})
        self.scales: dict[int, float] = {}

    def loss(self, step: Step, batch: MicroBatch) -> torch.Tensor:
        return super().loss(step, batch) * (math.inf if step.number == 4 else 1.0)

    def body(self, step: Step) -> None:
        before = self.state.weights_digest()
        super().body(step)
        assert (self.state.weights_digest() == before) == (step.number == 4)
        self.ema.update(self.model)
        self.scales[step.number] = self.state.state_dict()["scaler"]["scale"]


def test_averages_and_the_loss_scaler_go_on(tmp_path: Path) -> None:
    """Case A9: counters outside state_dict, and a scaler whose state is not loaded."""
    whole = Overflowing(tmp_path / "whole").run()
    assert [whole.scales[step] for step in range(10)] == [1024, 1024, *[2048] * 2, *[1024] * 3, *[2048] * 3]
    again = crash_at(tmp_path / "again", [3, 5, 7], Overflowing)
    assert again.digests() == whole.digests()
    assert again.ema.updates == whole.ema.updates == 10
    assert again.scales == {step: whole.scales[step] for step in again.scales}
