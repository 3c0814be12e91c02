"""Requests to stop, from signals, with the sender: an agent's SIGTERM means something else than anybody's."""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


class StopWatch:
    """Turns SIGTERM and SIGINT into `requested`, which the trainer looks at after each step.

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

    def start(self) -> None:
        """Begin to watch; only the main thread can, elsewhere this does nothing. `stop` undoes it."""
        if self._old_handlers or threading.current_thread() is not threading.main_thread():
            return
        # A thread that doesn't block the signal may get it, so the default action (death) has to go, too.
        self._old_handlers = {s: signal.signal(s, self._handle) for s in STOP_SIGNALS}
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
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
        """Whether the request came from the parent process, which under torchrun is the elastic agent."""
        return self.sender is not None and self.sender == os.getppid()

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
            print(f"stopped by {self.requested.name} before the first step", file=sys.stderr, flush=True)
            os._exit(1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies (Linux), so that no worker trains on as an orphan."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
