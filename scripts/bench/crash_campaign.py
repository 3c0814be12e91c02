"""Crash saves in every way there is, and check that the snapshot store loses nothing and loads nothing wrong.

images    the machine dies after each operation on files, and each state is tried that its disk may then be in
places    a process is killed before and after each operation, and in the middle of each write
random    a process that saves without end is killed at random instants, with small states and with 20 MB
again     every process of a run dies at the same place, and disk use stays bounded
syscalls  strace kills a process at each of its system calls, or lets the call fail with EIO or ENOSPC
others    images, places and random for the usual ways of saving, for comparison; they do lose
job       random ranks of a training job under torchrun that saves after each step are killed

After each crash, a process that starts has to find the last step that was published, or the one that was being
published, bit for bit, and can save the next. All but the others have to be without a failure, else the exit code is 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _killed_job import killed_job

from course_lib.engine import UsageError, run
from course_lib.lab.crash_kills import die_again_and_again, kill_at_random, kill_everywhere
from course_lib.lab.crash_syscalls import CALLS, KILL, CannotTrace, at_every_call
from course_lib.lab.crash_trials import Tally, Trial, machine_dies
from course_lib.lab.crash_ways import WAYS
from course_lib.lab.launch import JobFailed

OURS = WAYS["store"]
LARGE = 2_500_000  # numbers of each of two tensors: 20 MB
Rows = Iterator[tuple[str, Tally]]


def images(scratch: Path, options: argparse.Namespace) -> Rows:
    yield "machine dies", machine_dies(Trial(OURS), scratch)
    yield "machine dies, no hard links", machine_dies(Trial(OURS, links=False), scratch)
    yield "machine dies, 2 kept", machine_dies(Trial(OURS, keep=2, numbers=400), scratch)
    yield "killed, then machine dies", machine_dies(Trial(OURS, saves=2), scratch, options.every)


def places(scratch: Path, options: argparse.Namespace) -> Rows:
    yield "killed at a place", kill_everywhere(Trial(OURS), scratch, options.every)
    yield "killed at a place, no hard links", kill_everywhere(Trial(OURS, links=False), scratch, options.every)
    whole = Tally()
    for before in Random(options.seed).sample(range(1, 50), max(1, 8 // options.every)):
        whole.add(kill_everywhere(Trial(OURS, saves=2), scratch, options.every, before))
    yield "killed after one was killed", whole


def random(scratch: Path, options: argparse.Namespace) -> Rows:
    large = options.kills // 6
    for name, numbers, kills in (("small", 1500, options.kills - large), ("20 MB", LARGE, large)):
        with TemporaryDirectory(dir=scratch) as folder:
            yield f"random kills, {name}", kill_at_random(Trial(OURS, numbers, 2), Path(folder), kills, options.seed)


def again(scratch: Path, options: argparse.Namespace) -> Rows:
    trial, tally = Trial(OURS, keep=2), Tally()
    for place in range(1, 60, options.every):
        with TemporaryDirectory(dir=scratch) as folder:
            trial.live(Path(folder), lambda step: None)
            tally.note(f"all die at place {place}", die_again_and_again(trial, Path(folder), place, options.deaths))
    yield f"{options.deaths} deaths at one place", tally


def syscalls(scratch: Path, options: argparse.Namespace) -> Rows:
    trial = Trial(OURS, saves=2)
    try:
        yield "killed at a system call", at_every_call(trial, scratch, list(CALLS), KILL, options.every)
        flat = Trial(OURS, saves=2, links=False)
        yield "killed at a rename, no hard links", at_every_call(flat, scratch, ["rename"], KILL, options.every)
        for error in ("EIO", "ENOSPC"):
            yield error, at_every_call(trial, scratch, list(CALLS), f"error={error}", options.every)
    except CannotTrace as error:
        print(f"system calls are left out: {error}", file=sys.stderr)


def job(scratch: Path, options: argparse.Namespace) -> Rows:
    try:
        yield "killed ranks of a job", killed_job(scratch, options.job_kills, options.seed)
    except JobFailed as error:
        yield "killed ranks of a job", Tally(1, [str(error)])


def others(scratch: Path, options: argparse.Namespace) -> Rows:
    for name in [name for name in WAYS if name != "store"]:
        trial = Trial(WAYS[name], numbers=1000, saves=2)
        yield f"{name}: machine dies", machine_dies(trial, scratch)
        yield f"{name}: killed at a place", kill_everywhere(trial, scratch)
        with TemporaryDirectory(dir=scratch) as folder:
            large = Trial(WAYS[name], numbers=LARGE)
            yield f"{name}: random kills", kill_at_random(large, Path(folder), options.kills // 40, options.seed)


PARTS: dict[str, Callable[[Path, argparse.Namespace], Rows]] = {
    part.__name__: part for part in (images, places, random, again, syscalls, others, job)
}


def parse() -> argparse.Namespace:
    """The options; raises UsageError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts (all)")
    parser.add_argument("--kills", type=int, default=1000, help="kills at random instants (1000)")
    parser.add_argument("--job-kills", type=int, default=20, help="kills of a rank of the training job (20)")
    parser.add_argument("--deaths", type=int, default=50, help="deaths in a row at each place, for `again` (50)")
    parser.add_argument("--every", type=int, default=1, help="try each Nth place and system call only (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants, the victims and the training (0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    for name in ("kills", "job_kills", "deaths", "every"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # a process that forks has no threads to lose
    started = time.monotonic()
    rows: dict[str, dict[str, Any]] = {}
    failed = False
    with TemporaryDirectory(prefix="crash-campaign-") as folder:
        for part in (name for name in PARTS if name in options.only):  # the last one starts threads
            begun = time.monotonic()
            for name, tally in PARTS[part](Path(folder), options):
                seconds, begun = round(time.monotonic() - begun, 1), time.monotonic()
                rows[name] = {"part": part, "tried": tally.tried, "failures": len(tally.failures), "seconds": seconds}
                rows[name] |= {"counts": tally.counts, "first failures": tally.failures[:5]}
                details = ", ".join(f"{number} {what}" for what, number in tally.counts.items() if number)
                print(f"{name:40} {tally.tried:>7} tried {len(tally.failures):>6} failed   {details}", flush=True)
                if part != "others" and tally.failures:
                    failed = True
                    print(*(f"    {failure}" for failure in tally.failures[:5]), sep="\n", flush=True)
    result = {"seed": options.seed, "rows": rows, "passed": not failed, "seconds": round(time.monotonic() - started, 1)}
    print(f"{'passed' if not failed else 'FAILED'} in {result['seconds']} s")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
