"""Measure how fast the input pipeline delivers samples, against what training consumes, and what decoding once saves.

Two ranks under torchrun take turns, in each round, with a few steps of ResNet-34 and with reading batches through the
engine's loader, at several numbers of loader workers; each figure is the median over the rounds. Without --data-root
the pictures are noise, made for the occasion: what a pixel shows does not change what it costs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import Plan, Position, UsageError, World, open_world, run
from course_lib.engine.feed import feed
from course_lib.engine.snapshots import cpu_model
from course_lib.lab.launch import job_environment, torchrun_command
from course_lib.workloads.data import DataSpec, ImageData, load, prepare
from course_lib.workloads.optional import require
from course_lib.workloads.vision import build_model

RANKS, BATCH = 2, 128  # samples a rank and step
STEPS = 2  # training steps a round, after one that does not count
TYPES = {"float32": None, "bf16": torch.bfloat16}
CLASSES = 10
TARGET = 5.0  # times what training consumes


def noise(root: Path, count: int) -> None:
    """A tree of `count` JPEG pictures of 32x32 random pixels, a sixth of them to test."""
    pillow = require("PIL.Image", "this benchmark", "pip install pillow")
    random = np.random.default_rng(0)
    for number in range(count):
        folder = root / ("test" if number // CLASSES % 6 == 0 else "train") / str(number % CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        pillow.fromarray(pixels).save(folder / f"{number:05}.jpg")


def starts(spec: DataSpec) -> dict[str, float]:
    """Seconds until the data are there: decoded in memory, decoded into the file, and at a start that finds it."""

    def seconds(*acts: Callable[[DataSpec], object]) -> float:
        began = time.monotonic()
        for act in acts:
            act(spec)
        return round(time.monotonic() - began, 3)

    there = spec.root is not None and (spec.root / ".image_folder.pixels").exists()
    first = {} if there else {"decode into memory": seconds(load), "make the file": seconds(prepare)}
    return first | {"prepare and load with the file": seconds(prepare, load)}


class Training:
    """ResNet-34 under DistributedDataParallel, on a batch that is there already."""

    def __init__(self, data: ImageData, batch: tuple[Tensor, Tensor]) -> None:
        self._model: nn.Module = DistributedDataParallel(
            build_model("resnet34", "batch", data.shape[0], len(data.classes), seed=0)
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._images, self._labels = batch

    def seconds(self, dtype: torch.dtype | None) -> float:
        """For one step."""
        self._step(dtype)
        dist.barrier()
        began = time.monotonic()
        for _ in range(STEPS):
            self._step(dtype)
        dist.barrier()
        return (time.monotonic() - began) / STEPS

    def _step(self, dtype: torch.dtype | None) -> None:
        self._optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = cross_entropy(self._model(self._images).float(), self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def batches(data: ImageData, world: World, workers: int) -> Iterator[Any]:
    """This rank's batches, epoch after epoch."""
    plan = Plan(len(data.train), BATCH * world.world_size)  # type: ignore[arg-type]  # map-style: it has a length
    return feed(data.train, plan, Position(), 10**6, world, num_workers=workers)


def reading(data: ImageData, world: World, workers: int, count: int) -> tuple[float, float]:
    """Samples a second of all ranks together, and CPU milliseconds a batch, workers and their start included."""
    used = _cpu()
    source = batches(data, world, workers)
    next(source)
    dist.barrier()
    began = time.monotonic()
    samples = sum(len(next(source)[1]) for _ in range(count))
    dist.barrier()
    taken = time.monotonic() - began
    del source  # its workers end, and only then is their time known
    return samples * world.world_size / taken, 1000 * (_cpu() - used) / count


def _cpu() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def job(options: argparse.Namespace) -> None:
    """A rank: all rounds. Rank 0 writes down the medians."""
    torch.set_num_threads(1)
    with open_world("cpu", say=lambda text: None) as world:
        data = load(DataSpec("image_folder", options.data_root, options.augment))
        training = Training(data, next(batches(data, world, 0)))
        steps: dict[str, list[float]] = {name: [] for name in TYPES}
        read: dict[int, list[tuple[float, float]]] = {workers: [] for workers in options.workers}
        for _ in range(options.rounds):
            for name, dtype in TYPES.items():
                steps[name].append(training.seconds(dtype))
            for workers, taken in read.items():
                taken.append(reading(data, world, workers, options.batches))
        if world.rank == 0:
            options.out.write_text(json.dumps(figures(steps, read)))


def figures(steps: dict[str, list[float]], read: dict[int, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians: what each kind of step consumes, and for each number of workers the multiple of it that is delivered."""
    seconds = {name: statistics.median(taken) for name, taken in steps.items()}
    consumed = {name: RANKS * BATCH / taken for name, taken in seconds.items()}
    rows = []
    for workers, taken in read.items():
        rate, cpu = (statistics.median(values) for values in zip(*taken, strict=True))
        times = {name: rate / need for name, need in consumed.items()}
        share = {name: round(cpu / 1000 / taken, 4) for name, taken in seconds.items()}
        rows.append(
            {"workers": workers, "samples_a_second": round(rate), "times": times, "cpu_ms": round(cpu, 2), "cpu": share}
        )
    return {
        "step_s": {name: round(taken, 3) for name, taken in seconds.items()},
        "consumed_a_second": {name: round(need, 1) for name, need in consumed.items()},
        "rows": rows,
        "at least 5 x": all(times >= TARGET for row in rows for times in row["times"].values()),
    }


def show(result: dict[str, Any]) -> None:
    for what, seconds in result["start_s"].items():
        print(f"{what:32} {seconds:8.2f} s for {result['pictures']} pictures")
    for name, need in result["consumed_a_second"].items():
        print(f"ResNet-34 in {name} on {RANKS} ranks of one thread consumes {need:.0f} samples/s")
    heads = ("workers", 8), ("samples/s", 10), ("x float32", 10), ("x bf16", 8), ("CPU ms a batch", 15)
    print(*(f"{head:>{width}}" for head, width in heads), " of a bf16 step")
    for row in result["rows"]:
        values = row["workers"], row["samples_a_second"], *map(round, row["times"].values()), row["cpu_ms"]
        text = (f"{value:>{width}}" for value, (_, width) in zip(values, heads, strict=True))
        print(*text, f"{row['cpu']['bf16']:15.1%}")
    print(f"at least {TARGET:.0f} x what training consumes: {'yes' if result['at least 5 x'] else 'NO'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="a folder for --data image_folder")
    parser.add_argument("--pictures", type=int, default=6000, help="how many to make without it (default: 6000)")
    parser.add_argument("--augment", action="store_true", help="vary the training images")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="loader workers a rank")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure (default: 3)")
    parser.add_argument("--batches", type=int, default=200, help="batches read in each (default: 200)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.rounds, options.batches) < 1 or min(options.workers) < 0 or options.pictures < 120:
        raise UsageError("--rounds and --batches must be at least 1, --workers at least 0, --pictures at least 120")
    return options


def compare(options: argparse.Namespace) -> None:
    """Have the pictures, start the ranks, show what they measured."""
    machine: dict[str, Any] = {"cpu": cpu_model(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="input-pipeline-") as folder:
        root, out = options.data_root or Path(folder, "pictures"), Path(folder, "figures.json")
        if options.data_root is None:
            noise(root, options.pictures)
        spec = DataSpec("image_folder", root)
        result = {"start_s": starts(spec), "pictures": _count(load(spec))}
        given = ["--data-root", root, "--rounds", options.rounds, "--batches", options.batches, "--out", out]
        given += ["--augment"] * options.augment + ["--workers", *options.workers]
        command = torchrun_command(Path(__file__).resolve(), *given, ranks=RANKS, max_restarts=0)
        subprocess.run(command, env=job_environment(), check=True)
        result |= json.loads(out.read_text())
    machine["load_after"] = os.getloadavg()[0]
    show(result)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"versions": {"torch": torch.__version__}, "machine": machine, **result}, indent=1) + "\n"
        )


def _count(data: ImageData) -> int:
    return len(data.train) + len(data.test)  # type: ignore[arg-type]  # map-style: they have lengths


def main() -> None:
    options = parse()
    job(options) if "LOCAL_RANK" in os.environ else compare(options)


if __name__ == "__main__":
    run(main)
