"""Files that are there whole or not at all."""

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


def publish(path: Path, content: bytes) -> None:
    """Write `content` so that `path` either holds all of it, durably, or does not exist.

    The bytes go into a temporary file of the same directory (another file system could not be renamed from) and
    are on the disk before the name is. Raises FileExistsError when `path` is taken, and leaves it as it is; other
    OSErrors come from the disk, and then `path` does not exist. Only a process that dies leaves a temporary file.
    """
    temporary = temporary_for(path)
    try:
        write_durably(temporary, lambda file: file.write(content))
        give_name(temporary, path)
    finally:
        withdraw(temporary)


def temporary_for(path: Path) -> Path:
    """A name beside `path` that nobody else uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Make the file `path` from what `write` writes into it; it is on the disk when this returns."""
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def give_name(temporary: Path, path: Path) -> None:
    """Let the content of `temporary` be `path`, durably, if that name is free."""
    _link(temporary, path)
    try:
        sync_directory(path.parent)
    except OSError:
        withdraw(path)
        raise


def withdraw(path: Path) -> None:
    """Remove a file of one's own, as well as the disk lets us."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def read_file(path: Path, most: int) -> bytes:
    """The content of a file of at most `most` bytes; OSError for anything else: a pipe or a device never ends."""
    size = _size(path)
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes instead of at most {most}", str(path))
    return path.read_bytes()


def _size(path: Path) -> int:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return facts.st_size


def digest_file(path: Path) -> tuple[str, int]:
    """SHA-256 in hex and size of a regular file, which need not fit into the memory."""
    hasher, size = hashlib.sha256(), _size(path)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            hasher.update(chunk)
    return hasher.hexdigest(), size


def make_directory(path: Path) -> None:
    """Make the folder `path` and those above it, as durably as the system lets us.

    A machine that dies forgets a folder that is not yet on the disk in its parent, with all that was synced in it.
    Whoever made the folders may have died before they were, so they are synced also when they are there.
    """
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.resolve().parents:
        with contextlib.suppress(OSError):
            sync_directory(parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; a new name is only in memory before."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link(source: Path, target: Path) -> None:
    """Give `source` the name `target` without replacing anything: a hard link, or a rename where there are none."""
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK) or sys.platform != "linux":
            raise
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))
