"""The work directory of a job: one runner holds it, and others may ask it to end a pod."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from course_lib.engine import UsageError


@contextmanager
def usable(workdir: Path) -> Iterator[None]:
    """For what is done in it. Raises UsageError in one line where it is full, or has something else in the place."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        raise UsageError(f"the work directory {workdir} cannot be used: {what}") from None


def take(workdir: Path) -> TextIO:
    """Take the directory, for as long as what is returned is open. Raises UsageError when another runner has it."""
    with usable(workdir):
        (workdir / "requests").mkdir(parents=True, exist_ok=True)
        lock = (workdir / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UsageError(f"another job runs in {workdir}: give another --workdir, or stop it") from None
    list(requests(workdir))  # what was asked of an earlier runner
    with usable(workdir):
        (workdir / "pods.json").unlink(missing_ok=True)
    return lock


def record(workdir: Path, pods: Mapping[str, object]) -> None:
    """Write `pods.json`, whole or not at all. Raises OSError."""
    whole = workdir / f".pods.{os.getpid()}"
    try:
        whole.write_text(json.dumps(pods, indent=1) + "\n")
        whole.replace(workdir / "pods.json")
    except OSError:
        with suppress(OSError):
            whole.unlink()
        raise


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
    with usable(workdir):
        (workdir / "requests" / f"{verb} {pod}").touch()


def requests(workdir: Path) -> Iterator[tuple[str, str]]:
    """(verb, pod) of each request that has come since the last call."""
    for path in sorted((workdir / "requests").glob("*")):
        with suppress(OSError):
            path.unlink()
        verb, _, pod = path.name.partition(" ")
        yield verb, pod
