"""What one process of a file system does while the others wait for it.

Ranks, nodes that share a disk, and restarts all want the same files at once. A lock of the operating system goes
with the process that held it, so a killed one leaves no lock behind.
"""

import fcntl
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from course_lib.engine.errors import UsageError
from course_lib.workloads.optional import reason


@contextmanager
def sole_holder(path: Path, work: str) -> Iterator[None]:
    """Hold the lock file `path` while doing `work`; pass a failure of the holder on to those who wait for it.

    The lock file's text is the last failure, marked so that two equal failures differ. Who began to wait
    before the failure was written sees the text change; who comes later finds an old text and tries again.

    Errors: ``UsageError`` as the holder's, ``OSError`` for whatever else it met.
    """
    with path.open("a+") as lock:
        _take(lock, work)
        try:
            yield
        except Exception as error:
            lock.truncate(0)
            lock.write(f"{uuid.uuid4().hex} {reason(error)}")
            lock.flush()  # before the lock goes
            raise


def _take(lock: TextIO, work: str) -> None:
    before = _text(lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        print(f"waiting for another process to {work}", file=sys.stderr, flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
    after = _text(lock)
    if after and after != before:
        failure = after.partition(" ")[2]
        kind, _, text = failure.partition(": ")
        raise UsageError(text) if kind == UsageError.__name__ else OSError(f"another process tried: {failure}")


def _text(file: TextIO) -> str:
    file.seek(0)
    return file.read()
