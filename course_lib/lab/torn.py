"""Saves of an 80 MB state that are killed at a chosen byte, and what is then left on the disk.

    python -m course_lib.lab.torn --folder DIR 0 40000000 -1

For each number and each way of saving, a process of its own writes a new snapshot where an old one is, and is killed
with SIGKILL as soon as so many bytes are in its file; a negative number says how many are missing then. The findings
go to DIR/deaths.json.
"""

import argparse
import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from course_lib.engine import UsageError, run
from course_lib.lab.answers import one_line

PARAMETERS = 6_666_667  # of four bytes, three times with AdamW's two averages: 80 MB
State = dict[str, Any]
Writer = Callable[[Path], Any]  # opens a file for writing


def in_place(state: State, path: Path, open_file: Writer) -> None:
    """The line that everybody writes."""
    with open_file(path) as file:
        torch.save(state, file)


def beside(state: State, path: Path, open_file: Writer) -> None:
    """The same into a file beside it, which takes the name when it is whole."""
    new = path.with_suffix(".new")
    with open_file(new) as file:
        torch.save(state, file)
    new.replace(path)


WAYS = {"in place": in_place, "beside": beside}


class DeadlyFile(io.FileIO):
    """A file whose process is killed, by itself, as soon as it holds `last` bytes."""

    def __init__(self, path: Path, last: int) -> None:
        super().__init__(path, "w")
        self._last = last
        self._die_if_due()

    def write(self, data: Any) -> int:
        written = super().write(memoryview(data)[: self._last - self.tell()])
        self._die_if_due()
        return written

    def _die_if_due(self) -> None:
        if self.tell() >= self._last:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Death:
    """A save killed by `signal` when `byte` bytes of the new snapshot were written, and what was found afterwards.

    `step` is that of the snapshot which torch.load finds under the name: 1 is the old one, 2 would be the new one,
    None means that it cannot be opened, for the reason `error`. `left` has the bytes of each file.
    """

    way: str
    byte: int
    signal: int
    step: int | None
    error: str
    left: dict[str, int]


def a_state(step: int) -> State:
    """What AdamW needs of a model of 6.7 million parameters."""
    names = ("weights", "first average", "second average")
    return {"step": step, **{name: torch.full((PARAMETERS,), float(step)) for name in names}}


def kill(way: str, byte: int, old: State, new: State, folder: Path) -> Death:
    """Save `old`, then kill the save of `new`, which is as long, at `byte`, and look at what is left."""
    path = folder / "snapshot.pt"
    for left in folder.glob("snapshot.*"):
        left.unlink()
    in_place(old, path, lambda at: at.open("wb"))
    byte = byte if byte >= 0 else path.stat().st_size + byte
    child = os.fork()
    if child == 0:
        try:
            WAYS[way](new, path, lambda at: DeadlyFile(at, byte))
        finally:
            os._exit(1)  # it should not have come so far
    status = os.waitpid(child, 0)[1]
    step, error = None, ""
    try:
        step = int(torch.load(path, map_location="cpu", weights_only=True)["step"])
    except Exception as problem:  # whatever the loader makes of half a file
        error = one_line(problem)
    sizes = {left.name: left.stat().st_size for left in sorted(folder.glob("snapshot.*"))}
    return Death(way, byte, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, step, error, sizes)


def read_deaths(folder: Path | str) -> list[Death]:
    """The findings of an earlier run of this program."""
    return [Death(**found) for found in json.loads((Path(folder) / "deaths.json").read_text())]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; raises UsageError for a byte that no save comes to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to save; what is in it is overwritten")
    parser.add_argument("bytes", type=_byte, nargs="+", help="how many bytes a save may write before it is killed")
    return parser.parse_args(argv)


def _byte(text: str) -> int:
    most = 12 * PARAMETERS
    if not text.removeprefix("-").isdecimal() or abs(int(text)) > most:
        raise UsageError(f"killed at byte {text!r}: give a number from 0 to {most:,}, or minus those that are missing")
    return int(text)


def main() -> None:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a forked child has no copies of a thread pool's threads
    old, new = a_state(1), a_state(2)
    deaths = []
    for byte in options.bytes:
        for way in WAYS:
            deaths.append(kill(way, byte, old, new, options.folder))
            last = deaths[-1]
            found = f"finds step {last.step}" if last.step else shorten(last.error, 62, placeholder=" …")
            print(f"{way:>8}, killed at byte {last.byte:>10,}: {found}", flush=True)
    (options.folder / "deaths.json").write_text(json.dumps([asdict(death) for death in deaths], indent=1))


if __name__ == "__main__":
    run(main)
