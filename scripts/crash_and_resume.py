"""Kill a rank in the middle of a step, let torchrun bring the job back, and compare it with an undisturbed one."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from course_lib.engine import UsageError, read_events, run
from course_lib.lab.launch import fresh_directory, start
from course_lib.lab.plots import max_abs_loss_difference, recovery_figure

SCRIPT = Path(__file__).parent / "ddp_torchrun.py"
FAULT = "kill:rank=1,step=37"


def train(name: str, run_dir: Path, options: argparse.Namespace, *extra: str) -> dict[str, Any]:
    """Run the training script under torchrun and return its report."""
    command = ["torchrun", "--standalone", "--nproc-per-node", options.ranks, "--max-restarts", 3, SCRIPT, *extra]
    command += ["--run-dir", run_dir / name, "--epochs", options.epochs, "--device", options.device]
    with start(shlex.join(map(str, command)), limit_s=600) as job:
        job.wait()
    return dict(json.loads((run_dir / name / "report.json").read_text()))


def compare(run_dir: Path, calm: dict[str, Any], killed: dict[str, Any]) -> dict[str, Any]:
    """The interrupted run's report with the verdict, and the picture beside it."""
    events = [read_events(run_dir / name).events for name in ("uninterrupted", "interrupted")]
    digests = ("weights_sha256", "optimizer_sha256")
    report = killed | {
        "bit_identical": all(calm[digest] == killed[digest] for digest in digests),
        "max_abs_loss_difference": max_abs_loss_difference(*events),
        "restarts": killed["generations"] - 1,
        "uninterrupted": calm,
    }
    (run_dir / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    recovery_figure(*events).savefig(run_dir / "recovery.png", dpi=150)
    return report


def table(report: dict[str, Any]) -> str:
    """The two runs side by side."""
    calm = report["uninterrupted"]
    recovered = ", ".join(f"{seconds:.1f} s" for seconds in report["recovery_seconds"])
    rows = [
        ("", "uninterrupted", "killed and resumed"),
        ("steps", calm["steps"], report["steps"]),
        ("restarts", 0, report["restarts"]),
        ("steps done again", 0, report["steps_replayed"]),
        ("from the kill to the next step", "-", recovered),
        ("test accuracy", f"{calm['test_accuracy']:.2%}", f"{report['test_accuracy']:.2%}"),
        ("weights (SHA-256)", calm["weights_sha256"][:12], report["weights_sha256"][:12]),
        ("bit-identical", "", "yes" if report["bit_identical"] else "NO"),
        ("largest difference of a loss", "", report["max_abs_loss_difference"]),
    ]
    return "\n".join(f"{name:31} {left!s:>14} {right!s:>20}" for name, left, right in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="folder for both runs and the report")
    parser.add_argument("--epochs", type=int, default=4, help="epochs to train")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="cuda needs a GPU per rank")
    parser.add_argument("--fault", default=FAULT, help="what breaks, in the grammar of course_lib/lab/faults.py")
    options = parser.parse_args()
    if options.epochs < 2 or options.ranks < 1:
        raise UsageError("--epochs must be at least 2 (the fault is in the second) and --ranks at least 1")
    for name in ("uninterrupted", "interrupted"):
        fresh_directory(options.run_dir / name)

    print(f"1. A job of {options.ranks} ranks trains undisturbed:", flush=True)
    calm = train("uninterrupted", options.run_dir, options)
    print(f"2. The same job, broken by {options.fault}, recovers by itself:", flush=True)
    killed = train("interrupted", options.run_dir, options, "--fault", options.fault)
    report = compare(options.run_dir, calm, killed)
    print(f"3. The two side by side:\n\n{table(report)}\n")
    print(f"See {options.run_dir / 'recovery.png'} and {options.run_dir / 'report.json'}.")
    if not report["bit_identical"] or report["max_abs_loss_difference"] != 0.0 or report["restarts"] < 1:
        raise RuntimeError("the resumed run is not the uninterrupted one")


if __name__ == "__main__":
    run(main)
