"""The way home: the README's loop and a foreign script, killed by hand while they run, end as if nothing had been."""

import difflib
import json
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import REPO, Completed, Running, running, torchrun_cmd, torchrun_env

from course_lib.engine import read_events

FOREIGN = REPO / "tests" / "foreign"


def kill_a_worker(job: Running, run_dir: Path, step: int) -> None:
    """SIGKILL a rank once the run's events show that it has done `step`."""
    while not any(event["step"] >= step for event in read_events(run_dir).named("step")):
        assert job.popen.poll() is None and time.monotonic() < job.deadline, job.output()
        time.sleep(0.01)
    workers = psutil.Process(job.pid).children()
    random.choice(workers).kill()


def train(script: Path, folder: Path, run_dir: Path, kill_at: int | None) -> Completed:
    folder.mkdir()
    with running(torchrun_cmd(script=script, max_restarts=2), cwd=folder, env=torchrun_env()) as job:
        if kill_at is not None:
            kill_a_worker(job, run_dir, kill_at)
        return job.wait()


def compare(script: Path, tmp_path: Path, run: str, kill_at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    reports = []
    for name, kill in (("calm", None), ("killed", kill_at)):
        run_dir = tmp_path / name / run
        done = train(script, tmp_path / name, run_dir, kill)
        assert done.returncode == 0, done.tail()
        reports.append(json.loads((run_dir / "report.json").read_text()))
    calm, killed = reports
    assert (calm["generations"], killed["generations"]) == (1, 2)
    for digest in ("weights_sha256", "optimizer_sha256"):
        assert calm[digest] == killed[digest]
    return calm, killed


def readme_loop() -> str:
    match = re.search(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_readme_loop_survives(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    assert "epochs=200" in readme_loop()  # time enough to kill it by hand
    script.write_text(readme_loop().replace("epochs=200", "epochs=10"))
    assert len([line for line in readme_loop().splitlines() if line]) <= 22
    calm, _ = compare(script, tmp_path, "runs/mine", kill_at=130)
    assert calm["steps"] == 10 * 29


def test_a_foreign_script_needs_fifteen_lines(tmp_path: Path) -> None:
    before, after = ((FOREIGN / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    assert touched(before, after) <= 15
    calm, _ = compare(FOREIGN / "after.py", tmp_path, "run", kill_at=17)
    assert calm["steps"] == 4 * 11


def touched(before: list[str], after: list[str]) -> int:
    """Lines of the new text that were added or changed, apart from indentation, blanks and the docstring."""
    old, new = ([line.strip() for line in lines[1:] if line.strip()] for lines in (before, after))
    return sum(line.startswith("+ ") for line in difflib.ndiff(old, new))


@pytest.mark.parametrize("name", ["before", "after"])
def test_the_foreign_scripts_run_as_they_are(name: str, tmp_path: Path, launch: Callable[..., Completed]) -> None:
    done = launch([sys.executable, FOREIGN / f"{name}.py"], env=torchrun_env())
    assert done.returncode == 0, done.tail()
