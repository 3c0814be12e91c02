"""Notebook 04's "Your script": what counts as a change, and what the trial says of each way to get it wrong."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REPO

from course_lib.lab import claims, launch, your_script
from course_lib.lab.exercises import n04
from course_lib.lab.your_script import ORIGINAL, SOLVED, added_lines, changes, recovery, your_copy

STEPS, SIZE = 75, 32


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# --- the copy and its difference ----------------------------------------------------------------------------------


def test_a_copy_is_open_until_it_is_changed_and_is_never_overwritten(tmp_path: Path) -> None:
    copy = your_copy(tmp_path / "yours")
    assert copy.read_text() == ORIGINAL.read_text() and added_lines(copy) == 0
    assert n04.your_script.verdict(copy, tmp_path, None).startswith("open: ")
    copy.write_text("if True:\n" + ORIGINAL.read_text())
    assert n04.your_script.verdict(copy, tmp_path, None) == (
        "not yet: line 2 of your copy is no Python: expected an indented block after 'if' statement on line 1"
    )
    copy.write_text("mine = 1\n")
    assert your_copy(tmp_path / "yours").read_text() == "mine = 1\n"


def test_what_counts_as_a_changed_line(tmp_path: Path) -> None:
    lines = ORIGINAL.read_text().splitlines()
    first = lines.index("def main(epochs, run_dir):") + 1
    moved = lines[:first] + [f"    {line}" for line in lines[first:]]
    assert added_lines(write(tmp_path / "a.py", "\n".join(moved))) == 0
    fewer = [line for line in lines if "print(" not in line]
    assert added_lines(write(tmp_path / "b.py", "\n".join(["# a word", "", *fewer]))) == 0
    assert added_lines(write(tmp_path / "c.py", "\n".join([*lines, "x = 1  # new", "y = 2"]))) == 2
    assert added_lines(SOLVED) == 12, "the notebook says twelve"


def test_the_difference_is_shown_with_a_link_to_the_editor(tmp_path: Path) -> None:
    shown = changes(SOLVED)
    assert "12 lines are new or changed, of 15 that you may" in shown.summary
    assert '<a href="solutions/terrain.py">' in shown._repr_html_()
    assert "+    with open_world() as world:" in shown.text and "-    dist.init_process_group" in shown.text
    assert changes(your_copy(tmp_path)).text.count("\n") == 1, "two heads and no change"


# --- the trial's verdict, from records ----------------------------------------------------------------------------


def record(run: Path, lives: list[tuple[int, int]], weights: str = "w", average: float = 1.0, size: int = SIZE) -> None:
    """A run of two ranks whose generations did the steps [low, high), with the report and the result that it left."""
    per_epoch = 480 // size
    files: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for generation, (low, high) in enumerate(lives, 1):
        for rank, events in files.items():
            who = {"rank": rank, "world_size": 2, "generation": generation}
            events.append({"event": "snapshot_loaded", "step": low, **who})
            for step in range(low, high):
                at = step % per_epoch * size
                what = {"step": step, "epoch": step // per_epoch, "loss": 1.0, "lr": 0.1, "samples": [at, at + size]}
                events.append({"event": "step", **what, **who})
                if (step + 1) % per_epoch == 0:
                    mean = {"epoch": step // per_epoch, "steps": per_epoch, "train_loss": 1.0}
                    events.append({"event": "epoch", **mean, **who})
            if generation == len(lives):
                events.append({"event": "finish", **who})
    for rank, events in files.items():
        text = "".join(json.dumps({"t": float(n), **event}) + "\n" for n, event in enumerate(events))
        write(run / "events" / f"host-{rank}.jsonl", text)
    write(run / "report.json", json.dumps({"steps": lives[-1][1], "weights_sha256": weights}))
    torch.save({"weight": torch.full((2,), average)}, run / "terrain.pt")


CALM, KILLED = [(0, STEPS)], [(0, 14), (10, 29), (20, STEPS)]
Change = Callable[[Path, Path], object]


def without_losses(calm: Path, killed: Path) -> None:
    for path in calm.rglob("*.jsonl"):
        path.write_text(path.read_text().replace('"loss"', '"no_loss"'))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda calm, killed: None, None),
        (without_losses, "give it to batch.backward(loss)"),
        (
            lambda calm, killed: record(calm, [(0, 150)], size=16),
            "it trains 150 steps, the original 75, with 16 samples",
        ),
        (lambda calm, killed: record(killed, CALM), "nobody died"),
        (lambda calm, killed: record(killed, [(0, 14), (0, STEPS)]), "it began again at step 0"),
        (lambda calm, killed: record(killed, KILLED, weights="v"), "what has a memory, and isn't in the TrainState?"),
        (lambda calm, killed: record(killed, KILLED, average=2.0), "the weights are equal, but terrain.pt isn't"),
        (lambda calm, killed: (killed / "terrain.pt").unlink(), "it no longer leaves a terrain.pt"),
    ],
)
def test_two_records_are_compared(
    change: Change, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_both(script: Path, calm: Path, killed: Path, kill: Any) -> None:
        record(calm, CALM)
        record(killed, KILLED)
        change(calm, killed)

    monkeypatch.setattr(your_script, "_train_both", train_both)
    verdict = n04.your_script.verdict(SOLVED, tmp_path, None)
    assert verdict.startswith("solved: ") if says is None else says in verdict and verdict.startswith("not yet: ")
    assert recovery(SOLVED, tmp_path) is not None
    assert recovery(your_copy(tmp_path / "yours"), tmp_path) is None, "an open exercise shows no picture"


def test_before_a_trial_there_is_no_picture(tmp_path: Path) -> None:
    assert recovery(SOLVED, tmp_path) is None


# --- the trial itself; that of the solution, killed once, and of wrong answers is in test_checks.py ----------------


@pytest.mark.slow
def test_the_solution_survives_two_kills(tmp_path: Path) -> None:
    def kill(job: launch.Job) -> None:
        for deaths, step in enumerate((12, 27)):
            job.wait_for(step=step, restarts=deaths)
            os.kill(job.pid(rank=1 - deaths), signal.SIGKILL)

    assert n04.your_script.verdict(SOLVED, tmp_path, kill).startswith("solved: ")
    assert claims.restarts(tmp_path / "killed") == 2


def test_a_script_that_fails_is_told_what_it_said(tmp_path: Path) -> None:
    text = ORIGINAL.read_text().replace("import argparse\n", "import argparse\nraise ValueError('no such column')\n")
    write(tmp_path / "mine.py", text)
    verdict = n04.your_script.verdict("mine.py", tmp_path, lambda job: job.wait_for(step=12))
    assert verdict == "not yet: the job ended with exit code 1 before step 12 was done; ValueError: no such column"


def test_a_kill_that_raises_leaves_no_process(tmp_path: Path) -> None:
    jobs: list[launch.Job] = []

    def kill(job: launch.Job) -> None:
        jobs.extend(launch._started[-2:])
        raise NameError("sginal")

    verdict = n04.your_script.verdict(SOLVED, tmp_path, kill)
    assert verdict == "not yet: your answer raised NameError: sginal"
    assert len(jobs) == 2 and not any(job.processes() for job in jobs)


# --- as committed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "says"), [("04_torchrun", "open: "), ("solutions/04_torchrun", "solved: ")])
def test_the_committed_notebook_says_where_the_exercise_stands(name: str, says: str) -> None:
    cells = json.loads((REPO / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    outputs = next(cell["outputs"] for cell in cells if cell["id"] == "code-your-script")
    assert "".join(outputs[0]["text"]).startswith(says)
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures == (says == "solved: ")
