"""One download per file system, whole or not at all.

One process downloads while it holds a file lock; the others wait for the lock and then find the files. A killed
download leaves no lock behind, only a staging folder, which the next holder removes.
"""

import http.client
import shutil
import socket
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from course_lib.engine.errors import UsageError
from course_lib.workloads.once import sole_holder
from course_lib.workloads.optional import reason

SILENCE = 60.0  # seconds without a byte after which a source counts as dead; urllib would wait for ever
DOWNLOAD_ERRORS = (OSError, RuntimeError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error)


def fetch_once(
    name: str,
    root: Path,
    complete: Callable[[], bool],
    download: Callable[[Path], None],
    archives: tuple[Path, ...],
    cure: str,
) -> None:
    """Make ``complete()`` true by ``download(folder)``, in one process per file system.

    ``download`` fills an empty folder beside the final place; its files are then renamed into ``root`` one by
    one, so that each is whole from the moment it is visible. Compressed archives are left behind. Those that
    the user has put into ``root`` (``archives``, relative paths) are handed to ``download`` first, so that a
    machine without a network needs none.

    Nothing is written, locked or asked of the network when the files are there.

    Errors: ``UsageError``, ending with ``cure``. A process that waited for one that failed fails at once with
    the same line, instead of trying the dead source in its turn.
    """
    try:
        if complete():
            return
        root.mkdir(parents=True, exist_ok=True)
        with sole_holder(root / f".{name}.lock", f"download {name}"):
            if not complete():
                _download(root, root / f".{name}.part", download, archives)
    except DOWNLOAD_ERRORS as error:
        raise UsageError(
            f"--data {name}: no complete files in {root} and no download ({reason(error)}): {cure}"
        ) from error
    if not complete():
        raise UsageError(f"--data {name}: the download into {root} is not what it should be: {cure}")


def _download(root: Path, stage: Path, download: Callable[[Path], None], archives: tuple[Path, ...]) -> None:
    # What is there was left by a process that was killed: we hold the lock, so nobody is at work on it.
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir()
        for archive in archives:
            if (root / archive).is_file():
                (stage / archive).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / archive, stage / archive)  # a copy: a bad one is downloaded over
        with _patience(SILENCE):
            download(stage)
        for file in sorted(stage.rglob("*")):
            if file.is_file() and file.suffix != ".gz":
                target = root / file.relative_to(stage)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Let a socket that says nothing for so long raise ``TimeoutError``."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
