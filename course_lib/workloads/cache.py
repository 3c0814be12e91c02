"""Decoded pixels in a file that is mapped into memory: ranks and loader workers share the system's one copy of it.

The file is the pixels' bytes and then a foot of fixed length: what they were made from (`key`), the data set's
digest, and the seal, a SHA-256 of all that comes before it. A file is used only when its key and its seal are right,
so it can be torn, altered, out of date or somebody else's, and is then made anew.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_lib.engine.snapshots.files import sync_directory, temporary_for, withdraw, write_durably

FORMAT = "course-pixels-1"
HEX = 64  # digits of a SHA-256
FOOT = len(f"\n{FORMAT} {'':{HEX}} {'':{HEX}} {'':{HEX}}")
PIECE = 2**20  # bytes read at once
BESIDE = ".image_folder.pixels"
OWN = "train-through-failure"  # our folder in the user's cache
DAYS_UNUSED = 30


def cache_files(root: Path, key: str) -> tuple[Path, ...]:
    """Where the pixels of the pictures below `root` may be, the best place first.

    Beside the pictures, where all who read those find it: one file, which a new one replaces. Where nothing can be
    written there, in the user's own cache, by its key: machines that share a home may have pictures of their own.
    """
    beside = root / BESIDE
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        home = given if given.is_absolute() else Path.home() / ".cache"  # the XDG specification has others ignored
    except RuntimeError:  # no home
        return (beside,)
    return beside, home / OWN / f"{key[:32]}.pixels"


def open_cache(path: Path, key: str, size: int) -> tuple[Tensor, str] | None:
    """The `size` bytes that were written to `path` with this key, as a tensor, and their digest; else None.

    All of it is read and compared with the seal. It is read before it is mapped: a broken disk is an error of a
    read, and the end of the process when a mapped page cannot be had.
    """
    head = f"\n{FORMAT} {key} ".encode()
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            file.seek(size)
            foot = file.read(FOOT)
            if not foot.startswith(head) or foot[-HEX:] != _seal(file, size + FOOT - HEX):
                return None
            mapped = mmap.mmap(file.fileno(), size + FOOT, access=mmap.ACCESS_COPY)  # nobody's write reaches the file
    except (OSError, ValueError):
        return None
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size), foot[len(head) : len(head) + HEX].decode()


def write_cache(path: Path, key: str, size: int, pieces: Iterable[Tensor], digest: Any) -> None:
    """Let `path` hold the pieces, `size` bytes in all, whole and durably or not at all.

    `digest`, of hashlib, is asked when the last piece is there. The caller holds the lock, so that temporary files
    which a killed maker left can go. Errors: OSError.
    """
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        withdraw(left)
    if shutil.disk_usage(path.parent).free < size + FOOT:  # known before hours of decoding
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary = temporary_for(path)

    def write(file: Any) -> None:
        seal = hashlib.sha256()

        def put(data: Any) -> None:
            seal.update(data)
            file.write(data)

        for piece in pieces:
            put(piece.reshape(-1).numpy().data)
        put(f"\n{FORMAT} {key} {digest.hexdigest()} ".encode())
        file.write(seal.hexdigest().encode())

    try:
        write_durably(temporary, write)
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        withdraw(temporary)


def note_use(path: Path) -> None:
    """Keep a file of the user's cache for another month, and remove those there that nobody used for one."""
    if path.name == BESIDE:
        return
    now = time.time()
    with contextlib.suppress(OSError):
        os.utime(path)
        for pattern in ("*.pixels", "*.lock", "*.tmp"):
            for other in path.parent.glob(pattern):
                if now - other.stat().st_mtime > DAYS_UNUSED * 86400:
                    withdraw(other)


def _seal(file: Any, size: int) -> bytes:
    """The seal of the first `size` bytes."""
    seal = hashlib.sha256()
    file.seek(0)
    while size > 0 and (piece := file.read(min(PIECE, size))):
        seal.update(piece)
        size -= len(piece)
    return seal.hexdigest().encode()
