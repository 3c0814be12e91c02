"""Train the series' ResNet-34 on CIFAR-10 three times: undisturbed, stopped by Ctrl-C in epoch 8, and on other ranks.

The interrupted run goes on with the same command; a copy of it goes on with another number of ranks. Say the same
command again whenever it was stopped: what is finished is not done again, and what was not goes on from its newest
snapshot. Then it writes the table and the figure. Give it pictures as --data-root DIR (train/<class>/, test/<class>/),
or --data cifar10 for torchvision's own files.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

import torch

from course_lib.engine import UsageError, read_events, run
from course_lib.lab.launch import start
from course_lib.lab.series import NAMES, write_results

SCRIPT = Path(__file__).parent / "ddp_torchrun.py"
STEPS_PER_EPOCH = 196  # 50,000 samples, 256 a step
EVERY = 49  # so that each epoch ends with a snapshot
STOP_AT = 7 * STEPS_PER_EPOCH + 98  # in the middle of epoch 8
DAYS = 7 * 24 * 3600.0


def command(options: argparse.Namespace, name: str, ranks: int) -> str:
    """What a learner would type for this run."""
    words = ["torchrun", "--standalone", "--nproc-per-node", ranks, "--max-restarts", 3, SCRIPT, "--preset", "series"]
    words += ["--snapshot-every", EVERY, "--amp", options.amp, "--device", options.device, "--data", options.data]
    words += ["--num-workers", options.num_workers, "--seed", options.seed, "--collective-timeout", 600]
    if options.data_root is not None:
        words += ["--data-root", options.data_root]
    return shlex.join(map(str, [*words, "--run-dir", options.run_dir / name]))


def finished(run_dir: Path) -> bool:
    return (run_dir / "report.json").exists()


def train(options: argparse.Namespace, name: str, ranks: int, stop_at: int | None = None) -> None:
    """Train to the end, or until step `stop_at` and then press Ctrl-C; what was done before is not done again."""
    if finished(options.run_dir / name):
        print(f"{name}: finished before", flush=True)
        return
    print(f"{name}: {command(options, name, ranks)}", flush=True)
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    with start(command(options, name, ranks), limit_s=DAYS, environment=environment) as job:
        if stop_at is None:
            job.wait()
            return
        job.wait_for(step=stop_at)
        job.interrupt()
        job.wait(check=False)
    print(f"{name}: stopped by Ctrl-C in step {stop_at}", flush=True)


def was_stopped(run_dir: Path) -> bool:
    return any(event["event"] == "stop_requested" and event["step"] > STOP_AT for event in read_events(run_dir).events)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("image_folder", "cifar10"), default="image_folder", help="(image_folder)")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="folder of the data")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/series"), metavar="DIR", help="(runs/series)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the first two runs (2)")
    parser.add_argument("--other-ranks", type=int, help="ranks that the third goes on with (3, on GPUs 1)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank on the CPU (1)")
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="bf16", help="(bf16)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    parser.add_argument("--num-workers", type=int, default=0, metavar="K", help="loader processes of a rank (0)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="folder for the table and the picture (the run directory)"
    )
    parser.add_argument("--only", choices=NAMES, help="one of the three runs, without the table")
    options = parser.parse_args()
    if options.data == "image_folder" and options.data_root is None:
        raise UsageError("--data-root DIR is missing: a folder with train/<class>/ and test/<class>/")
    if options.other_ranks is None:  # NCCL wants a GPU for each rank, and the reader may have two
        options.other_ranks = 1 if options.device != "cpu" and torch.cuda.is_available() else 3
    if min(options.ranks, options.other_ranks, options.threads) < 1:
        raise UsageError("--ranks, --other-ranks and --threads must be at least 1")
    if options.ranks == options.other_ranks:
        raise UsageError("--other-ranks must differ from --ranks")
    options.results = options.results or options.run_dir
    for folder in (options.run_dir, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = parse()
    undisturbed, interrupted, moved = NAMES
    wanted = NAMES if options.only is None else (options.only,)
    if undisturbed in wanted:
        train(options, undisturbed, options.ranks)
    if interrupted in wanted or moved in wanted:
        here = options.run_dir / interrupted
        if not finished(here) and not (here.exists() and was_stopped(here)):
            train(options, interrupted, options.ranks, stop_at=STOP_AT)
        if not (options.run_dir / moved).exists():
            if finished(here):
                sys.exit(f"{here} is finished, so nothing of it can go on on other ranks: remove it and start again")
            part = options.run_dir / f".{moved}"  # a copy that was interrupted must not pass for a whole one
            shutil.rmtree(part, ignore_errors=True)
            Path(shutil.copytree(here, part)).rename(options.run_dir / moved)
    if interrupted in wanted:
        train(options, interrupted, options.ranks)
    if moved in wanted:
        train(options, moved, options.other_ranks)
    if options.only is None:
        print(write_results(options.run_dir, options.results))


if __name__ == "__main__":
    run(main)
