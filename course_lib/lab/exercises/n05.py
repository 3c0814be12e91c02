"""Exercises of notebook 05."""

import os
from pathlib import Path

from course_lib.lab import checks, fallback, publishing
from course_lib.lab.checks import Exercise, match, predict
from course_lib.lab.left_out import suspects

flipped = predict(
    1.0,
    wrong=[0.25, -0.5, 0.75, 3.4e38],
    hints={
        0.25: "that would take one off the exponent; but its lowest bit is 0, and becomes 1",
        -0.5: "that is bit 31, the sign",
        0.75: "that is bit 22, the first of the fraction",
    },
    hint="the exponent 126 stands for 2 to the power of -1; which number does it become?",
    why="the exponent 126 becomes 127: a bit that is 0 can only be added, and it doubles the weight",
)
fsyncs = predict(
    4,
    wrong=[1, 2, 3],
    hints={
        2: "that is one file, with its name; how many files are there?",
        3: "the folder is synced for each file: else the manifest's name could reach the disk before the payload's",
    },
    hint="two files, and each has bytes and a name",
    why="the bytes and the name of the payload, then the bytes and the name of its manifest",
)
after_two = predict(
    9,
    wrong=[4, 24, 10, 5],
    hints={
        4: "that is right when only the newest is damaged",
        24: "that would be a start from scratch; one snapshot is still good",
        5: "count from the snapshot that is loaded to the end, not from one snapshot to the next",
    },
    hint="which is the newest that is good, and how many steps come after it?",
    why="the steps 15 to 23",
)
held_up = predict(
    0.5,
    wrong=[0, 1.5, 0.01, 1.0],
    hints={
        0: "one write is in flight at most: what if the next snapshot is due while it goes on?",
        1.5: "that is a save in the training thread; here it trains for a second of that",
        0.01: "that is the copy alone; the next snapshot is due 1 s later, and the writer isn't done",
    },
    hint="draw the writer's 1.5 s, and below it ten steps",
    close=0.05,
    why="ten steps hide one second of the writing: a slow disk can be hidden, but only so far",
)
resumed = predict(
    25,
    wrong=[30, 20],
    hints={
        30: "it has the highest step and is whole; but who wrote it, and when?",
        20: "generation 2 has published something since",
    },
    hint="the line begins at the newest claim",
    why="the line is 25, 20, 10; what generation 1 published after 2 had grown from 20 is not in it",
)


# --- publish ------------------------------------------------------------------------------------------------------


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _write_new(path: Path, content: bytes, flush: bool = True, sync: bool = True) -> Path:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        if flush:
            file.flush()
        if sync:
            os.fsync(file.fileno())
    return new


def _link(new: Path, path: Path) -> None:
    os.link(new, path)
    new.unlink()


def _publish(path: Path, content: bytes) -> None:
    _link(_write_new(path, content), path)
    _sync_folder(path.parent)


def _in_place(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _no_fsync(path: Path, content: bytes) -> None:
    _link(_write_new(path, content, sync=False), path)
    _sync_folder(path.parent)


def _no_flush(path: Path, content: bytes) -> None:
    _link(_write_new(path, content, flush=False), path)
    _sync_folder(path.parent)


def _name_first(path: Path, content: bytes) -> None:
    new = _write_new(path, content, sync=False)
    _link(new, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _no_folder_sync(path: Path, content: bytes) -> None:
    _link(_write_new(path, content), path)


def _folder_synced_too_early(path: Path, content: bytes) -> None:
    new = _write_new(path, content)
    _sync_folder(path.parent)
    _link(new, path)


def _replaces(path: Path, content: bytes) -> None:
    _write_new(path, content).replace(path)
    _sync_folder(path.parent)


def _looks_then_replaces(path: Path, content: bytes) -> None:
    if path.exists():
        raise FileExistsError(path)
    _replaces(path, content)


def _leaves_its_temporary(path: Path, content: bytes) -> None:
    os.link(_write_new(path, content), path)
    _sync_folder(path.parent)


publish = Exercise(
    "write",
    publishing.judge,
    solution=_publish,
    wrong=[
        _in_place,
        _no_fsync,
        _no_flush,
        _name_first,
        _no_folder_sync,
        _folder_synced_too_early,
        _replaces,
        _looks_then_replaces,
        _leaves_its_temporary,
    ],
    why="wherever the machine dies, there is nothing or all; and no name is taken from another",
)


# --- fall back, and what was left out -----------------------------------------------------------------------------

newest_good = Exercise(
    "write",
    fallback.judge,
    solution=fallback.newest_good,
    wrong=fallback.WRONG,
    why="every byte is checked before use, and without a good one nothing starts in silence",
)

left_out = match(
    suspects(),
    wrong=[
        dict(zip(suspects(), sorted(suspects().values()), strict=True)),
        suspects() | {"B": "order's seed", "C": "plateau counter"},
        suspects() | {"D": "best value", "E": "nothing missing"},
    ],
    hint="ask of each run: does the training ever change, and when? Who writes a best.pt that the twin did not?",
    why="three of the four lost pieces leave the training loss alone at first, or for ever",
)


# --- bets ---------------------------------------------------------------------------------------------------------

_BETS = {"A": False, "B": True, "C": False, "D": False, "E": True}
_PARTS = {"A": "part 2 (one bit)", "B": "part 1 (killed at a byte)", "C": "part 3 (until the machine dies)"}
_PARTS |= {"D": "part 7 (two generations)", "E": "part 6 (what it costs)"}

bets = checks.bets(
    _BETS,
    _PARTS,
    wrong=[dict.fromkeys(_BETS, True), _BETS | {"C": True}, _BETS | {"D": "no"}, {"A": False}],
    why="B and E are true",
)
