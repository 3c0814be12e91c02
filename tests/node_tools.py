"""Clusters for tests: tiny jobs on nodes of this machine, the undisturbed run, and what must hold after each fault."""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import helpers
from helpers import REPO, Completed
from node_job import STEPS

from course_lib.engine import read_events
from course_lib.lab import claims
from course_lib.lab.nodes import Cluster
from course_lib.lab.processes import Process, kernel_mark, marked

SCRIPT = REPO / "tests" / "node_job.py"
LIMIT_S = 240.0  # a bound on hanging, on a machine that does much else
PATH = os.pathsep.join([str(REPO), str(REPO / "tests")])


def cluster(folder: Path, options: str = "", *, nodes: str = "1:3", run: str = "run", **given: Any) -> Cluster:
    """A cluster for node_job.py on the run directory folder/run."""
    environment = {"PYTHONPATH": PATH, **given.pop("environment", {})}
    script = f"{SCRIPT} {options}"
    return Cluster(folder / run, script, nodes, limit_s=LIMIT_S, environment=environment, **given)


@cache
def undisturbed() -> dict[str, Any]:
    """The report of the job alone on one rank, with its `losses`."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "go").touch()
        done = run_alone(folder)
        assert done.returncode == 0, done.tail()
        report = json.loads((folder / "run" / "report.json").read_text())
        return report | {"losses": losses(folder / "run")}


def run_alone(folder: Path) -> Completed:
    """The job as a plain script, on one rank."""
    command = [sys.executable, str(SCRIPT), "--run-dir", str(folder / "run")]
    return helpers.launch(command, env=helpers.torchrun_env({"PYTHONPATH": PATH}))


def losses(run: Path) -> list[float]:
    steps = claims.surviving_steps(read_events(run).events)
    return [event["loss"] for event in steps.values()]


def until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def living() -> list[Process]:
    """What lives of all clusters of this process, the rendezvous processes aside."""
    return [
        p for p in marked(kernel_mark()) if "course_lib.lab.rendezvous" not in p.command and p.command[0] != "sleep"
    ]


def finish(c: Cluster) -> dict[str, Any]:
    """Let the job run to its end and look at what it left: each sample once, the bits of the undisturbed run, and no
    process. Returns its report."""
    (c.run_dir.parent / "go").touch()
    until(lambda: not c.running(), "the nodes do not end: " + c.report(), 120)
    until(lambda: not living(), f"left behind: {living()}", helpers.GRACE)
    c.wait(show=False)
    assert claims.every_sample_once(c.run_dir)
    report = dict(json.loads((c.run_dir / "report.json").read_text()))
    expected = undisturbed()
    for name in ("steps", "epochs", "weights_sha256", "optimizer_sha256"):
        assert report[name] == expected[name], name
    assert report["steps"] == STEPS and losses(c.run_dir) == expected["losses"]
    return report
