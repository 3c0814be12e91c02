"""Measure the goodput of a job whose ranks are killed at random times, and compare it with what was predicted.

The job is scripts/ddp_torchrun.py with two ranks. A first job, killed a few times, each time when it trains again,
gives the constants: a step, a snapshot's stall and write, a recovery. With these alone the simulator predicts the
goodput of a second job, which is killed at random (memoryless) times: once for the very times of the kills, and once
for their mean interval only, with the spread that chance gives it. The measured goodput must be within `--points` of
the first prediction.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from course_lib.engine import UsageError, read_events, run
from course_lib.engine.report import steps_replayed
from course_lib.engine.runlog import Event
from course_lib.lab.cluster import DAY_S, SimulatedCluster
from course_lib.lab.constants import Constants, measure, measured_goodput, window
from course_lib.lab.economics import best_interval, goodput
from course_lib.lab.job import Job
from course_lib.lab.launch import start
from course_lib.lab.simulator import replay, simulate

SCRIPT = Path(__file__).resolve().parents[1] / "ddp_torchrun.py"
RANKS, EPOCHS = 2, 100_000  # it does not come to the end of the epochs
CALIBRATION_WAITS_S = [5.0] * 6
PATIENCE_S = 120.0


def killed_job(directory: Path, waits: Sequence[float], every: int, seed: int, recover: bool) -> list[float]:
    """Run a job, and kill a random rank after each wait but the last one, which ends it; returns when (Unix time).

    The first wait begins with the first step, each other one with the kill before it, or (`recover`) with the first
    step after that. A kill that finds no process waits for one.
    """
    draw = random.Random(seed)
    options = f"--epochs {EPOCHS} --snapshot-every {every} --seed {seed} --device cpu"
    agent = f"torchrun --standalone --nproc-per-node {RANKS} --max-restarts 10000"
    kills: list[float] = []
    limit_s = sum(waits) + len(waits) * PATIENCE_S
    with start(f"{agent} '{SCRIPT}' {options} --run-dir '{directory}'", limit_s=limit_s) as job:
        job.wait_for(step=0, timeout_s=PATIENCE_S)
        for wait in waits[:-1]:
            time.sleep(wait)
            kills.append(kill_one(job, draw))
            if recover:
                job.wait_for(step=0, restarts=len(kills), timeout_s=PATIENCE_S)
        time.sleep(waits[-1])
        if not job.running:
            raise UsageError(f"the job has ended by itself, after {len(kills)} kills:\n{job.tail()}")
    return kills


def kill_one(job: Job, draw: random.Random) -> float:
    """SIGKILL a rank that lives."""
    while not (workers := job.workers()):
        if not job.running:
            raise UsageError(f"the job has ended by itself:\n{job.tail()}")
        time.sleep(0.01)
    at = time.time()
    os.kill(workers[draw.choice(sorted(workers))], signal.SIGKILL)
    return at


def memoryless(mtbf_s: float, seconds: float, seed: int) -> list[float]:
    """Random waits, one in `mtbf_s` on average, that are `seconds` long together."""
    draw = random.Random(seed)
    waits: list[float] = []
    while (left := seconds - sum(waits)) > 0:
        waits.append(min(draw.expovariate(1 / mtbf_s), left))
    return waits


def compare(events: list[Event], kills: list[float], found: Constants, every: int, mtbf_s: float) -> dict[str, Any]:
    """The second job's measured goodput and its predictions, all as shares of the same window of time."""
    begin, end = window(events)
    interval_s = every * found.pace_s
    costs = {"stall_s": found.stall_s, "write_s": found.write_s, "recovery_s": found.recovery_s}
    times = [kill - begin for kill in kills if kill < end]
    same = replay(times, end - begin, interval_s, **costs)
    chance = simulate(SimulatedCluster(1, mtbf_s, **costs), interval_s, (end - begin) / DAY_S, runs=1000)
    return {
        "window_s": end - begin,
        "kills": len(times),
        "steps_replayed": steps_replayed(events),
        "measured": measured_goodput(events),
        "predicted_for_these_times": float(same.goodput[0]) * found.step_share,
        "predicted_for_this_mtbf": chance.mean * found.step_share,
        "spread_by_chance": float(chance.goodput.std()) * found.step_share,
        "formula": goodput(interval_s, mtbf_s=mtbf_s, **costs) * found.step_share,
        "interval_s": interval_s,
        "best_interval_s": best_interval(found.stall_s, mtbf_s, found.write_s),
        "parts_predicted": same.shares,
    }


def show(found: Constants, rows: dict[str, Any]) -> None:
    print("constants, from the first job")
    for name, value in asdict(found).items():
        print(f"  {name:28} {value:9.4f}")
    print("goodput of the second job")
    for name, value in rows.items():
        if isinstance(value, dict):
            value = "  ".join(f"{part} {share:.3f}" for part, share in value.items())
        print(f"  {name:28} {f'{value:9.4f}' if isinstance(value, float) else f'{value!s:>9}'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="how long the second job trains")
    parser.add_argument("--mtbf", type=float, default=15.0, metavar="SECONDS", help="mean time between its kills")
    parser.add_argument("--snapshot-every", type=int, default=50, metavar="STEPS", help="steps between snapshots")
    parser.add_argument("--seed", type=int, default=0, help="of the kills' times and victims")
    parser.add_argument("--points", type=float, default=5.0, help="how many hundredths the prediction may be off")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    for name in ("seconds", "mtbf", "snapshot_every", "points"):
        if not getattr(options, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        every = options.snapshot_every
        kills = killed_job(first, CALIBRATION_WAITS_S, every, options.seed, recover=True)
        found = measure(read_events(first).events, kills)
        waits = memoryless(options.mtbf, options.seconds, options.seed)
        kills = killed_job(second, waits, every, options.seed, recover=False)
        rows = compare(read_events(second).events, kills, found, every, options.mtbf)
    show(found, rows)
    off = abs(rows["measured"] - rows["predicted_for_these_times"]) * 100
    passed = off <= options.points
    print(f"{off:.1f} points between measured and predicted, {'within' if passed else 'more than'} {options.points:g}")
    if options.json is not None:
        result = {"seed": options.seed, "constants": asdict(found), **rows, "points_off": off, "passed": passed}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    run(main)
