"""Kill random ranks at random instants under a plain torchrun, and check that every restart succeeds.

The job is scripts/ddp_torchrun.py. A kill hits a rank that imports, forms the group, loads a snapshot, trains,
evaluates or saves; many hit a job that has not recovered from the one before. At the end the weights must be
those of an uninterrupted job on as many ranks, bit for bit. The first claim that fails gives exit code 1.
"""

import argparse
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from _verdict import Kill, judge

from course_lib.engine import Plan, UsageError, run
from course_lib.engine.snapshots.records import parse_name
from course_lib.lab.launch import job_environment, torchrun_command
from course_lib.workloads.data import DataSpec, load
from course_lib.workloads.vision import DEFAULT_BATCH

SCRIPT = Path(__file__).resolve().parents[1] / "ddp_torchrun.py"
STEPS_PER_KILL = 36
TRAINING_S = 1.5  # a kill that waits for training comes up to so long after it began


class CampaignFailed(Exception):
    """A claim does not hold, or the job ended before its time; the message says which."""


@contextmanager
def job(directory: Path, ranks: int, epochs: int, seed: int, restarts: int) -> Iterator[psutil.Popen]:
    """A plain torchrun job: its agent's process. Nothing of it is left after the block."""
    options = ("--epochs", epochs, "--seed", seed, "--snapshot-every", 5, "--device", "cpu", "--run-dir", directory)
    environment = job_environment()
    environment.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")  # a plain torchrun is what this is about
    directory.mkdir(parents=True)
    with (directory / "output.txt").open("wb") as output:
        command = torchrun_command(SCRIPT, *options, ranks=ranks, max_restarts=restarts)
        agent = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield agent
        finally:
            with suppress(psutil.NoSuchProcess):
                left = agent.children(recursive=True)
                for process in (agent, *left):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs([agent, *left], timeout=10)


def workers(agent: psutil.Process) -> dict[int, dict[int, psutil.Process]]:
    """The agent's own children by attempt and rank, as their environments say."""
    found: dict[int, dict[int, psutil.Process]] = {}
    with suppress(psutil.Error):
        for child in agent.children():
            with suppress(psutil.Error, KeyError, OSError):
                environment = child.environ()  # between fork and exec it is still the agent's
                attempt, rank = environment["TORCHELASTIC_RESTART_COUNT"], environment["RANK"]
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(int(attempt), {})[int(rank)] = child
    return found


def has_come(agent: psutil.Process, attempt: int, ranks: int) -> bool:
    """Whether all processes of this attempt are there."""
    return len(workers(agent).get(attempt, {})) == ranks


def newest_step(directory: Path) -> int:
    """How many steps the newest snapshot holds."""
    names = (parse_name(path.stem) for path in (directory / "snapshots").glob("gen-*-step-*.json"))
    return max((name[1] for name in names if name), default=0)


def has_saved(directory: Path, steps: int) -> bool:
    """Whether a snapshot holds so many steps, or more."""
    return newest_step(directory) >= steps


def wait_until(condition: Callable[[], bool], agent: psutil.Process, seconds: float) -> bool:
    """Whether the condition came true within `seconds`; False, too, when the agent ended before."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end or agent.poll() is not None:
            return False
        time.sleep(0.05)
    return True


def kill_all(agent: psutil.Process, directory: Path, options: argparse.Namespace, steps: int) -> list[Kill]:
    """Kill one rank after another, each in an attempt of its own; returns the kills.

    Half of them come while the processes start, at an instant drawn from the time that the start took before; the
    other half wait for training. None waits longer than until its share of all steps is done: the job must not
    finish early.
    """
    draw = random.Random(options.seed)
    kills: list[Kill] = []
    start_s = 5.0
    deadline = time.monotonic() + options.timeout
    for number in range(options.kills):
        if not wait_until(partial(has_come, agent, number, options.ranks), agent, deadline - time.monotonic()):
            raise CampaignFailed(f"attempt {number} has not come, after {len(kills)} kills: {sorted(workers(agent))}")
        appeared, before = time.monotonic(), newest_step(directory)
        enough = partial(has_saved, directory, steps * (number + 1) // (options.kills + 1))
        if draw.random() < 0.5:
            wait_until(enough, agent, draw.uniform(0, start_s))
        else:
            if wait_until(partial(has_saved, directory, before + 1), agent, 60):
                start_s = time.monotonic() - appeared
            wait_until(enough, agent, draw.uniform(0, TRAINING_S))
            time.sleep(draw.uniform(0, 0.2))  # not always right after a snapshot
        rank = draw.randrange(options.ranks)
        victim = workers(agent).get(number, {}).get(rank)
        if victim is None or victim.ppid() != agent.pid:
            raise CampaignFailed(f"attempt {number} failed by itself, after {len(kills)} kills")
        victim.send_signal(signal.SIGKILL)
        after = time.monotonic() - appeared
        kills.append(Kill(time.time(), rank, victim.pid, number, round(after, 3)))
        print(f"kill {number + 1}: rank {rank}, {after:.2f} s after its start", flush=True)
    return kills


def train(directory: Path, options: argparse.Namespace, epochs: int, steps: int, kills: int) -> dict[str, Any]:
    """Run one job, killed or (`kills` 0) not; returns its exit code, its kills and how many attempts it took."""
    killed: list[Kill] = []
    attempts = 0

    def over() -> bool:
        nonlocal attempts
        attempts = max([attempts, *(number + 1 for number in workers(agent))])
        return agent.poll() is not None

    with job(directory, options.ranks, epochs, options.seed, kills + 10) as agent:
        killed = kill_all(agent, directory, options, steps) if kills else []
        if not wait_until(over, agent, options.timeout) and agent.poll() is None:
            raise CampaignFailed(f"the job did not end within {options.timeout:g} s of its last kill")
        return {"exit_code": agent.wait(), "kills": killed, "attempts": attempts}


def campaign(options: argparse.Namespace, directory: Path) -> tuple[dict[str, bool], dict[str, Any]]:
    """The uninterrupted job, then the killed one; the claims about the second, and its figures."""
    samples = len(load(DataSpec("digits", None)).train)  # type: ignore[arg-type]  # map-style: it has a length
    per_epoch = Plan(samples, DEFAULT_BATCH).steps_per_epoch
    epochs = max(2, math.ceil(options.kills * STEPS_PER_KILL / per_epoch))
    reference = train(directory / "reference", options, epochs, 0, kills=0)
    if reference["exit_code"] != 0:
        raise CampaignFailed("the uninterrupted job failed")
    outcome = train(directory / "killed", options, epochs, epochs * per_epoch, options.kills)
    if not (directory / "killed" / "report.json").exists():
        raise CampaignFailed(f"the job ended with exit code {outcome['exit_code']} and no report")
    claims, figures = judge(directory / "killed", directory / "reference", outcome, epochs, samples)
    return claims, figures | {"each kill": [asdict(kill) for kill in outcome["kills"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="ranks to kill, one after another")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the job")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants, the victims and the training")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="limit for each of both jobs")
    options = parser.parse_args()
    if options.kills < 1 or options.ranks < 1:
        raise UsageError("--kills and --ranks must be at least 1")
    directory = Path(tempfile.mkdtemp(prefix="restart-campaign-"))
    started = time.monotonic()
    claims: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    failure = None
    try:
        claims, figures = campaign(options, directory)
    except CampaignFailed as error:
        failure = str(error)
    passed = failure is None and all(claims.values())
    result = {"ranks": options.ranks, "seed": options.seed, **figures, "claims": claims, "failure": failure}
    result |= {"passed": passed, "seconds": round(time.monotonic() - started, 1)}
    for name, value in result.items():
        if name != "each kill":
            print(f"{name:24} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if passed:
        shutil.rmtree(directory)
    else:
        print(f"what it left behind is in {directory}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
