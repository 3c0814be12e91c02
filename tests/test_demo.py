"""`make demo`: a job that is killed, one that isn't, and the proof that both are the same."""

import json
import sys
from pathlib import Path

import pytest
from helpers import REPO, Completed, launch, torchrun_env


def demo(run_dir: Path, *options: str) -> Completed:
    command = [sys.executable, REPO / "scripts/crash_and_resume.py", "--run-dir", run_dir, *options]
    return launch(command, env=torchrun_env())


def test_the_demo_shows_a_recovery_without_a_difference(tmp_path: Path) -> None:
    done = demo(tmp_path / "demo", "--epochs", "2", "--fault", "kill:rank=1,step=27")
    assert done.returncode == 0, done.tail()
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["bit_identical"] and report["max_abs_loss_difference"] == 0.0
    assert (report["restarts"], report["steps"], report["steps_replayed"]) == (1, 48, 7)
    assert (tmp_path / "demo" / "recovery.png").stat().st_size > 10_000
    shown = done.output.splitlines()
    assert sum(line.startswith("epoch 2/2 | ") for line in shown) == 2, "each job's own lines are shown"
    assert any(line.split() == ["bit-identical", "yes"] for line in shown)


def test_bad_usage_is_one_line(tmp_path: Path) -> None:
    done = demo(tmp_path / "demo", "--epochs", "1")
    assert done.returncode == 2 and "--epochs must be at least 2" in done.output
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_a_job_that_dies_for_good_fails_the_demo(tmp_path: Path) -> None:
    done = demo(tmp_path / "demo", "--epochs", "2", "--fault", "exception:rank=1,step=3,times=9")
    assert done.returncode == 1
    assert "JobFailed: the job ended with exit code 1" in done.output and "Root Cause" in done.output, done.tail()
