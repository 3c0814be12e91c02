"""Count how many short DDP jobs under torchrun end cleanly: exit code 0, and not a word on stdout or stderr.

A rank that leaves while a peer still talks to it aborts that peer, and gloo's threads can abort a process that
tears its interpreter down; torchrun then calls the finished job failed. `--tutorial` ends the jobs as tutorials do.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import UsageError, open_world, run
from course_lib.lab.launch import job_environment, torchrun_command

LIMIT_S = 120.0


@dataclass(frozen=True)
class Ending:
    """How a job ended: torchrun's exit code (None: not within the limit) and everything that was written."""

    code: int | None
    output: str

    @property
    def clean(self) -> bool:
        return self.code == 0 and not self.output.strip()

    @property
    def kind(self) -> str:
        """The way it ended, in a word or two."""
        if self.clean:
            return "clean"
        return "no end" if self.code is None else "exit code 0 with output" if self.code == 0 else f"exit {self.code}"


def steps() -> None:
    """A few steps of DDP: the group's connections are in use, and its threads have run."""
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()


def worker(tutorial: bool) -> None:
    """What each rank does; it does not return."""
    if tutorial:
        dist.init_process_group("gloo")
        steps()
        dist.destroy_process_group()
        sys.exit()

    def main() -> None:
        with open_world("cpu", say=lambda text: None):
            steps()

    run(main)


def one_job(ranks: int, tutorial: bool, limit_s: float = LIMIT_S) -> Ending:
    """Run one job to its end; one that does not end within the limit is stopped, and its workers with it."""
    how = ["--tutorial"] if tutorial else []
    command = torchrun_command(Path(__file__).resolve(), "--worker", *how, ranks=ranks, max_restarts=0)
    environment = job_environment()
    environment.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")  # a plain torchrun
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return Ending(process.returncode, output)
    except subprocess.TimeoutExpired:
        process.terminate()  # the agent gives its workers half a minute, then kills them
        output, _ = process.communicate()
        return Ending(None, output)


def figures(endings: list[Ending], ranks: int, seconds: float) -> dict[str, Any]:
    """The table's numbers, and the last lines of the first job that did not end cleanly."""
    first = next((ending.output.splitlines()[-30:] for ending in endings if not ending.clean), None)
    return {
        "ends": len(endings),
        "ranks": ranks,
        "clean": sum(ending.clean for ending in endings),
        "by kind": dict(Counter(ending.kind for ending in endings)),
        "seconds": round(seconds, 1),
        "first unclean output": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ends", type=int, default=200, help="jobs to run, one after another")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each job")
    parser.add_argument("--tutorial", action="store_true", help="destroy the group at once and exit, for comparison")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.tutorial)
    if options.ends < 1 or options.ranks < 1:
        raise UsageError("--ends and --ranks must be at least 1")
    started = time.monotonic()
    endings = []
    for number in range(options.ends):
        endings.append(one_job(options.ranks, options.tutorial))
        if not endings[-1].clean or (number + 1) % 10 == 0:
            print(f"end {number + 1}: {endings[-1].kind}", flush=True)
    result = figures(endings, options.ranks, time.monotonic() - started)
    for name, value in result.items():
        print(f"{name:22} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if result["clean"] < result["ends"]:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
