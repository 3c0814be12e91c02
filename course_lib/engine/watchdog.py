"""Requests to stop, from signals, with the sender: an agent's SIGTERM means something else than anybody's."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is how Slurm warns
AGENT = "COURSE_AGENT"  # the pid of an agent whose workers are not its own children
_PR_SET_PDEATHSIG = 1
_AGENT_MODULES = ("torch.distributed.run", "torch.distributed.launch", "course_lib.engine.launch")


class StopWatch:
    """Turns SIGTERM, SIGINT and SIGUSR1 into `requested`, which the trainer looks at after each step.

    Where the system has `sigwaitinfo` (Linux), a thread waits for the signals: it sees who sent them, and it sees
    them while the main thread is inside a collective, where a Python handler does not run. While it is not
    `armed`, there is nothing to save and a signal ends the process.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.sender: int | None = None
        self.armed = False
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._thread: threading.Thread | None = None
        self._leaving = False
        self._deadline = math.inf

    def stop_after(self, limit_s: float | None) -> None:
        """Ask to stop once `limit_s` seconds have passed since the start of the agent (of this process without one)."""
        if limit_s is not None:
            self._deadline = time.monotonic() + limit_s - (time.time() - launch_time())

    @property
    def asked(self) -> bool:
        """Whether it is time to stop: a signal came, or the limit is reached."""
        return self.requested is not None or time.monotonic() >= self._deadline

    def start(self) -> None:
        """Begin to watch; only the main thread can, elsewhere this does nothing. `stop` undoes it."""
        if self._old_handlers or threading.current_thread() is not threading.main_thread():
            return
        # A thread that doesn't block the signal may get it, so the default action (death) has to go, too.
        self._old_handlers = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS}
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            self._leaving = False
            self._thread = threading.Thread(target=self._wait, name="stop-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Leave the signals as they were before."""
        if not self._old_handlers:
            return
        self._leaving = True
        if self._thread is not None and self._thread.ident is not None:
            # A daemon thread that wakes up while the interpreter ends aborts the process now and then, so it has to
            # be gone; a signal of its own wakes it.
            signal.pthread_kill(self._thread.ident, signal.SIGTERM)
            self._thread.join()
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        self._old_handlers = {}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def from_agent(self) -> bool:
        """Whether the request came from the elastic agent.

        The sender stays unknown where a thread of a library, older than the watch, got the signal (OpenBLAS has
        some, unless OMP_NUM_THREADS is 1), and where there is no `sigwaitinfo`. Then the agent is assumed: to take
        a stranger's signal for the agent's costs a restart, the other mistake would end the job when a node joins.
        """
        if self.requested is None:
            return False
        return self.sender == agent_pid() or (self.sender is None and "TORCHELASTIC_RUN_ID" in os.environ)

    def _wait(self) -> None:
        while True:
            info = signal.sigwaitinfo(STOP_SIGNALS)
            if self._leaving:
                return
            self._note(info.si_signo, info.si_pid)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        self._note(signum, None)

    def _note(self, signum: int, sender: int | None) -> None:
        if self.requested is None:
            self.requested, self.sender = signal.Signals(signum), sender
        if not self.armed:
            print(f"stopped by {self.requested.name} outside of training", file=sys.stderr, flush=True)
            os._exit(1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies (Linux), so that no worker trains on as an orphan."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def die_with_agent() -> None:
    """`die_with_parent` for a worker, whose agent may have died while it was importing: then init is its parent."""
    parent = os.getppid()
    if parent == 1 and not is_agent(1) and "python" not in " ".join(command_line(1)):
        print("the agent is gone, so this worker leaves", file=sys.stderr, flush=True)
        os._exit(1)
    die_with_parent(parent)


def agent_pid() -> int:
    """The elastic agent of this worker: its parent, or the parent of its fork server, as the launcher has named it."""
    named, parent = os.environ.get(AGENT), os.getppid()
    return int(named) if named and named in stat_of(parent)[1:2] else parent


def is_agent(pid: int) -> bool:
    """Whether the command line of `pid` is that of an elastic agent, and not one that only mentions it."""
    words = command_line(pid)
    if words and Path(words[0]).name == "torchrun":
        return True
    if not words or "python" not in Path(words[0]).name:
        return False
    for before, word, following in zip_longest(words, words[1:], words[2:]):
        if before in ("-W", "-X"):
            continue
        if word == "-m":
            return following in _AGENT_MODULES
        if word is not None and not word.startswith("-"):
            return Path(word).name == "torchrun"
    return False


def process_start_time(pid: int) -> float:
    """When a process began, in Unix seconds: from /proc on Linux, else now."""
    try:
        ticks = int(stat_of(pid)[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()


def stat_of(pid: int) -> list[str]:
    """What Linux says of a process after its name: state, parent, …; nothing of one that is gone, or elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def launch_time() -> float:
    """When this launch of the job began here, in Unix seconds: with its agent, without one with this process."""
    return process_start_time(agent_pid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())


def command_line(pid: int) -> list[str]:
    """The words of a process's command line; empty when they cannot be known."""
    path = Path(f"/proc/{pid}/cmdline")
    try:
        if path.exists():
            return path.read_bytes().decode(errors="replace").split("\0")[:-1]
        shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, timeout=5)
        return shown.stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
