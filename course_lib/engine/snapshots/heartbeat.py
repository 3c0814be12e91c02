"""Whether another job lives in a run directory: a counter that moves while we watch, on our own clock."""

import contextlib
import socket
import threading
import time
from pathlib import Path

from course_lib.engine.snapshots.files import read_file
from course_lib.engine.snapshots.records import Claim

PERIOD_S = 0.5


class Heartbeat:
    """Counts up in a small file for as long as the process lives; the file goes when it ends in order."""

    def __init__(self, directory: Path, claim: Claim) -> None:
        self._path = beat_path(directory, claim)
        self._leaving = threading.Event()
        self._count(1)  # not left to the thread, which may be slow to start: without the file nobody would watch
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        count = 1
        while not self._leaving.wait(PERIOD_S):
            count += 1
            self._count(count)

    def _count(self, count: int) -> None:
        # A disk that is full or gone costs the protection against a second job, not the run.
        with contextlib.suppress(OSError):
            self._path.write_text(f"{count}\n")

    def stop(self) -> None:
        """End in order."""
        self._leaving.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._path.unlink()


def beat_path(directory: Path, claim: Claim) -> Path:
    """Where the holder of a claim counts."""
    return directory / f"{claim.name}.beat"


def is_live(directory: Path, claim: Claim, watch_s: float = 5 * PERIOD_S) -> bool:
    """Whether the holder of `claim` still runs; watches its counter for `watch_s` seconds where that's not plain."""
    path = beat_path(directory, claim)
    first = _read(path)
    if first is None or (claim.host == this_machine() and not Path(f"/proc/{claim.pid}").exists()):
        return False
    deadline = time.monotonic() + watch_s
    while time.monotonic() < deadline:
        time.sleep(PERIOD_S / 5)
        if _read(path) not in (first, None):
            return True
    return False


def _read(path: Path) -> bytes | None:
    try:
        return read_file(path, 100)
    except OSError:
        return None


def this_machine() -> str:
    """A name for the space in which a pid means something: host, boot and pid name space."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text()[:8])
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)
