"""Short real jobs for tests: the digits in six steps, whole reports, and the proof that every sample counted once."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from helpers import Completed, torchrun

from course_lib.engine import read_events
from course_lib.engine.report import surviving_steps
from course_lib.lab.ledger import check_ledger

SCRIPT = "scripts/ddp_torchrun.py"
SAMPLES, BATCH, EPOCHS, EVERY = 1500, 500, 2, 2
STEPS = 6  # two epochs of three steps
SHORT = ("--global-batch-size", BATCH, "--epochs", EPOCHS, "--snapshot-every", EVERY)


def job(run_dir: Path, *options: str | float, ranks: int = 2, max_restarts: int = 0) -> Completed:
    """Run the short job under a plain torchrun."""
    return torchrun(*SHORT, *options, script=SCRIPT, nproc=ranks, max_restarts=max_restarts, run_dir=run_dir)


def report(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "report.json").read_text()))


@cache
def undisturbed(*options: str | float, ranks: int = 2) -> dict[str, Any]:
    """The report of the short job without a fault, run once in a test session."""
    with TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        done = job(run_dir, *options, ranks=ranks)
        assert done.returncode == 0, done.tail()
        assert check_ledger(run_dir) == []  # of other runs, conftest sees to it at the end
        return report(run_dir) | {"losses": losses(run_dir)}


def losses(run_dir: Path) -> list[float]:
    """The loss of each step of the surviving history."""
    return [event["loss"] for event in surviving_steps(read_events(run_dir).events).values()]


def assert_same_result(run_dir: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """The run's weights, optimizer and losses are those of the reference, bit for bit; returns its report."""
    mine = report(run_dir)
    for key in ("weights_sha256", "optimizer_sha256", "steps", "epochs", "test_accuracy"):
        assert mine[key] == reference[key], key
    assert losses(run_dir) == reference["losses"]
    assert_samples_once(run_dir)
    return mine


def assert_samples_once(run_dir: Path, samples: int = SAMPLES, epochs: int = EPOCHS) -> None:
    """Along the surviving history the steps' intervals cover each epoch without a gap or an overlap."""
    steps = surviving_steps(read_events(run_dir).events)
    assert list(steps) == list(range(len(steps)))
    for epoch in range(epochs):
        at = 0
        for low, high in (e["samples"] for e in steps.values() if e["epoch"] == epoch):
            assert low == at and high > low
            at = high
        assert at == samples


def assert_snapshots_finite(run_dir: Path) -> None:
    """No snapshot holds a NaN or an infinity."""
    paths = list((run_dir / "snapshots").glob("*.pt"))
    assert paths
    for path in paths:
        state = torch.load(path, map_location="cpu", weights_only=True)["state"]
        assert all(bool(t.isfinite().all()) for t in state["model"].values()), path
