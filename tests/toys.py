"""Tiny training jobs: a step takes about a millisecond, and a crash is a loop that is left in the middle.

In one process a `Toy` stands for a process of a run: build it, `run` it up to some step, build the next one on the
same directory. `on_ranks` runs a function on real gloo ranks.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from course_lib.engine import Trainer, TrainState, World
from course_lib.engine.runlog import Event, read_events
from course_lib.engine.step import MicroBatch, Step
from course_lib.engine.tree import digest

AnyToy = TypeVar("AnyToy", bound="Toy")


class Points(Dataset[Any]):
    """`size` pairs of (4 numbers, a target), always the same ones; `record` notes each index that is read.

    With `augment` each read adds noise from torch's, numpy's and Python's global generators.
    """

    def __init__(
        self, size: int = 40, augment: bool = False, record: Path | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, 4, generator=generator).to(dtype)
        self.targets = self.inputs.sum(dim=1, keepdim=True).sin()
        self.augment = augment
        self.record = record

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.record is not None:
            with self.record.open("a") as file:  # an append of one short line: workers don't tear each other's
                file.write(f"{index}\n")
        x = self.inputs[index]
        if self.augment:
            x = x + torch.rand(4) + float(np.random.rand()) + random.random()
        return x, self.targets[index]


def read_indices(record: Path) -> list[int]:
    """What a recording data set has been asked for so far, in order."""
    return [int(line) for line in record.read_text().split()] if record.exists() else []


def net(*layers: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small network, the same at every call; `layers` go in its middle, on 8 features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def dropout_net() -> nn.Module:
    """Dropout and batch norm: what must not depend on the past, and what a snapshot must hold beside the weights."""
    return net(nn.BatchNorm1d(8), nn.Dropout(0.3))


def momentum(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def alone() -> World:
    """A world of one, which needs no process group."""
    return World(0, 0, 1, torch.device("cpu"))


class Toy:
    """One process of a small run in `run_dir`, with a Trainer and the loop over its steps.

    `options` go to the Trainer. By default: 2 epochs of 5 steps, a snapshot every 3 steps.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        world: World | None = None,
        model: nn.Module | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        per_epoch: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        extra: dict[str, Any] | None = None,
        dataset: Dataset[Any] | None = None,
        **options: Any,
    ) -> None:
        self.world = world or alone()
        self.model = model or dropout_net()
        self.optimizer = optimizer(self.model)
        self.scheduler = schedule(self.optimizer) if schedule else None
        self.per_epoch = per_epoch
        self.scaler = scaler
        self.state = TrainState(self.model, self.optimizer, self.scheduler, scaler, extra)
        self.lines: list[str] = []
        self.lrs: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self.yielded: list[Step] = []
        given: dict[str, Any] = {
            "epochs": 2,
            "global_batch_size": 8,
            "snapshot_every": 3,
            "say": self.lines.append,
        } | options
        self.trainer = Trainer(self.world, self.state, Points() if dataset is None else dataset, run_dir, **given)

    def loss(self, step: Step, batch: MicroBatch) -> Tensor:
        """The mean loss of a micro-batch, for subclasses to change."""
        x, y = batch.data
        return mse_loss(self.model(x), y)

    def body(self, step: Step) -> None:
        """The loop's body, for subclasses to change or to add to."""
        lr = self.state.lr
        self.optimizer.zero_grad()
        for batch in step:
            batch.backward(self.loss(step, batch))
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None and (step.last_of_epoch or not self.per_epoch):
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*[step.totals["loss"]] * plateau)
        if not step.warmup:
            self.lrs[step.number] = lr
            self.losses[step.number] = step.totals["loss"]

    def run(self: AnyToy, until: int | None = None) -> AnyToy:
        """Train to the end, or die when step `until` is at hand, before it is done."""
        with one_job(self.world), closing(self.trainer.steps()) as steps:
            for step in steps:
                if step.number == until and not step.warmup:
                    break
                self.yielded.append(step)
                self.body(step)
        return self

    def digests(self) -> tuple[str, str]:
        """Of the weights with the buffers, and of everything else in the TrainState."""
        rest = {name: part for name, part in self.state.state_dict().items() if name != "model"}
        return self.state.weights_digest(), digest(rest)


@contextmanager
def one_job(world: World) -> Iterator[None]:
    """All that runs inside belongs to one job, as under torchrun: a new generation supersedes the old one.

    It also gives back the signals, which the trainer takes, and uses one thread: two would wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="toys"):
            yield
    finally:
        world.stop.stop()
        torch.set_num_threads(threads)


def files(run_dir: Path) -> dict[str, bytes]:
    """Every file under `run_dir` with its content."""
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def events(run_dir: Path, *names: str) -> list[Event]:
    """The run's events of these kinds, in order."""
    log = read_events(run_dir)
    assert log.bad_lines == 0
    return log.named(*names)


def crash_at(run_dir: Path, steps: Iterable[int], make: Callable[[Path], AnyToy]) -> AnyToy:
    """The run in `run_dir` after it died before each of `steps` in turn, and then came to its end."""
    for step in steps:
        died = make(run_dir).run(until=step)
        assert died.trainer.progress.position.step == step
    return make(run_dir).run()
