"""Any tree of pictures: ``root/train/<class>/*`` and ``root/test/<class>/*``, or ``root/<class>/*``."""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from course_lib.engine.errors import UsageError
from course_lib.workloads.optional import reason

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
SPLIT_SEED = 5
TEST_SHARE = 0.2
LAYOUT = "train/<class>/ and test/<class>/, or <class>/ alone, each with images"


class File(NamedTuple):
    """A picture that was not opened yet: its name below the root, and what changes when it is written to."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int  # a copy can be given the modification time of the original, but not this


@dataclass(frozen=True)
class Listing:
    """The pictures of a tree, each with its class's index, sorted, in each split."""

    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[File, int], ...]
    test: tuple[tuple[File, int], ...]

    def stamp(self) -> str:
        """A digest (hex) that changes when a picture is added, removed, renamed, written or put into another split."""
        digest = hashlib.sha256()
        for split in (self.train, self.test):
            for file, label in split:
                digest.update("\0".join(map(str, (*file, label, ""))).encode(errors="surrogateescape"))
            digest.update(b"\0")
        return digest.hexdigest()


def list_folder(root: Path | None) -> Listing:
    """Find the pictures and their classes.

    Without ``train`` and ``test`` folders a fifth of each class, always the same, becomes the test split.

    Errors: ``UsageError`` naming the folder that is missing, empty or out of place.
    """
    if root is None:
        raise UsageError(f"--data image_folder needs --data-root DIR: a folder with {LAYOUT}")
    if not root.is_dir():
        raise UsageError(f"--data-root {root} is not a folder: give one with {LAYOUT}")
    try:
        if (root / "train").is_dir() or (root / "test").is_dir():
            return _list_splits(root)
        return _split(root, _list_classes(root))
    except OSError as error:
        raise UsageError(f"--data-root {root} cannot be read ({reason(error)}): check its permissions") from error


def _list_splits(root: Path) -> Listing:
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise UsageError(f"{root / part} is missing: --data-root needs both train/<class>/ and test/<class>/")
    train, test = _list_classes(root, "train"), _list_classes(root, "test")
    for name in test:
        if name not in train:
            raise UsageError(f"{root / 'test' / name} has no counterpart {root / 'train' / name}: add or rename it")
    classes = tuple(train)
    return Listing(
        root,
        classes,
        tuple((file, classes.index(name)) for name, files in train.items() for file in files),
        tuple((file, classes.index(name)) for name, files in test.items() for file in files),
    )


def _split(root: Path, found: dict[str, list[File]]) -> Listing:
    """Cut a fifth off each class, always the same one, so that every class is trained."""
    random = np.random.RandomState(SPLIT_SEED)  # its stream is frozen, unlike that of numpy's newer generators
    train: list[tuple[File, int]] = []
    test: list[tuple[File, int]] = []
    for label, files in enumerate(found.values()):
        chosen = set(random.permutation(len(files))[: int(TEST_SHARE * len(files))].tolist())
        for index, file in enumerate(files):
            (test if index in chosen else train).append((file, label))
    if not test:
        raise UsageError(f"{root} has fewer than 5 images in every class, too few to split: give train/ and test/")
    return Listing(root, tuple(found), tuple(train), tuple(test))


def _list_classes(root: Path, split: str = "") -> dict[str, list[File]]:
    """Class name → its pictures at any depth, both sorted; what is hidden is nobody's picture."""
    folder = root / split
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise UsageError(f"{folder} has {len(names)} class folders, and a classifier needs two or more: see {LAYOUT}")
    found = {}
    for name in names:
        place = (folder / name).relative_to(root).as_posix()
        files = sorted(_files(str(folder / name), place), key=lambda file: file.name.split("/"))
        if not files:
            raise UsageError(f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))}): add some or remove it")
        found[name] = files
    return found


def _files(folder: str, name: str) -> Iterator[File]:
    """The pictures below `folder`, whose name below the root is `name`, in any order.

    Without ``Path`` objects: a list of 60,000 takes a third of the time.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            below = f"{name}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, below)
            elif entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith("."):
                with suppress(FileNotFoundError):  # a link to nowhere
                    facts = entry.stat()
                    if stat.S_ISREG(facts.st_mode):
                        yield File(below, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
