"""Step time of the Trainer against a bare loop, Lightning Fabric, Lightning's Trainer and accelerate.

The same model, data, size of batches and threads for all, in one process, on the CPU. Blocks of steps take
turns in an order drawn anew each round. Nobody saves a snapshot or evaluates; each does what it does a step by itself:
ours seeds, adds up the loss over the ranks, looks for requests to stop and writes an event. The others keep no record
unless they are told to, so Fabric runs twice, once with a logger that writes each step's loss. Where a model's tensors
happen to lie in memory makes it some percent faster or slower for as long as it lives, so all of it is done in several
processes. Once more with a model that is a single layer, which shows what each adds to a step in microseconds.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _overhead_ways import BARE, MODELS, OURS, ways

from course_lib.engine import UsageError, run
from course_lib.workloads.data import DataSpec, load

STEPS = 24  # a block
TARGET = 1.02
Times = dict[str, list[float]]  # seconds a step of each way, a block each


def blocks(name: str, rounds: int, seed: int) -> tuple[Times, dict[str, str]]:
    """What one process measures with the model of this name, and what it cannot."""
    warnings.filterwarnings("ignore")  # of Lightning, about a loader without workers; of accelerate's scheduler
    torch.set_num_threads(1)
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="overhead-", ignore_cleanup_errors=True) as folder:
        found, missing = ways(name, load(DataSpec("digits", None)), Path(folder))
        taken: Times = {way: [] for way in found}
        for number in range(rounds + 1):
            for way in draw.sample(list(found), len(found)):
                seconds = found[way](STEPS) / STEPS
                if number > 0:
                    taken[way].append(seconds)
    return taken, missing


def measure(name: str, processes: int, rounds: int, seed: int) -> dict[str, Any]:
    pooled: Times = {}
    for number in range(processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            taken, missing = pool.submit(blocks, name, rounds, seed + number).result()
        for way, times in taken.items():
            pooled.setdefault(way, []).extend(times)
    # Each block against the bare loop's of the same round: what slows the machine for a while falls on both.
    pairs = {way: list(zip(times, pooled[BARE], strict=True)) for way, times in pooled.items()}
    rows = {
        way: {
            "ms": round(1000 * statistics.median(times), 3),
            "times_bare": round(statistics.median(mine / bare for mine, bare in pairs[way]), 4),
            "adds_us": round(1e6 * statistics.median(mine - bare for mine, bare in pairs[way])),
        }
        for way, times in pooled.items()
    }
    return {"processes": processes, "rounds": rounds, "steps_a_block": STEPS, "ways": rows, "left_out": missing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8, help="how often all is done (8)")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each way in a process (6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order (0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if options.rounds < 2 or options.processes < 1:
        raise UsageError("--rounds must be at least 2, --processes at least 1")
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    for name in MODELS:
        result[name] = measure(name, options.processes, options.rounds, options.seed)
        print(f"{name}:")
        for way, row in result[name]["ways"].items():
            adds = f"{row['times_bare']:7.3f} x the bare loop, {row['adds_us']:+6d} us a step"
            print(f"  {way:22} {row['ms']:8.2f} ms a step {adds}", flush=True)
    for way, why in result["tiny"]["left_out"].items():
        print(f"left out: {way} ({why}; pip install '.[bench]' brings it)")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    rows = result["tiny"]["ways"]
    mine = rows[OURS]["times_bare"]
    if mine > TARGET or any(mine > row["times_bare"] for way, row in rows.items() if way not in (BARE, OURS)):
        sys.exit(f"the target is missed: at most {TARGET:g} x the bare loop, and no slower than any other")


if __name__ == "__main__":
    run(main)
