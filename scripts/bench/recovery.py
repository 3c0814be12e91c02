"""From a kill to the next step: the tutorials' script, ours under torchrun, and ours under the warm launcher.

Jobs of two ranks train, one after another in turns; at random instants a rank, drawn at random, is killed with SIGKILL,
and the time runs until both ranks have done a step of the next attempt. A recovery that needs more than a minute, or
whose job ends, has failed. The phases of ours are those that the run's own events tell.

Ours stops a job in which three attempts in a row have died in the same step, as it should, and kills that come faster
than snapshots can do that by chance. So an attempt is killed only after it has got beyond all before it.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.engine import UsageError, run
from course_lib.lab.account import examine
from course_lib.lab.anatomy import medians
from course_lib.lab.job import Job
from course_lib.lab.launch import start

BENCH = Path(__file__).resolve().parent
OURS = f"{BENCH.parent / 'ddp_torchrun.py'} --epochs 100000 --snapshot-every 10 --device cpu"
WARM, COLD = "python -m course_lib.engine.launch", "torchrun"
AGENT = "--standalone --nproc-per-node 2 --max-restarts 100000"
LIMIT_S, RANKS = 60.0, (0, 1)
TARGET_RATIO, TARGET_S = 4.0, 1.0

Steps = list[tuple[float, int, int, int]]  # (Unix time, attempt, rank, number) of each step


def classic_steps(folder: Path, _: Job) -> Steps:
    """Its steps have no numbers, since nobody there looks where it died: each counts as beyond those before it."""
    lines = [line.split() for file in folder.glob("steps-*.txt") for line in file.read_text().splitlines()]
    found = sorted((float(line[0]), int(line[1]), int(line[2])) for line in lines if len(line) == 3)
    return [(*step, number) for number, step in enumerate(found)]


def our_steps(_: Path, job: Job) -> Steps:
    return [(e["t"], e["generation"], e["rank"], e["step"]) for e in job.events if e["event"] == "step"]


@dataclass(frozen=True)
class Way:
    """A job and how it is launched; `steps` reads what it has done."""

    command: str
    steps: Callable[[Path, Job], Steps]


WAYS = {
    "tutorial": Way(f"{COLD} {AGENT} {BENCH / '_classic_job.py'} 100000 {{}}", classic_steps),
    "torchrun": Way(f"{COLD} {AGENT} {OURS} --run-dir {{}}", our_steps),
    "warm": Way(f"{WARM} {AGENT} {OURS} --run-dir {{}}", our_steps),
}


def wait_for_attempt(way: Way, folder: Path, after: int, job: Job, beyond: bool = False) -> Steps | None:
    """The steps, once both ranks have done one of a later attempt than `after`; None when that does not happen.

    Or only once they have done one `beyond` all that the attempts before have done.
    """
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.running:
        steps = way.steps(folder, job)
        newest = max((step[1] for step in steps), default=after)
        mine = [step for step in steps if step[1] == newest]
        before = max((step[3] for step in steps if beyond and step[1] < newest), default=-1)
        if newest > after and {rank for _, _, rank, number in mine if number > before} == set(RANKS):
            return mine
        time.sleep(0.01)
    print(f"failed: exit code {job.exit_code}\n{job.tail()}", file=sys.stderr)
    return None


def kill_often(name: str, kills: int, draw: random.Random, folder: Path) -> list[float | None]:
    """Seconds of `kills` recoveries of one job; None for one that failed, which ends the job."""
    way, seconds = WAYS[name], list[float | None]()
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": None}  # a plain torchrun, as people type it
    with start(way.command.format(folder), limit_s=3600, environment=environment, logs=folder / "logs") as job:
        now = wait_for_attempt(way, folder, -1, job)
        for _ in range(kills):
            if now is None or wait_for_attempt(way, folder, now[0][1] - 1, job, beyond=True) is None:
                return [*seconds, None]
            time.sleep(draw.uniform(0.1, 0.6))
            attempt, pid = now[0][1], job.pid(draw.choice(RANKS))
            killed = time.time()
            os.kill(pid, signal.SIGKILL)
            now = wait_for_attempt(way, folder, attempt, job)
            if now is not None:
                seconds.append(max(min(t for t, _, rank, _ in now if rank == mine) for mine in RANKS) - killed)
        return seconds if now is not None else [*seconds, None]


def figures(seconds: list[float | None]) -> dict[str, Any]:
    """Medians and spread of one way's recoveries."""
    good = sorted(value for value in seconds if value is not None)
    row: dict[str, Any] = {"recovered": len(good), "of": len(seconds)}
    if len(good) > 1:
        low, middle, high = statistics.quantiles(good, n=4, method="inclusive")
        spread = {"median": middle, "q1": low, "q3": high, "min": good[0], "max": good[-1]}
        row |= {name: round(value, 3) for name, value in spread.items()}
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=15, help="kills for each way (15)")
    parser.add_argument("--kills-a-job", type=int, default=5, help="of these, in one job (5)")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS), help="(all three)")
    parser.add_argument("--seed", type=int, default=0, help="seed of instants and victims (0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if options.kills < 2 or options.kills_a_job < 1:
        raise UsageError("--kills must be at least 2 and --kills-a-job at least 1")
    return options


def main() -> None:
    options = parse()
    draw = random.Random(options.seed)
    seconds: dict[str, list[float | None]] = {name: [] for name in options.ways}
    parts: dict[str, dict[str, float]] = {}
    while any(len(taken) < options.kills for taken in seconds.values()):
        for name in options.ways:  # in turn, so that what else the machine does falls on all
            left = options.kills - len(seconds[name])
            if left > 0:
                with tempfile.TemporaryDirectory(prefix=f"recovery-{name}-", ignore_cleanup_errors=True) as folder:
                    (Path(folder) / "logs").mkdir()
                    new = kill_often(name, min(options.kills_a_job, left), draw, Path(folder))
                    if name != "tutorial":
                        found = medians(list(examine(folder).recoveries))
                        parts[name] = {phase: round(value, 3) for phase, value in found.items()}
                seconds[name] += new
                print(f"{name:9}", *("failed" if s is None else f"{s:.2f}" for s in new), flush=True)
    rows = {name: figures(taken) | {"phases_s": parts.get(name, {})} for name, taken in seconds.items()}
    for name, row in rows.items():
        print(f"{name:9} {row}")
    result: dict[str, Any] = {"load": os.getloadavg()[0], "seed": options.seed, "ways": rows}
    if {"tutorial", "warm"} <= rows.keys() and "median" in rows["tutorial"] and "median" in rows["warm"]:
        result["ratio"] = round(rows["tutorial"]["median"] / rows["warm"]["median"], 2)
        print(f"warm restarts are {result['ratio']} times as fast as the tutorials' (target {TARGET_RATIO:g})")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    ours = [row for name, row in rows.items() if name != "tutorial"]
    if any(row["recovered"] < row["of"] for row in ours):
        sys.exit("not every recovery of ours succeeded")
    if result.get("ratio", TARGET_RATIO) < TARGET_RATIO or rows.get("warm", {}).get("median", 0.0) >= TARGET_S:
        sys.exit(f"the target is missed: {TARGET_RATIO:g} times as fast, and under {TARGET_S:g} s")


if __name__ == "__main__":
    run(main)
