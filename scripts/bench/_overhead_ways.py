"""A training step as a bare loop, the course's Trainer, Lightning Fabric, Lightning's Trainer and accelerate do it."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from course_lib.engine import Trainer, TrainState, World
from course_lib.workloads.data import ImageData
from course_lib.workloads.vision import MOMENTUM, build_model, schedule

BATCH, NEVER = 64, 10**9
BARE, OURS = "bare loop", "the course's Trainer"
Steps = Iterator[None]  # each `next` is one training step


class OneLayer(nn.Sequential):
    """A step of it takes a fraction of a millisecond, most of it for loading."""

    def __init__(self, data: ImageData) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(data.shape), len(data.classes)))


MODELS: dict[str, Callable[[ImageData], nn.Module]] = {
    "tiny": lambda data: build_model("tiny", "batch", data.shape[0], len(data.classes), seed=0),
    "one layer": OneLayer,
}


def make_parts(name: str, data: ImageData) -> tuple[nn.Module, torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
    """A new model of this name, and what trains it."""
    model = MODELS[name](data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=MOMENTUM)
    return model, optimizer, schedule(optimizer, NEVER)


def loader(data: ImageData) -> DataLoader[Any]:
    return DataLoader(data.train, BATCH, shuffle=True)


def endless(batches: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


def bare(name: str, data: ImageData, folder: Path) -> Steps:
    model, optimizer, scheduler = make_parts(name, data)
    for images, labels in endless(loader(data)):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
        yield


def ours(name: str, data: ImageData, folder: Path) -> Steps:
    model, optimizer, scheduler = make_parts(name, data)
    world = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    state = TrainState(model, optimizer, scheduler)
    options: dict[str, Any] = {"epochs": NEVER, "global_batch_size": BATCH, "snapshot_every": NEVER}
    trainer = Trainer(world, state, data.train, folder / "run", **options, say=lambda text: None)
    for step in trainer.steps():
        optimizer.zero_grad()
        for batch in step:
            images, labels = batch.data
            batch.backward(cross_entropy(model(images), labels))
        optimizer.step()
        scheduler.step()
        yield


def fabric(name: str, data: ImageData, folder: Path, log: bool = False) -> Steps:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    engine = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(folder, flush_logs_every_n_steps=1))
    engine.launch()
    model, optimizer, scheduler = make_parts(name, data)
    model, optimizer = engine.setup(model, optimizer)
    for step, (images, labels) in enumerate(endless(engine.setup_dataloaders(loader(data)))):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        engine.backward(loss)
        optimizer.step()
        scheduler.step()
        if log:
            engine.log("loss", loss.item(), step)
        yield


def logging_fabric(name: str, data: ImageData, folder: Path) -> Steps:
    """With the loss of each step on disk before the next, as ours has it."""
    return fabric(name, data, folder, log=True)


def accelerate(name: str, data: ImageData, folder: Path) -> Steps:
    from accelerate import Accelerator

    engine = Accelerator(cpu=True)
    model, optimizer, scheduler = make_parts(name, data)
    model, optimizer, batches, scheduler = engine.prepare(model, optimizer, loader(data), scheduler)
    for images, labels in endless(batches):
        optimizer.zero_grad()
        engine.backward(cross_entropy(model(images), labels))
        optimizer.step()
        scheduler.step()
        yield


def by_next(steps: Steps, count: int) -> float:
    """Seconds of `count` steps of a loop that waits between steps."""
    started = time.perf_counter()
    for _ in range(count):
        next(steps)
    return time.perf_counter() - started


def lightning_trainer(name: str, data: ImageData, folder: Path) -> Callable[[int], float]:
    """Lightning's Trainer owns its loop, so each block is a `fit` whose first step does not count."""
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self._optimizer, self._scheduler = make_parts(name, data)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return [self._optimizer], [{"scheduler": self._scheduler, "interval": "step"}]

    class Clock(lightning.Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.ends.append(time.perf_counter())

    module, batches = Module(), loader(data)

    def block(count: int) -> float:
        clock = Clock()
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=count + 1, callbacks=[clock], default_root_dir=folder, **quiet
        )
        trainer.fit(module, batches)
        return clock.ends[-1] - clock.ends[0]

    return block


def ways(name: str, data: ImageData, folder: Path) -> tuple[dict[str, Callable[[int], float]], dict[str, str]]:
    """What can be measured here, as functions from a number of steps to seconds; and why the rest cannot."""
    found: dict[str, Callable[[int], float]] = {}
    missing: dict[str, str] = {}
    fabrics = {"Lightning Fabric": fabric, "Fabric, logging": logging_fabric}
    loops = {BARE: bare, OURS: ours, **fabrics, "accelerate": accelerate}
    for way, loop in loops.items():
        steps = loop(name, data, folder)
        try:
            next(steps)
        except ImportError as error:
            missing[way] = str(error)
            continue
        found[way] = lambda count, steps=steps: by_next(steps, count)  # type: ignore[misc]
    try:
        found["Lightning's Trainer"] = lightning_trainer(name, data, folder)
    except ImportError as error:
        missing["Lightning's Trainer"] = str(error)
    return found, missing
