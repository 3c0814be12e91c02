"""The work directory of a job: one runner holds it, and others may ask it to end a pod."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from course_lib.engine import UsageError


def take(workdir: Path) -> TextIO:
    """Take the directory, for as long as what is returned is open. Raises UsageError when another runner has it."""
    try:
        (workdir / "requests").mkdir(parents=True, exist_ok=True)
        lock = (workdir / "lock").open("a")
    except OSError as error:
        raise UsageError(f"the work directory {workdir} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UsageError(f"another job runs in {workdir}: give another --workdir, or stop it") from None
    list(requests(workdir))  # what was asked of an earlier runner
    (workdir / "pods.json").unlink(missing_ok=True)
    return lock


def ask(workdir: Path, verb: str, pod: str) -> None:
    """Leave a request where the runner looks for it. Raises UsageError when there is no such job, or no such pod."""
    try:
        with (workdir / "lock").open() as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            raise UsageError(f"no job runs in {workdir}")
        pods = json.loads((workdir / "pods.json").read_text())
    except (OSError, ValueError):
        raise UsageError(f"{workdir} is not the work directory of a job that runs") from None
    if pod not in pods:
        raise UsageError(f"there is no pod {pod!r} in {workdir}: there is {', '.join(pods)}")
    (workdir / "requests" / f"{verb} {pod}").touch()


def requests(workdir: Path) -> Iterator[tuple[str, str]]:
    """(verb, pod) of each request that has come since the last call."""
    for path in sorted((workdir / "requests").glob("*")):
        path.unlink(missing_ok=True)
        verb, _, pod = path.name.partition(" ")
        yield verb, pod
