"""Somebody's training script, made to survive: the learner's copy, its difference, and the trial that it must pass."""

import ast
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from course_lib.engine import read_events
from course_lib.lab.answers import same
from course_lib.lab.checks import Exercise
from course_lib.lab.claims import every_sample_once, restarts, same_weights
from course_lib.lab.diff import Diff, unified_diff
from course_lib.lab.launch import Job, JobFailed, start
from course_lib.lab.plots import recovery_figure

_NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ORIGINAL, SOLVED = _NOTEBOOKS / "terrain.py", _NOTEBOOKS / "solutions" / "terrain.py"
MOST_LINES = 15
_STEPS = 75  # of the original: 5 epochs of 480 squares, 16 on each of two ranks
_AGENT = "torchrun --standalone --nproc-per-node 2 --max-restarts"
# How a worker's last words begin: Python's, the engine's, argparse's.
_WORDS = re.compile(r"(rank \d+[^:]*: )?([\w.]*(Error|Exception): |error: )|[\w.]+: error: ")

Kill = Callable[[Job], object]


def your_copy(folder: Path = _NOTEBOOKS / "yours") -> Path:
    """The learner's own copy of the script; one that is there already stays as it is.

    It lies beside the notebooks, since `make lab` shows no other folder. The folder hides itself from git.
    """
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    copy = folder / ORIGINAL.name
    if not copy.exists():
        shutil.copyfile(ORIGINAL, copy)
    return copy


def _difference(script: Path, context: int = 0) -> list[str]:
    return unified_diff(ORIGINAL.read_text().splitlines(), script.read_text().splitlines(), context)


def added_lines(script: Path) -> int:
    """How many lines are new or changed; blank ones, comments, and lines that only moved sideways are free."""
    lines = [line[1:].strip() for line in _difference(script) if line.startswith("+")]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def changes(script: Path) -> Diff:
    """What `script` changes in the original, and a link that opens it from a notebook."""
    name = os.path.relpath(script, _NOTEBOOKS.parent)
    head = [f"--- notebooks/{ORIGINAL.name}", f"+++ {name}"]
    summary = f"{added_lines(script)} lines are new or changed, of {MOST_LINES} that you may."
    return Diff("\n".join([*head, *_difference(script, context=2)]), summary, os.path.relpath(script, _NOTEBOOKS))


def recovery(script: Path, folder: Path) -> Figure | None:
    """The killed run over the undisturbed one, once there has been a trial of a changed `script` in `folder`."""
    calm, killed = (read_events(folder / name).events for name in ("calm", "killed"))
    return recovery_figure(calm, killed) if calm and killed and _difference(script) else None


@dataclass(frozen=True)
class ScriptExercise(Exercise):
    """An exercise whose answer is a script: open while it does what the original does."""

    def verdict(self, answer: Any, *evidence: Any) -> str:
        if isinstance(answer, Path) and answer.is_file() and not _difference(answer):
            return "open: your copy is still the script that dies; change it, and run this cell again"
        return super().verdict(answer, *evidence)


# --- the trial ----------------------------------------------------------------------------------------------------


def judge(answer: str | Path, folder: Path, kill: Kill) -> str | None:
    """Train twice with the script, in `folder`: undisturbed, and while `kill(job)` does its worst; then compare."""
    script = folder / answer
    if not script.is_file():
        return f"there is no {script.name}: run the cell that makes your copy"
    try:
        ast.parse(script.read_text())
    except SyntaxError as error:
        return f"line {error.lineno} of your copy is no Python: {error.msg}"
    if (count := added_lines(script)) > MOST_LINES:
        return f"{count} lines are new or changed, {MOST_LINES} are enough: what does steps() do that you do as well?"
    calm, killed = folder / "calm", folder / "killed"
    failure = _train_both(script, calm, killed, kill)
    return failure or _problem_with_records(calm, killed) or _problem_with_results(calm, killed)


def _train_both(script: Path, calm: Path, killed: Path, kill: Kill) -> str | None:
    """Both jobs at once, for most of their time goes into starting; returns what went wrong, None if nothing did."""
    for run in (calm, killed):
        shutil.rmtree(run, ignore_errors=True)
    with _start(script, killed, max_restarts=2) as job, _start(script, calm, max_restarts=0) as twin:
        try:
            kill(job)
            job.wait(show=False)
            twin.wait(show=False)
        except JobFailed as error:
            if not read_events(killed).named("step") and job.exit_code == 0:
                return "it recorded no step in its --run-dir, so it can't resume there: do its steps come from steps()?"
            what = str(error).splitlines()[0].split(": torchrun")[0]
            return f"{what}{_last_words(job) or _last_words(twin)}"
    return None


def _start(script: Path, run: Path, max_restarts: int) -> Job:
    command = f"{_AGENT} {max_restarts} {shlex.quote(str(script))} --run-dir {shlex.quote(str(run))}"
    return start(command, limit_s=90, environment={"CUDA_VISIBLE_DEVICES": ""})


def _last_words(job: Job) -> str:
    """What a worker said of the cause; a survivor's lost peer is none."""
    lines = [line.strip() for rank in (0, 1) for line in job.output(rank).splitlines()]
    words = [line for line in lines if _WORDS.match(line) and "PeerLost" not in line and "onnection" not in line]
    return f"; {words[-1].split(' [traceback')[0][:200]}" if words else ""


def _problem_with_records(calm: Path, killed: Path) -> str | None:
    steps = read_events(calm).named("step")
    if any("loss" not in step for step in steps):
        return "its steps have no loss: give it to batch.backward(loss), which also weighs it"
    if (count := len({step["step"] for step in steps})) != _STEPS:
        return f"it trains {count} steps, the original {_STEPS}, with 16 samples on each of two ranks: another training"
    if restarts(killed) == 0:
        return "nobody died: let your kill(job) send SIGKILL to a rank that is training"
    if any(load["step"] == 0 for load in read_events(killed).named("snapshot_loaded") if load["generation"] > 1):
        return "it began again at step 0: when is the first snapshot due, and when did you kill?"
    return None if every_sample_once(killed) else "some sample was not used exactly once"


def _problem_with_results(calm: Path, killed: Path) -> str | None:
    if not same_weights(calm, killed):
        return "killed, it ends with other weights than undisturbed: what has a memory, and isn't in the TrainState?"
    results = [run / "terrain.pt" for run in (calm, killed)]
    if not all(path.is_file() for path in results):
        return "it no longer leaves a terrain.pt in its --run-dir"
    left, right = (torch.load(path, map_location="cpu", weights_only=True) for path in results)
    if not same(left, right):
        return "the weights are equal, but terrain.pt isn't: what goes into that file, and who remembers it?"
    return None
