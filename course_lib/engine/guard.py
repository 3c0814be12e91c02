"""A small process beside each worker that kills it when it hangs: a hung process cannot do that itself.

When a rank hangs, the others run into the collective timeout and leave; but the agent would then wait 30 s for a rank
that is stopped or holds the interpreter's lock, and an agent on another node would not even know. So the first rank to
time out says in the group's store that the group is lost, and who has not left a moment later is killed by its guard.
Measured with gloo. NCCL's own watchdog ends a process without a word to the guards: there only a stop is seen.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from course_lib.engine.watchdog import die_with_parent, stat_of

_KEY = "group-is-lost"
_POLL_S, _GRACE_S = 0.2, 1.5
_guards: list[int] = []  # of this process


def start_guard(connect: Callable[[], Store], rank: int, timeout_s: float) -> None:
    """Fork the guard of this process; `connect()` makes a connection of its own to the group's store.

    It kills this process, and never another, when the group is lost and this process is still there, or when it has
    been stopped (SIGSTOP) for `timeout_s` seconds. It ends with its parent. Linux only; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    parent = os.getpid()
    if (pid := os.fork()) != 0:
        _guards.append(pid)
        return
    try:
        die_with_parent(parent)
        lost = threading.Event()
        threading.Thread(target=_listen, args=(connect, lost), daemon=True).start()
        _watch(parent, lost, rank, timeout_s)
    finally:
        os._exit(0)


def dismiss_guard() -> None:
    """End the guard of this process, which leaves its group in order; it would take the store's end for a failure."""
    while _guards:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid := _guards.pop(), signal.SIGKILL)
            os.waitpid(pid, 0)


def call_guards(store: Store) -> None:
    """Tell all guards that the group is lost; a store that has gone as well is not waited for."""

    def call() -> None:
        with suppress(RuntimeError):
            store.set(_KEY, "1")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(1.0)


def _listen(connect: Callable[[], Store], lost: threading.Event) -> None:
    with suppress(RuntimeError, TimeoutError):  # the store went away, and everybody knows
        connect().wait([_KEY], timedelta(days=1000))
        lost.set()


def _watch(parent: int, lost: threading.Event, rank: int, timeout_s: float) -> None:
    stopped_s = 0.0  # counted, since a whole machine may sleep
    while stopped_s < timeout_s and not lost.wait(_POLL_S):
        stopped_s = stopped_s + _POLL_S if stat_of(parent)[:1] == ["T"] else 0.0
    if lost.is_set():
        time.sleep(_GRACE_S)
    if os.getppid() == parent:
        why = (
            "hangs: it is still there, though the group is lost" if lost.is_set() else f"is stopped for {timeout_s:g} s"
        )
        os.write(2, f"rank {rank} (process {parent}) {why}; its guard kills it\n".encode())
        os.kill(parent, signal.SIGKILL)
