"""Measure how long a snapshot holds training up, in eight ways, and how long it takes until it is on the disk.

A real job trains on one thread. In each round every way saves once, in an order drawn anew, so that whatever else
the machine does hits all alike. Every file is read back and compared with the state that it must hold. With
--throughput it measures instead what a snapshot every ten steps costs a job of two ranks, all in all.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from _stall_jobs import BATCH, Job
from _stall_ways import ASYNC, ENGINE, MEMCPY, REUSED, Begin, Way, available
from _throughput import throughput

from course_lib.engine import UsageError, World, open_world, run
from course_lib.engine.snapshots import cpu_model
from course_lib.engine.tree import digest, leaves

CALM = 4  # steps before each save, which tell what a step takes when nothing is saved
AFTER = 2  # steps that follow at least: a save can hold those up, too
ENOUGH = 200_000  # steps; it leaves in the middle


@dataclass(frozen=True)
class Save:
    """One save, in seconds: training held up, all written (from the beginning), and what it added to training."""

    stall_s: float
    written_s: float
    added_s: float
    right: bool


def one_save(job: Job, way: Way, begin: Begin | None, path: Path) -> Save:
    """Train, save in this way, train on until it is written, and read it back."""
    calm: list[float] = []
    for _ in range(CALM):
        started = time.monotonic()
        job.step()
        calm.append(time.monotonic() - started)
    like = job.state.state_dict()
    expected = digest(like)
    started = time.monotonic()
    steps, stall, written = _by_trainer(job) if begin is None else _by_call(job, begin, path)
    added = time.monotonic() - started - steps * statistics.median(calm)
    right = way.read is None or digest(way.read(path, like)) == expected
    return Save(stall, written, added, right)


def _by_call(job: Job, begin: Begin, path: Path) -> tuple[int, float, float]:
    """Steps trained meanwhile, stall and time until written."""
    ends: list[float] = []
    started = time.monotonic()
    work = begin(job.state, path)
    stall = time.monotonic() - started
    work.add_done_callback(lambda _: ends.append(time.monotonic()))
    steps = 0
    while steps < AFTER or not work.done():
        job.step()
        steps += 1
    work.result()
    return steps, stall, max(ends[0] - started, stall)


def _by_trainer(job: Job) -> tuple[int, float, float]:
    """The same; stall and time are those that the Trainer logs."""
    count, steps = len(job.saved), 0
    while steps < AFTER or len(job.saved) == count:
        job.step(save=steps == 0)
        steps += 1
    return steps, job.saved[-1]["stall_s"], job.saved[-1]["write_s"]


def measure(name: str, saves: int, seed: int, world: World, folder: Path) -> dict[str, Any]:
    """The figures of one state: `saves` rounds, after one that does not count, since there memory is still new."""
    ways, left_out = available()
    samples: dict[str, list[Save]] = {way: [] for way in ways}
    draw = random.Random(seed)
    job = Job(name, world, folder / "run", ENOUGH)
    with ExitStack() as stack:
        stack.callback(job.close)
        begins = {name: stack.enter_context(way.open()) if way.open else None for name, way in ways.items()}
        for number in range(saves + 1):
            for way in draw.sample(list(ways), len(ways)):
                path = folder / ("run" if way == ENGINE else "saved")
                save = one_save(job, ways[way], begins[way], path)
                if way != ENGINE:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                if number > 0:
                    samples[way].append(save)
            print(f"{name}: round {number} of {saves}", file=sys.stderr, flush=True)
        tensors = [value for _, value in leaves(job.state.state_dict()) if isinstance(value, torch.Tensor)]
    rows = {way: row(ways[way], taken, samples[MEMCPY]) for way, taken in samples.items()}
    about = {"bytes": sum(tensor.nbytes for tensor in tensors), "tensors": len(tensors), "batch": BATCH[name]}
    return {**about, "ways": rows, "left_out": left_out, "targets": targets(rows)}


def row(way: Way, taken: list[Save], memcpy: list[Save]) -> dict[str, Any]:
    """One line of the table."""
    stalls = [save.stall_s for save in taken]
    figures: dict[str, Any] = {"saves": len(taken), "stall_ms": spread(stalls)}
    figures["times_memcpy"] = round(statistics.median(stalls) / statistics.median(m.stall_s for m in memcpy), 2)
    if way.read is None:
        return figures
    figures |= {"written_ms": spread([s.written_s for s in taken]), "added_ms": spread([s.added_s for s in taken])}
    return figures | {"read_back_right": sum(save.right for save in taken), "durable": way.durable}


def spread(seconds: list[float]) -> dict[str, float]:
    """Minimum, quartiles and maximum, in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    values = {"min": min(seconds), "q1": low, "median": middle, "q3": high, "max": max(seconds)}
    return {name: round(1000 * value, 2) for name, value in values.items()}


def targets(rows: dict[str, Any]) -> dict[str, bool]:
    """What the engine's stall must reach, as ratios of medians in this run."""
    ours = rows[ENGINE]["stall_ms"]["median"]
    below = {f"below {other}": ours < rows[other]["stall_ms"]["median"] for other in (ASYNC, REUSED)}
    return {"at most 1.5 x memcpy": rows[ENGINE]["times_memcpy"] <= 1.5, **below}


def show(name: str, figures: dict[str, Any]) -> None:
    """Print one state's table: medians, with the quartiles of the stall."""
    print(f"\n{name}: {figures['bytes'] / 1e6:.1f} MB in {figures['tensors']} tensors; milliseconds, medians")
    heads = ("stall", 8), ("quartiles", 17), ("x memcpy", 9), ("written", 9), ("added", 8), ("right", 6)
    print(" " * 30, *(f"{head:>{width}}" for head, width in heads), " on the disk")
    for way, line in figures["ways"].items():
        stall = line["stall_ms"]
        text = f"{way:30} {stall['median']:8.1f} {stall['q1']:8.1f} {stall['q3']:8.1f} {line['times_memcpy']:9.2f}"
        if "written_ms" in line:
            text += f" {line['written_ms']['median']:9.0f} {line['added_ms']['median']:8.0f}"
            text += f" {line['read_back_right']:6}  {line['durable']}"
        print(text)
    for way, reason in figures["left_out"].items():
        print(f"left out: {way} ({reason})")
    for target, met in figures["targets"].items():
        print(f"{ENGINE}, {target}: {'yes' if met else 'NO'}")


def wrong(results: dict[str, Any]) -> list[str]:
    """The states and ways of which not every save could be read back as it was."""
    rows = [(name, way, line) for name, figures in results.items() for way, line in figures["ways"].items()]
    return [
        f"{name} by {way}" for name, way, line in rows if line.get("read_back_right", line["saves"]) < line["saves"]
    ]


def versions() -> dict[str, str]:
    """Of Python, and of what is compared."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with suppress(PackageNotFoundError):
        found["lightning"] = version("lightning")
    return found


def stalls(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The tables of all states, measured in this process."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with open_world("cpu", say=lambda text: None) as world:
        for name in options.state or ["resnet34", "gpt"]:
            results[name] = measure(name, options.saves, options.seed, world, folder / name)
            show(name, results[name])
    return {"saves": options.saves, "stalls": results}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=20, help="saves in each way (default: 20)")
    text = "resnet34 with momentum, gpt with AdamW, or tiny (default: resnet34 gpt; with --throughput: resnet34)"
    parser.add_argument("--state", nargs="+", choices=sorted(BATCH), help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the ways (default: 0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    parser.add_argument("--throughput", action="store_true", help="measure the steps of two ranks, not the stall")
    parser.add_argument("--blocks", type=int, default=16, help="with --throughput: blocks of ten steps (default: 16)")
    options = parser.parse_args()
    if options.saves < 2:
        raise UsageError("--saves must be at least 2")
    if options.blocks < 4 or options.blocks % 4:
        raise UsageError("--blocks must be a multiple of 4")
    return options


def main() -> None:
    options = parse()
    machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="snapshot-stall-") as directory:
        results = throughput(options, Path(directory)) if options.throughput else stalls(options, Path(directory))
    machine["load_after"] = os.getloadavg()[0]
    results = {"versions": versions(), "machine": machine, "seconds": round(time.monotonic() - started, 1), **results}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if bad := wrong(results.get("stalls", {})):
        sys.exit(f"what was written was not what had been saved: {', '.join(bad)}")


if __name__ == "__main__":
    run(main)
