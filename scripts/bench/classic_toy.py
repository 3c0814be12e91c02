"""The torchrun tutorial's toy (`torchrun … 50 10`), killed once: what is lost and repeated there, and here.

Each way is run by torchrun twice: to its end, and with rank 1 killed by SIGKILL in the backward pass of one step, by
default the ninth of epoch 28 (epochs and steps count from 0, as the tutorial's script prints them). All is counted from
what the workers recorded, and the ways are:

    published   as it is published, on gloo: each process draws its own data, and other data after a restart
    seeded      the same with a seed for data and model
    momentum    with that seed, a loss that is not always 0 (mse) and momentum 0.9
    counted     momentum's, and the snapshot says how many epochs are done: only the optimizer is missing then
    engine      momentum's, on this course's Trainer, with a snapshot after as many steps

The agent has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or a restart of the tutorial's script may hang or fail.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _toy_job import BATCH, SAMPLES

from course_lib.engine import UsageError, run
from course_lib.lab.launch import start
from course_lib.lab.toy import TITLES, measure, table

JOB = Path(__file__).resolve().parent / "_toy_job.py"
LIMIT_S = 600.0  # of one run
VARIANT = "--loss mse --momentum 0.9"


def options_of(name: str, seed: int) -> tuple[str, str]:
    """The job's options, and those that only a run that is killed needs: undisturbed they change nothing."""
    seeded = f"--seed {seed}"
    return {
        "published": ("", ""),
        "seeded": (seeded, ""),
        "momentum": (f"{seeded} {VARIANT}", ""),
        "counted": (f"{seeded} {VARIANT}", "--count-finished"),
        "engine": (f"{seeded} {VARIANT} --engine", ""),
    }[name]


def train(options: argparse.Namespace, run_dir: Path, words: str) -> Path:
    """One run to its end."""
    began = time.monotonic()
    command = f"torchrun --standalone --nproc-per-node {options.ranks} --max-restarts 3 '{JOB}' "
    command += f"{options.epochs} {options.save_every} --run-dir '{run_dir}' {words}"
    with start(command, limit_s=LIMIT_S) as job:
        job.wait(show=False)
    print(f"{time.monotonic() - began:5.0f} s  {run_dir.name:<20} {words}", flush=True)
    return run_dir


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50, help="the published command's first number (50)")
    parser.add_argument("--save-every", type=int, default=10, help="its second: epochs between snapshots (10)")
    parser.add_argument("--ranks", type=int, default=4, help="(4)")
    parser.add_argument("--kill-epoch", type=int, default=28, help="epoch in whose middle rank 1 is killed (28)")
    parser.add_argument("--ways", nargs="+", choices=tuple(TITLES), default=list(TITLES), help="(all)")
    parser.add_argument("--seed", type=int, default=0, help="of data and model, where there is one (0)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if min(options.save_every, options.ranks) < 1 or not 0 <= options.kill_epoch < options.epochs:
        raise UsageError("--save-every and --ranks must be at least 1, and --kill-epoch below --epochs, from 0 on")
    return options


def main() -> None:
    options = parse()
    size = -(-SAMPLES // (BATCH * options.ranks))  # steps of an epoch
    kill = f"--fault kill:step={options.kill_epoch * size + size // 2}"
    ways: dict[str, Any] = {}
    undisturbed: dict[str, Path] = {}  # by the job's options: two ways share one
    with tempfile.TemporaryDirectory(prefix="classic-toy-", ignore_cleanup_errors=True) as folder:
        for name in options.ways:
            words, more = options_of(name, options.seed)
            if words not in undisturbed:
                undisturbed[words] = train(options, Path(folder) / f"{name}-undisturbed", words)
            killed = train(options, Path(folder) / f"{name}-killed", " ".join(filter(None, (words, more, kill))))
            ways[name] = {"options": f"{words} {more}".strip()} | measure(undisturbed[words], killed)
    found = {name: getattr(options, name) for name in ("epochs", "save_every", "ranks", "seed")}
    found |= {"load": os.getloadavg()[0], "torch": torch.__version__, "ways": ways}
    print(f"\n{table(found)}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    ours = ways.get("engine")
    if ours is not None and not (ours["same_weights"] and ours["same_optimizer"] and ours["learnt"]):
        sys.exit("the engine's killed run did not end as its undisturbed one")


if __name__ == "__main__":
    run(main)
