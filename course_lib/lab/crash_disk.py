"""What a disk may hold after the machine died in the middle of a function that writes files.

A kill takes a process; what it has written stays in the kernel's memory and reaches the disk later. When the machine
dies, that memory is gone as well. On the disk for certain is then only what was asked for: the bytes of a file by
`os.fsync` of that file, a name by `os.fsync` of its folder. All else may be there, in part, or not at all.

The function runs for real, in a folder of its own. After each of its lines we look into the folder, and note what
every name and every file may be on the disk at that moment. An unsynced file may be empty, cut, zeros, or whole; an
unsynced name may be what it was at any time since the folder was synced, whatever became of the other names.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

Image = dict[str, bytes]  # what a folder holds: name -> content


@dataclass(frozen=True)
class Moment:
    """When the function has done its line `line` (1 is its `def`; None: it has returned), this may be on the disk.

    `names` has the inodes that each name may stand for (None: no such name), `contents` what each inode may hold.
    """

    line: int | None
    names: dict[str, tuple[int | None, ...]]
    contents: dict[int, tuple[bytes, ...]]

    def images(self) -> list[Image]:
        """Every folder that may be found when the machine is up again, once each."""
        found: list[Image] = []
        for chosen in product(*self.names.values()):
            bound = {name: inode for name, inode in zip(self.names, chosen, strict=True) if inode is not None}
            inodes = sorted(set(bound.values()))
            for held in product(*(self.contents[inode] for inode in inodes)):
                image = {name: held[inodes.index(inode)] for name, inode in bound.items()}
                if image not in found:
                    found.append(image)
        return found


@dataclass(frozen=True)
class Recording:
    """The moments of one call, in order, and what was synced: the bytes of a file each, or None for the folder."""

    moments: tuple[Moment, ...]
    syncs: tuple[bytes | None, ...]


def record(function: Callable[..., Any], *arguments: Any, folder: Path) -> Recording:
    """Call `function`, which writes into `folder`, and note at which moments the machine could have died.

    What is in the folder already is on the disk for certain. An error that the function raises passes through.
    """
    disk, moments = _Disk(folder), list[Moment]()
    try:
        disk.sync_all()
        with disk.watching(), after_each_line(function, lambda line: moments.append(disk.moment(line))):
            function(*arguments)
        return Recording((*moments, disk.moment(None)), tuple(disk.syncs))
    finally:
        disk.close()


@contextmanager
def after_each_line(function: Callable[..., Any], call: Callable[[int], object]) -> Iterator[None]:
    """Call `call` with the number of each line that `function` has done.

    A helper that was defined beside the function is followed, too; its lines count as the one that called it.
    """
    code, known = function.__code__, function.__globals__
    done = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal done
        if frame.f_globals is not known:
            return None
        if event in ("line", "return") and done:
            call(done)
        if event == "line" and frame.f_code is code:
            done = frame.f_lineno - code.co_firstlineno + 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@dataclass
class _Disk:
    """The folder as the processes see it, and what of it is on the disk for certain."""

    folder: Path
    synced: dict[int, bytes] = field(default_factory=dict)
    names: list[dict[str, int]] = field(default_factory=list)  # all since the folder was synced, the oldest first
    syncs: list[bytes | None] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)  # inode -> descriptor, so that no number is given twice

    def look(self) -> None:
        """Note the names that there are now, and hold on to the files that they stand for."""
        now = {entry.name: entry.inode() for entry in os.scandir(self.folder) if entry.is_file()}
        for name, inode in now.items():
            if inode not in self.held:
                self.held[inode] = os.open(self.folder / name, os.O_RDONLY)
        if not self.names or self.names[-1] != now:
            self.names.append(now)

    def content(self, inode: int) -> bytes:
        """The file's bytes in memory; what waits in a buffer of Python's own is not among them."""
        return os.pread(self.held[inode], os.fstat(self.held[inode]).st_size, 0)

    def sync(self, descriptor: int) -> None:
        """What `fsync` does: the bytes of a file, or the names of the folder."""
        self.look()
        inode = os.fstat(descriptor).st_ino
        if inode == self.folder.stat().st_ino:
            self.names = self.names[-1:]
            self.syncs.append(None)
        elif inode in self.held:
            self.synced[inode] = self.content(inode)
            self.syncs.append(self.synced[inode])

    def sync_all(self) -> None:
        """What `sync` does."""
        self.look()
        self.names = self.names[-1:]
        self.synced = {inode: self.content(inode) for inode in self.held}

    def moment(self, line: int | None) -> Moment:
        """What may be on the disk now."""
        self.look()
        every = sorted({name for names in self.names for name in names})
        bindings = {name: tuple(dict.fromkeys(names.get(name) for names in self.names)) for name in every}
        return Moment(line, bindings, {inode: self._may_hold(inode) for inode in self.held})

    def _may_hold(self, inode: int) -> tuple[bytes, ...]:
        durable, now = self.synced.get(inode, b""), self.content(inode)
        return (now,) if now == durable else tuple(dict.fromkeys((durable, now[: len(now) // 2], bytes(len(now)), now)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every `fsync` that this process asks for."""

        def seen(sync: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(file: Any) -> None:
                sync(file)
                self.sync(file if isinstance(file, int) else file.fileno())

            return call

        with ExitStack() as stack:
            for name in ("fsync", "fdatasync"):
                if hasattr(os, name):  # a Mac has only the first
                    stack.enter_context(patch.object(os, name, seen(getattr(os, name))))
            stack.enter_context(patch.object(os, "sync", self.sync_all))
            yield

    def close(self) -> None:
        """Let go of the files."""
        for descriptor in self.held.values():
            os.close(descriptor)
