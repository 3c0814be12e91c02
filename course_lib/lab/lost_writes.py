"""What a disk may hold when the machine died, worked out from the operations that were done on its files.

A kernel writes to the disk when it likes and in the order it likes. For certain are only the bytes of a file at its
last fsync, and the names in a folder at the folder's last fsync. Of what came later, each name may be what it was at
any moment since, whatever became of the other names: a link, a rename or an unlink can be missing, can be there before
the ones that it followed, and a rename can be half done. The bytes of a file may be there in part: cut off anywhere, or
with zeros in place of blocks. That is more than the journal of any file system lets happen.
"""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from course_lib.lab.crash_points import Operation

BLOCK = 4096
FOLDER = None
Image = dict[str, bytes | None]  # what is below the folder: path -> content, or FOLDER
_Place = int | None  # a file or a folder by number; None: no such name


@dataclass
class _File:
    """A file's bytes as the processes see them, those that are on the disk for certain, and whether it is a folder."""

    now: bytes = b""
    sure: bytes = b""
    folder: bool = False

    def may_hold(self) -> list[bytes | None]:
        if self.folder:
            return [FOLDER]
        if self.now == self.sure:
            return [self.sure]
        # A file that was written again from its start has nothing for certain but that it may still be the old one.
        base = self.sure if self.now.startswith(self.sure) else b""
        return list(dict.fromkeys([self.sure, *_partly(base, self.now)]))


def _partly(base: bytes, now: bytes) -> Iterator[bytes]:
    """The states of a file that has `base` for certain and was to become `now`."""
    starts = [len(base), *range(len(base) // BLOCK * BLOCK + BLOCK, len(now), BLOCK)]
    blocks = [now[start:stop] for start, stop in zip(starts, [*starts[1:], len(now)], strict=True)]
    for start, block in zip(starts, blocks, strict=True):  # as long as it came
        yield now[:start]
        yield now[: start + len(block) // 2]
    yield now
    count = len(blocks)
    chosen = [set(range(n)) for n in range(count)]  # as long as it was to be, with these blocks: the first ones
    chosen += [set(range(n, count)) for n in range(1, count)]  # the last ones
    chosen += [{n} for n in range(count)]  # a single one
    chosen += [set(range(count)) - {n} for n in range(count)]  # all but one
    for there in chosen:
        yield base + b"".join(b if n in there else bytes(len(b)) for n, b in enumerate(blocks))


@dataclass
class Disk:
    """A folder, whose state at the beginning is on the disk for certain, and what is done below it."""

    files: dict[int, _File] = field(default_factory=dict)
    names: dict[str, list[_Place]] = field(default_factory=dict)  # since the last sync of their folder, oldest first
    opened: dict[int, int] = field(default_factory=dict)

    def apply(self, operation: Operation) -> None:
        """Take note of an operation that was done."""
        o = operation
        if o.kind == "mkdir" or (o.kind == "open" and self._at(o.path) is None):
            self._give(o.path, len(self.files))
            self.files[len(self.files)] = _File(folder=o.kind == "mkdir")
        if o.kind == "open":
            place = self._at(o.path)
            assert place is not None
            self.files[place].now, self.opened[o.file] = b"", place
        elif o.kind == "write":
            file = self.files[self.opened[o.file]]
            file.now = file.now[: o.offset].ljust(o.offset, b"\0") + o.data + file.now[o.offset + len(o.data) :]
        elif o.kind == "fsync":
            file = self.files[self.opened[o.file]]
            file.sure = file.now
        elif o.kind == "sync":
            self.names = {path: p[-1:] if _parent(path) == o.path else p for path, p in self.names.items()}
            self.names = {path: places for path, places in self.names.items() if places != [None]}
        elif o.kind in ("link", "rename"):
            self._give(o.target, self._at(o.path))
        if o.kind in ("unlink", "rename"):
            self._give(o.path, None)

    def _at(self, path: str) -> _Place:
        return self.names.get(path, [None])[-1]

    def _give(self, path: str, place: _Place) -> None:
        self.names.setdefault(path, [None]).append(place)

    def now(self) -> Image:
        """What the processes see."""
        held = {path: self.files[place] for path, places in self.names.items() if (place := places[-1]) is not None}
        return {path: FOLDER if file.folder else file.now for path, file in sorted(held.items())}

    def images(self) -> Iterator[Image]:
        """All that may be there when the machine is up again; some of it more than once."""
        paths = sorted(self.names)
        may_hold = {place: file.may_hold() for place, file in self.files.items()}
        for chosen in product(*(dict.fromkeys(self.names[path]) for path in paths)):
            bound: dict[str, int] = {}
            for path, place in zip(paths, chosen, strict=True):  # a folder comes before what is in it
                if place is not None and (_parent(path) == "." or _parent(path) in bound):
                    bound[path] = place
            places = sorted(set(bound.values()))
            for held in product(*(may_hold[place] for place in places)):
                yield {path: held[places.index(place)] for path, place in bound.items()}


def _parent(path: str) -> str:
    return str(Path(path).parent)


def snapshot(root: Path) -> Image:
    """What is below `root` now."""
    return {str(p.relative_to(root)): FOLDER if p.is_dir() else p.read_bytes() for p in sorted(root.rglob("*"))}


def restore(root: Path, image: Image, before: Image) -> None:
    """Make `image` of a folder that holds `before`; files that are the same in both are left alone."""
    for path in sorted(before.keys() - image.keys(), reverse=True):
        if (root / path).is_dir():
            shutil.rmtree(root / path)
        else:
            (root / path).unlink(missing_ok=True)
    for path, content in sorted(image.items()):
        if content is None:
            (root / path).mkdir(exist_ok=True)
        elif before.get(path) != content:
            (root / path).write_bytes(content)


def moments(operations: Iterable[Operation], start: Image) -> Iterator[Disk]:
    """The disk at the beginning, where `start` is on it for certain, and after each operation. It is one object."""
    disk = Disk()
    for number, (path, content) in enumerate(sorted(start.items())):
        disk.names[path] = [number]
        disk.files[number] = _File(content or b"", content or b"", content is FOLDER)
    yield disk
    for operation in operations:
        disk.apply(operation)
        yield disk
