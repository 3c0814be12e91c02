"""Whether a `publish(path, content)` keeps its promise, whenever the machine dies: what is drawn, and what is judged.

The promise: as long as it has not returned, the name holds nothing or all of the content; once it has returned, all
of it; what was there before stays as it is; and a name that is taken is refused with FileExistsError.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from course_lib.lab.answers import one_line
from course_lib.lab.crash_disk import Recording, after_each_line, record

Publish = Callable[[Path, bytes], object]
NAME, OLDER, CONTENT, OTHER = "step-20.pt", "step-10.pt", b"the new snapshot", b"another's snapshot"
OLD = {OLDER: b"the older snapshot"}  # what is in the folder already


@dataclass(frozen=True)
class Row:
    """After the line `code` of a publish: what may be found under the name, each in a word; and whether all is well."""

    line: int | None
    code: str
    found: tuple[str, ...]
    bad: tuple[str, ...]


def crash_rows(publish: Publish) -> list[Row]:
    """A row for each line that `publish` does, and one for when it has returned."""
    with _folder() as folder:
        recording = record(publish, folder / NAME, CONTENT, folder=folder)
    return _rows(publish, recording)


def verdict(publish: Publish) -> str:
    """What the rows come to, and where the promise is broken first."""
    rows = crash_rows(publish)
    broken = [row for row in rows if row.bad]
    if not broken:
        return f"keeps its promise at all {len(rows)} moments"
    first = broken[0]
    moments = f"breaks its promise at {len(broken)} of {len(rows)} moments"
    return f"{moments};\nfirst {_place(first)}: {_words(first.bad)}"


def judge(publish: Publish) -> str | None:
    """None when `publish` keeps its promise, else one line that says when it does not, and which line is missing."""
    if not callable(publish):
        return "give the function itself, without calling it"
    with _folder() as folder:
        recording = record(publish, folder / NAME, CONTENT, folder=folder)
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
    if found.get(NAME) != CONTENT:
        return "nobody died, and the file does not hold the content that publish was given"
    if extra := sorted(set(found) - {NAME, *OLD}):
        return f"nobody died, and {extra[0]} is left over: let the temporary name go"
    return _judge_moments(publish, recording) or _judge_taken(publish) or _judge_race(publish)


def _rows(publish: Publish, recording: Recording) -> list[Row]:
    code = dedent(inspect.getsource(publish)).split("\n")
    rows: list[Row] = []
    before = 0
    for moment in recording.moments:
        found = tuple(dict.fromkeys(_state(image) for image in moment.images()))
        allowed = ("nothing", "whole") if moment.line else ("whole",)
        text = code[moment.line - 1] if moment.line else "(it has returned)"
        if moment.line and moment.line < before and text.strip().startswith("with "):
            text = "(the end of the with: the file is closed)"
        row = Row(moment.line, text, found, tuple(state for state in found if state not in allowed))
        if not rows or rows[-1] != row:
            rows.append(row)
        before = moment.line or before
    return rows


def _state(image: dict[str, bytes]) -> str:
    """What is under the name in a word; damage to the older snapshot counts for more."""
    if any(image.get(name) != content for name, content in OLD.items()):
        return "older one lost"
    held = image.get(NAME)
    if held is None:
        return "nothing"
    words = {CONTENT: "whole", b"": "empty", bytes(len(CONTENT)): "zeros"}
    return words.get(held, "cut")


def _judge_moments(publish: Publish, recording: Recording) -> str | None:
    broken = next((row for row in _rows(publish, recording) if row.bad), None)
    if broken is None:
        return None
    died = f"the machine dies {_place(broken)}, and may come back with {_words(broken.bad)}"
    if broken.bad == ("nothing",):
        return f"{died}: a name is in memory only until its folder was synced, after it got the name"
    if "older one lost" in broken.bad:
        return f"{died}: leave what is there alone"
    if not any(synced == CONTENT for synced in recording.syncs):
        if any(synced is not None for synced in recording.syncs):
            return f"{died}: at your os.fsync the content was still in Python's own buffer; flush it first"
        return f"{died}: the bytes are in memory only until os.fsync(file.fileno()), before the file gets its name"
    return f"{died}: the file had its name before its bytes were on the disk"


def _judge_taken(publish: Publish) -> str | None:
    with _folder() as folder:
        (folder / NAME).write_bytes(OTHER)
        return _refused(publish, folder, "the name is taken")


def _judge_race(publish: Publish) -> str | None:
    """Somebody else takes the name after the first line, then after the second, and so on."""
    for place in range(1, 1000):
        over, problem = _raced(publish, place)
        if over or problem:
            return problem
    return None


def _raced(publish: Publish, place: int) -> tuple[bool, str | None]:
    """Whether `publish` does fewer than `place` lines, and what it does wrong when the name is taken after them."""
    lines, taken = 0, False
    with _folder() as folder:

        def meanwhile(_: int) -> None:
            nonlocal lines, taken
            lines += 1
            if lines == place and not (folder / NAME).exists():
                (folder / NAME).write_bytes(OTHER)
                taken = True

        with after_each_line(publish, meanwhile):
            problem = _refused(publish, folder, "another process takes the name meanwhile")
    return lines < place, problem if taken else None


def _refused(publish: Publish, folder: Path, when: str) -> str | None:
    """What is wrong with how `publish` refuses a name that is taken."""
    try:
        publish(folder / NAME, CONTENT)
        outcome = "publish says nothing"
    except FileExistsError:
        outcome = ""
    except Exception as error:
        outcome = f"publish raises {one_line(error)}"
    if (folder / NAME).read_bytes() != OTHER:
        return f"{when}, and publish writes over it: os.link gives a name that is free, and refuses one that is not"
    return f"{when}, and {outcome}: FileExistsError is what its caller waits for" if outcome else None


def _place(row: Row) -> str:
    return f"after line {row.line} ({row.code.strip()})" if row.line else "after publish has returned"


def _words(states: tuple[str, ...]) -> str:
    words = {"nothing": "no file of that name", "empty": "an empty file", "cut": "half a file", "zeros": "zeros"}
    return " or ".join(words.get(state, "the older snapshot lost") for state in states)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder with the older snapshot in it, gone at the end of the block."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for old, content in OLD.items():
            (folder / old).write_bytes(content)
        yield folder
