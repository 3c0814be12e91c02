"""Record what notebook 08 asks to diagnose: `python -m course_lib.lab.goodput_cases FILE.json`, some two minutes.

Four jobs of two ranks, each with another reason for a low goodput. All of it is real, on this machine: the warm
launcher, kills with SIGKILL, and the ledger and the recoveries of `course_lib.lab.report`.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from course_lib.engine import UsageError, run
from course_lib.lab.account import examine
from course_lib.lab.anatomy import PHASES
from course_lib.lab.job import Job
from course_lib.lab.launch import start
from course_lib.lab.report_figures import coarse

AGENT = "python -m course_lib.engine.launch --standalone --nproc-per-node 2"
RESTARTS = "--max-restarts 3"
TRAIN = "scripts/ddp_torchrun.py --epochs 6"
PATIENCE_S = 500  # on a machine that has much else to do
KINDS = ("productive", "replayed", "lost", "stalled", "evaluating", "starting", "recovering", "idle", "unattributed")


def started(command: str, folder: Path) -> Job:
    return start(f"{command} --run-dir {folder}", limit_s=PATIENCE_S)


def _kill(job: Job, *steps: int) -> None:
    for count, step in enumerate(steps):
        job.wait_for(step=step, restarts=count)
        os.kill(job.pid(rank=1), signal.SIGKILL)


def seldom(folder: Path) -> None:
    """Killed twice, late after the only snapshot that there would be."""
    slow = "--fault slow:rank=0,step=0,seconds=0.06,times=10000,at=optimizer"
    with started(f"{AGENT} {RESTARTS} {TRAIN} --snapshot-every 200 {slow}", folder) as job:
        _kill(job, 90, 120)
        job.wait(show=False)


def late(folder: Path) -> None:
    """A rank hangs, and the others wait for it until the timeout."""
    fault = "--fault hang:how=spin,rank=1,step=70 --collective-timeout 15"
    with started(f"{AGENT} {RESTARTS} {TRAIN} --snapshot-every 10 {fault}", folder) as job:
        job.wait(show=False)


def loading(folder: Path) -> None:
    """Killed twice, and after each start the data takes its time."""
    fault = "--fault slow:rank=0,step=0,seconds=6,times=10000,at=load"
    with started(f"{AGENT} {RESTARTS} {TRAIN} --snapshot-every 10 {fault}", folder) as job:
        _kill(job, 50, 100)
        job.wait(show=False)


def nobody(folder: Path) -> None:
    """The agent may not restart, and it takes somebody a while to notice."""
    command = f"{AGENT} {TRAIN} --snapshot-every 10"
    with started(command, folder) as job:
        _kill(job, 75)
        job.wait(show=False, check=False)
    time.sleep(30)
    with started(command, folder) as job:
        job.wait(show=False)


CASES: dict[str, Callable[[Path], None]] = {"A": late, "B": seldom, "C": nobody, "D": loading}


def told(folder: Path) -> dict[str, Any]:
    """What the report says: the ledger's pieces over the seconds, its sums, and the phases of the recoveries."""
    report = examine(folder, look=False)
    zero = report.history.begin
    # Steps are many and short: neighbours that a picture could not tell apart are one.
    pieces = coarse(report.ledger.pieces, report.ledger.wall, columns=300)
    return {
        "wall_s": report.ledger.wall / 1e6,
        "pieces": [[piece.kind, (piece.begin - zero) / 1e6, (piece.end - zero) / 1e6] for piece in pieces],
        "seconds": {kind: us / 1e6 for kind, us in report.ledger.totals().items()},
        "steps": dict(report.ledger.steps),
        "recoveries": [
            {phase.name: (phase.end - phase.begin) / 1e6 for phase in found.phases} for found in report.recoveries
        ],
    }


def evidence(record: Mapping[str, Any]) -> str:
    """The jobs' ledgers side by side, and below them the phases of each job's longest recovery, in seconds."""
    jobs = record["jobs"]
    lines = ["seconds of the whole job" + "".join(f"{letter:>8}" for letter in jobs)]
    kinds = [kind for kind in KINDS if any(job["seconds"][kind] >= 0.05 for job in jobs.values())]
    lines += [f"  {kind:22}" + "".join(f"{job['seconds'][kind]:8.1f}" for job in jobs.values()) for kind in kinds]
    lines.append("  steps done again      " + "".join(f"{job['steps'].get('replayed', 0):8}" for job in jobs.values()))
    longest = {letter: max(job["recoveries"], key=lambda phases: sum(phases.values())) for letter, job in jobs.items()}
    lines += ["", "of its longest recovery"]
    names = {name for phases in longest.values() for name in phases}
    for name in sorted(names, key=lambda name: (PHASES.index(name.split(" + ")[0]), len(name))):
        if any(phases.get(name, 0) >= 0.05 for phases in longest.values()):
            lines.append(f"  {name[:22]:22}" + "".join(f"{phases.get(name, 0):8.1f}" for phases in longest.values()))
    return "\n".join(lines)


def read_cases(path: Path) -> dict[str, Any]:
    """The record; UsageError when it is not there, or is something else."""
    try:
        record = dict(json.loads(path.read_text()))
        if set(record["jobs"]) != set(CASES):
            raise KeyError
        return record
    except (OSError, ValueError, KeyError, TypeError):
        command = "python -m course_lib.lab.goodput_cases"
        raise UsageError(f"{path} is no record of these jobs: make one with {command}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, metavar="FILE.json", help="where to write the record")
    path = parser.parse_args().path
    jobs = {}
    for letter, make in CASES.items():
        with TemporaryDirectory(prefix="goodput-") as folder:
            print(letter, make.__name__, flush=True)
            make(Path(folder))
            jobs[letter] = told(Path(folder))
    python = ".".join(map(str, sys.version_info[:3]))
    record = {
        "recorded": time.strftime("%Y-%m-%d"),
        "versions": {"python": python, "torch": torch.__version__},
        "jobs": jobs,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(evidence(record))


if __name__ == "__main__":
    run(main)
