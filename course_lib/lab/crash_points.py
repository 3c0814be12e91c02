"""The operations on files that some code makes below a folder, one after the other, and a death at any one of them.

The code runs for real. A process can die before each operation and in the middle of each write; to die after one is to
die before the next.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Killed(BaseException):
    """The death of a process that goes on living; no `except Exception` stops it."""


@dataclass(frozen=True)
class Operation:
    """`kind` is open, write, fsync (a file), sync (a folder's names), link, rename, unlink or mkdir.

    `path` is relative to the folder. An open file has a number, `file`; a write puts `data` at `offset` of it.
    `target` is the new name that a link or a rename gives.
    """

    kind: str
    path: str
    target: str = ""
    file: int = 0
    offset: int = 0
    data: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        size = f" of {len(self.data)} bytes at {self.offset}" if self.kind == "write" else ""
        return f"{self.kind} {self.path}{' as ' + self.target if self.target else ''}{size}"


def no_kill() -> None:
    raise AssertionError("nobody is to die here")


def raise_killed() -> None:
    """The death that this process survives, so that its operations can be read."""
    raise Killed


@dataclass
class Recorder:
    """Notes what is done below `root`, and calls `die` at place number `die_at`, from 1 (0: never).

    What it touches after its death calls `die` again, for a killed process runs no `finally` either. `revive` is the
    start of another process: the files are as they were left.
    """

    root: Path
    die_at: int = 0
    die: Callable[[], None] = no_kill
    links: bool = True  # False: a file system without hard links
    operations: list[Operation] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    died: str = ""
    files: dict[int, int] = field(default_factory=dict)  # descriptor -> number of the open file
    opened: int = 0

    @contextmanager
    def life(self) -> Iterator[None]:
        """A block that ends with the death, whatever error a library in between makes of it."""
        try:
            yield
        except BaseException:
            if not self.died:
                raise

    def revive(self) -> None:
        self.died, self.die_at = "", 0

    def perform(self, operation: Operation, do: Callable[[], Any], tear: Callable[[], Operation] | None = None) -> Any:
        """Do it and note it, unless this is the place to die; `tear` does the half of a write that is cut short."""
        self._pass(f"before {operation}")
        if tear is not None:
            self._pass(f"in the middle of {operation}", tear)
        outcome = do()
        self.operations.append(operation)
        return outcome

    def _pass(self, place: str, tear: Callable[[], Operation] | None = None) -> None:
        if not self.died:
            self.places.append(place)
            if len(self.places) != self.die_at:
                return
            if tear is not None:
                self.operations.append(tear())
            self.died = place
        self.die()

    def relative(self, path: Any) -> str | None:
        """The path below the root; None for one that is elsewhere."""
        found = Path(os.path.abspath(os.fspath(path)))  # noqa: PTH100  # no link is followed
        return found.relative_to(self.root).as_posix() if found.is_relative_to(self.root) else None
