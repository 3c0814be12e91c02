"""Step time of the Trainer against a bare loop, Lightning Fabric, Lightning's Trainer and accelerate.

The same model, data, size of batches and threads for all, in one process, on the CPU. Blocks of steps take
turns in an order drawn anew each round. Nobody saves a snapshot or evaluates; each does what it does a step by itself:
ours seeds, adds up the loss over the ranks, looks for requests to stop and writes an event.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from course_lib.engine import Trainer, TrainState, UsageError, World, run
from course_lib.workloads.data import DataSpec, ImageData, load
from course_lib.workloads.vision import MOMENTUM, build_model, schedule

BATCH, STEPS, NEVER = 64, 24, 10**9
BARE, OURS = "bare loop", "the course's Trainer"
TARGET = 1.02
Steps = Iterator[None]  # each `next` is one training step


def parts(data: ImageData) -> tuple[nn.Module, torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
    model = build_model("tiny", "batch", data.shape[0], len(data.classes), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=MOMENTUM)
    return model, optimizer, schedule(optimizer, NEVER)


def loader(data: ImageData) -> DataLoader[Any]:
    return DataLoader(data.train, BATCH, shuffle=True)


def endless(batches: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


def bare(data: ImageData, folder: Path) -> Steps:
    model, optimizer, scheduler = parts(data)
    for images, labels in endless(loader(data)):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        scheduler.step()
        yield


def ours(data: ImageData, folder: Path) -> Steps:
    model, optimizer, scheduler = parts(data)
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


def fabric(data: ImageData, folder: Path) -> Steps:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    engine.launch()
    model, optimizer, scheduler = parts(data)
    model, optimizer = engine.setup(model, optimizer)
    for images, labels in endless(engine.setup_dataloaders(loader(data))):
        optimizer.zero_grad()
        engine.backward(cross_entropy(model(images), labels))
        optimizer.step()
        scheduler.step()
        yield


def accelerate(data: ImageData, folder: Path) -> Steps:
    from accelerate import Accelerator

    engine = Accelerator(cpu=True)
    model, optimizer, batches, scheduler = engine.prepare(*parts(data)[:2], loader(data), parts(data)[2])
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


def lightning_trainer(data: ImageData, folder: Path) -> Callable[[int], float]:
    """Lightning's Trainer owns its loop, so each block is a `fit` whose first step does not count."""
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self._optimizer, self._scheduler = parts(data)

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


def ways(data: ImageData, folder: Path) -> tuple[dict[str, Callable[[int], float]], dict[str, str]]:
    """What can be measured here, as functions from a number of steps to seconds; and why the rest cannot."""
    found: dict[str, Callable[[int], float]] = {}
    missing: dict[str, str] = {}
    loops = {BARE: bare, OURS: ours, "Lightning Fabric": fabric, "accelerate": accelerate}
    for name, loop in loops.items():
        steps = loop(data, folder)
        try:
            next(steps)
        except ImportError as error:
            missing[name] = str(error)
            continue
        found[name] = lambda count, steps=steps: by_next(steps, count)  # type: ignore[misc]
    try:
        found["Lightning's Trainer"] = lightning_trainer(data, folder)
    except ImportError as error:
        missing["Lightning's Trainer"] = str(error)
    return found, missing


def measure(rounds: int, seed: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    found, missing = ways(load(DataSpec("digits", None)), folder)
    draw = random.Random(seed)
    taken: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name in draw.sample(list(found), len(found)):
            seconds = found[name](STEPS) / STEPS
            if number > 0:
                taken[name].append(seconds)
    # Each block against the bare loop's of the same round: what slows the machine for a while falls on both.
    ratios = {n: statistics.median(a / b for a, b in zip(t, taken[BARE], strict=True)) for n, t in taken.items()}
    rows = {
        name: {
            "ms": round(1000 * statistics.median(times), 2),
            "best_ms": round(1000 * min(times), 2),
            "times_bare": round(ratios[name], 3),
            "best_times_bare": round(min(times) / min(taken[BARE]), 3),
        }
        for name, times in taken.items()
    }
    return {"rounds": rounds, "steps_a_block": STEPS, "ways": rows, "left_out": missing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each way (30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if options.rounds < 2:
        raise UsageError("--rounds must be at least 2")
    warnings.filterwarnings("ignore")  # of Lightning, about a loader without workers
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as directory:
        result = {"load": os.getloadavg()[0]} | measure(options.rounds, options.seed, Path(directory))
    for name, row in result["ways"].items():
        print(f"{name:22} {row['ms']:8.2f} ms a step   {row['times_bare']:6.3f} x the bare loop", flush=True)
    for name, why in result["left_out"].items():
        print(f"left out: {name} ({why}; pip install '.[bench]' brings it)")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    mine = result["ways"][OURS]["times_bare"]
    if mine > TARGET or any(
        mine > row["times_bare"] for name, row in result["ways"].items() if name not in (BARE, OURS)
    ):
        sys.exit(f"the target is missed: at most {TARGET:g} x the bare loop, and no slower than any other")


if __name__ == "__main__":
    run(main)
