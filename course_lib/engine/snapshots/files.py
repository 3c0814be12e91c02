"""Files that are there whole or not at all."""

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_PIECE = 2**20  # bytes, which stay in the processor's cache until they are digested

Mark = tuple[int, int, int]  # inode, size and time of a file's content: other content in its place has another mark


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


def write_durably(path: Path, write: Callable[[BinaryIO], object]) -> Mark:
    """Make the file `path` from what `write` writes into it; it is on the disk when this returns its mark."""
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return mark(os.fstat(file.fileno()))


def mark(facts: os.stat_result) -> Mark:
    """The mark of a file of which these facts are known."""
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


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
    """The content of a file of at most `most` bytes; raises what `read_pieces` raises."""
    return b"".join(read_pieces(path, most))


def read_pieces(path: Path, most: int) -> Iterator[bytes]:
    """The content of a file of at most `most` bytes; OSError for anything else: a pipe or a device never ends."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if facts.st_size > most:
        raise OSError(errno.EFBIG, f"it has {facts.st_size} bytes instead of at most {most}", str(path))
    with path.open("rb") as file:
        yield from iter(lambda: file.read(_PIECE), b"")


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
