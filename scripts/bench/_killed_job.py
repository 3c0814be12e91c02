"""A training job that saves after each step, and whose ranks are killed: the last published step is found each time."""

import os
import random
import signal
import time
from pathlib import Path

from _verdict import Kill, judge

from course_lib.engine import Plan, read_events
from course_lib.engine.runlog import Event
from course_lib.lab.crash_kills import left_over
from course_lib.lab.crash_trials import Tally
from course_lib.lab.launch import Job, start
from course_lib.workloads.data import DataSpec, load

SCRIPT = Path(__file__).resolve().parents[1] / "ddp_torchrun.py"
BATCH, RANKS, STEPS_PER_KILL, TRAINING_S, LIMIT_S = 128, 2, 40, 0.6, 3600.0


def launch(directory: Path, epochs: int, seed: int, restarts: int) -> Job:
    """The job; all its processes end with the block that it is used in."""
    directory.mkdir()
    options = f"--epochs {epochs} --seed {seed} --global-batch-size {BATCH} --snapshot-every 1 --keep 2 --device cpu"
    agent = f"torchrun --standalone --nproc-per-node {RANKS} --max-restarts {restarts}"
    return start(f"{agent} '{SCRIPT}' {options} --run-dir '{directory}'", limit_s=LIMIT_S)


def killed_job(scratch: Path, kills: int, seed: int) -> Tally:
    """Kill random ranks of one job, and compare its end with that of an undisturbed one."""
    samples = len(load(DataSpec("digits", None)).train)  # type: ignore[arg-type]  # map-style: it has a length
    epochs = -(-(kills + 1) * STEPS_PER_KILL // Plan(samples, BATCH).steps_per_epoch)
    calm, killed = scratch / "calm", scratch / "killed"
    with launch(calm, epochs, seed, 0) as job:
        job.wait(show=False)
    tally = Tally()
    with launch(killed, epochs, seed, kills + 5) as job:
        done = [kill_one(job, killed, number, seed, tally) for number in range(kills)]
        job.wait(check=False, show=False)
    events = read_events(killed).events
    for number, kill in enumerate(done, start=1):
        tally.note(f"kill {number} of rank {kill.rank}", lost(events, kill))
    if not (killed / "report.json").exists():
        tally.note("the job", f"it ended with exit code {job.exit_code} and no report")
        return tally
    attempts = len({event["generation"] for event in events if event["event"] == "step"})
    outcome = {"exit_code": job.exit_code, "kills": done, "attempts": attempts}
    claims, figures = judge(killed, calm, outcome, epochs, samples)
    for claim, holds in claims.items():
        tally.note(claim, None if holds else "it does not hold")
    tally.count("steps", figures["steps"])
    tally.count("steps done again", figures["steps done again"])
    return tally


def kill_one(job: Job, directory: Path, number: int, seed: int, tally: Tally) -> Kill:
    """Wait until training goes on, and kill a rank a little later."""
    draw = random.Random(f"{seed} {number}")
    newest = max((event["step"] for event in job.events if event["event"] == "step"), default=0)
    job.wait_for(newest, restarts=number, timeout_s=120)
    rank = draw.randrange(RANKS)
    appeared, pid = time.monotonic(), job.pid(rank)
    wait = draw.uniform(0, TRAINING_S)
    while time.monotonic() < appeared + wait or not is_saving(directory):  # training alone leaves nothing to recover
        time.sleep(0.001)
        if time.monotonic() > appeared + wait + 5:
            break
    os.kill(pid, signal.SIGKILL)
    for what in left_over(directory / "snapshots"):
        tally.count(what)
    return Kill(time.time(), rank, pid, number, round(time.monotonic() - appeared, 3))


def is_saving(directory: Path) -> bool:
    """Whether a snapshot is on its way to its name."""
    return any("payload" in what for what in left_over(directory / "snapshots"))


def lost(events: list[Event], kill: Kill) -> str | None:
    """What the generation after a kill lost of what was published before."""
    saved = max((e["step"] for e in events if e["event"] == "snapshot_saved" and e["t"] < kill.t), default=0)
    loaded = [e["step"] for e in events if e["event"] == "snapshot_loaded" and e["t"] > kill.t]
    if not loaded:
        return "no generation came after it"
    return None if loaded[0] >= saved else f"step {saved} was published, and step {loaded[0]} was loaded"
