"""Exercises of notebook 04."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from course_lib.lab.answers import one_line, same
from course_lib.lab.checks import Exercise, choose, match, predict
from course_lib.lab.crashes import killed_at
from course_lib.lab.job import Job
from course_lib.lab.lineup import suspects
from course_lib.lab.your_script import ORIGINAL, SOLVED, Kill, ScriptExercise
from course_lib.lab.your_script import judge as judge_script

Save = Callable[[dict[str, Any], Path], object]
Load = Callable[[Path], dict[str, Any] | None]

restarts_by_default = predict(
    0,
    wrong=[1, 3],
    hint="torchrun was not told that it may restart anything",
    why="without --max-restarts the first death ends the job",
)
steps_again = predict(
    17,
    wrong=[37, 7, 18],
    hints={
        37: "that would be a run from scratch; where does the newest snapshot stand?",
        7: "that would be right for a snapshot every 10 steps",
        18: "count the finished steps only: step 37 was never finished",
    },
    hint="which step does the newest snapshot stand at, and which step was the last to be finished?",
    why="the snapshot stood at 20; steps 20 to 36 were finished and lost, and step 37 was never done",
)
epochs_in_all = predict(
    11,
    wrong=[8, 14],
    hints={
        8: "that is what a correct resume gives",
        14: "a cut epoch is not finished; count those that reached their end",
    },
    hint="write down, for each generation, the epoch it starts with and those it finishes",
    why="0 1 2 | 2 3 4 | 4 5 | 5 6 7: each restart begins with an epoch that was finished already",
)


# --- save and load ------------------------------------------------------------------------------------------------


def _state(number: int) -> dict[str, Any]:
    weights = torch.full((50, 50), float(number))
    optimizer = {"state": {0: {"momentum_buffer": weights + 0.5}}, "param_groups": [{"lr": 0.1 / number}]}
    return {"model": {"weight": weights}, "optimizer": optimizer, "epoch": number, "next_sample": 64 * number}


def _judge_save_and_load(answer: Any) -> str | None:
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not all(map(callable, answer)):
        return "give both functions: check.save_and_load((save, load))"
    save, load = answer
    with TemporaryDirectory() as folder:
        problem = _without_kills(save, load, Path(folder))
    if problem is not None:
        return problem
    for old in (_state(1), None):
        problem = _with_kills(save, load, old)
        if problem is not None:
            return problem
    return None


def _without_kills(save: Save, load: Load, folder: Path) -> str | None:
    path = folder / "snapshot.pt"
    try:
        nothing = load(path)
    except Exception as error:
        return f"on the very first start there is no file, and load raised {one_line(error)}; let it return None"
    if nothing is not None:
        return "on the very first start there is no file: let load return None"
    for number in (1, 2):
        save(_state(number), path)
        if not same(load(path), _state(number)):
            return "nobody was killed, and load does not return everything that save was given last"
    return None


def _with_kills(save: Save, load: Load, old: dict[str, Any] | None) -> str | None:
    """Kill the save of state 2 at each of its places; afterwards there must be a whole state, and a save must work."""
    at = 0
    while True:
        at += 1
        with TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot.pt"
            if old is not None:
                save(old, path)
            where = killed_at(at, save, _state(2), path)
            if where is None:
                return None
            try:
                found = load(path)
            except Exception as error:
                return f"killed {where}, and load raised {type(error).__name__}: what is left is no whole snapshot"
            if not same(found, _state(2)) and not (same(found, old) if old is not None else found is None):
                return f"killed {where}, and load gives neither the old state nor the new one"
            save(_state(3), path)
            if not same(load(path), _state(3)):
                return f"killed {where}, and the next save no longer works: what did the dead one leave behind?"


def _save(state: dict[str, Any], path: Path) -> None:
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)  # noqa: PTH105  # the notebook says os.replace, as torch's users know it


def _load(path: Path) -> dict[str, Any] | None:
    return dict(torch.load(path, map_location="cpu", weights_only=True)) if path.exists() else None


def _save_in_place(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)


def _save_and_make_room(state: dict[str, Any], path: Path) -> None:
    new = path.with_suffix(".new")
    torch.save(state, new)
    path.unlink(missing_ok=True)
    new.rename(path)


def _save_by_copy(state: dict[str, Any], path: Path) -> None:
    new = path.with_suffix(".new")
    torch.save(state, new)
    shutil.copyfile(new, path)


def _save_weights_only(state: dict[str, Any], path: Path) -> None:
    _save({"model": state["model"], "epoch": state["epoch"]}, path)


def _load_newest(path: Path) -> dict[str, Any] | None:
    """Takes the unfinished file for the newest one."""
    new = path.with_suffix(".new")
    return dict(torch.load(new, map_location="cpu", weights_only=True)) if new.exists() else _load(path)


save_and_load = Exercise(
    "write",
    _judge_save_and_load,
    solution=(_save, _load),
    wrong=[
        (_save_in_place, _load),
        (_save_and_make_room, _load),
        (_save_by_copy, _load),
        (_save_weights_only, _load),
        (_save, _load_newest),
        (_save, lambda path: torch.load(path, map_location="cpu", weights_only=True)),
        _save,
    ],
    why="killed at every line and in the middle of every write, load always found one whole state",
)


# --- evidence -----------------------------------------------------------------------------------------------------

line_up = match(
    suspects(),
    wrong=[
        dict(zip(suspects(), sorted(suspects().values()), strict=True)),
        suspects() | {"5": "scheduler", "7": "optimizer"},
        suspects() | {"4": "position", "6": "epoch off by one"},
    ],
    hint="ask of each curve: when does blue leave zero, does red leave without blue, and where does it end?",
    why="every missing piece has its own fingerprint",
)

who_died = choose(
    "c",
    hints={
        "a": "rank 0 says the most, but read what: somebody closed a connection to it. Who?",
        "b": "rank 1 reports a lost peer, as rank 0 does; a witness, not the cause",
        "d": "the agent ended ranks 0 and 1, but it had a reason: look for a line that speaks of no peer",
    },
    why="rank 2 says in one line what it died of; the other two only noticed that somebody was gone",
)


# --- your script --------------------------------------------------------------------------------------------------


def _kill_rank_0(job: Job) -> None:
    """Rank 0 writes the snapshots; that of step 10 is published well before step 18, also on a busy machine."""
    job.wait_for(step=18)
    os.kill(job.pid(rank=0), signal.SIGKILL)


_EPOCH_SAVES = """
        if dist.get_rank() == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch + 1}, run_dir / "snapshot.pt")
"""
_EPOCH_LOADS = """    first = 0
    if (run_dir / "snapshot.pt").exists():
        snapshot = torch.load(run_dir / "snapshot.pt", map_location="cpu", weights_only=True)
        model.module.load_state_dict(snapshot["model"])
        first = snapshot["epoch"]
    for epoch in range(first, epochs):
"""


def _scripts(folder: Path) -> tuple[Path, Kill]:
    """Scripts as people write them on their way to the solution."""
    before, after = ORIGINAL.read_text(), SOLVED.read_text()
    epochs, steps = "    for epoch in range(epochs):\n", "        for step in trainer.steps():\n"
    end = 'loss {loss.item():.4f}", flush=True)\n'
    scripts = {
        "a-file-each-epoch": _changed(_changed(before, epochs, _EPOCH_LOADS), end, end + _EPOCH_SAVES[1:]),
        "average-forgotten": _changed(after, ', extra={"average": average}', ""),
        "all-by-hand": _changed(after, steps, "".join(f"        before_{n} = {n}\n" for n in range(9)) + steps),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    return folder, _kill_rank_0


def _changed(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new)


your_script = ScriptExercise(
    "write",
    judge_script,
    solution=SOLVED,
    wrong=["a-file-each-epoch.py", "average-forgotten.py", "all-by-hand.py", "nowhere.py"],
    why="killed, it came back and ended with the bits of the undisturbed run, every sample once",
    make_evidence=_scripts,
)
