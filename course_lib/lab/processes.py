"""Find and end the processes of a launch, whatever became of their parents.

Every launch puts a name of its own into a variable of its environment, and all its descendants inherit it. So a
worker is found although torchrun gave it a session of its own, and although its agent is dead. A guard, a small
process beside the notebook's kernel, ends all launches of the kernel when that dies.

Run as a program, this file is the guard. It starts in milliseconds, so it must import the standard library only.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What every job of the course gets: one thread a rank, no progress bars, a store of its own for each restart.
JOB_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # torch looks up the name of each address that connects; a name server that does not answer, as offline, costs
    # 10 s a time by default.
    "RES_OPTIONS": "timeout:1 attempts:1",
}

MARK = "COURSE_LAUNCH"
_PERIOD_S = 0.2


@dataclass(frozen=True)
class Process:
    """A living process (no zombie) that carries a mark, with the environment that it was started with."""

    pid: int
    parent: int
    command: tuple[str, ...]
    environment: dict[str, str]


def marked(mark: str) -> list[Process]:
    """The living processes of the launch `mark`, oldest pid first, without this one."""
    found = _from_proc(mark) if Path("/proc/self/environ").exists() else _from_ps(mark)
    return sorted((p for p in found if p.pid != os.getpid()), key=lambda p: p.pid)


def kill_marked(mark: str, quiet: int = 1, patience_s: float = 5.0) -> list[Process]:
    """SIGKILL all of `marked` until `quiet` looks in a row find none; returns what was killed.

    A dying agent may just be starting a worker, which no look finds yet, so a `quiet` above 1 looks again.
    """
    killed: dict[int, Process] = {}
    calm, deadline = 0, time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = marked(mark)
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
            killed[process.pid] = process
        calm = 0 if found else calm + 1
        if calm >= quiet:
            break
        time.sleep(0.05)
    return list(killed.values())


def describe_exit(code: int) -> str:
    """An exit code in words: a negative one, or one of a shell above 128, is a signal."""
    number = -code if code < 0 else code - 128
    with suppress(ValueError):
        return f"exit code {code} ({signal.Signals(number).name})" if number > 0 else f"exit code {code}"
    return f"exit code {code}"


def _from_proc(mark: str) -> list[Process]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            raw = (folder / "environ").read_bytes()
            if mark.encode() not in raw:
                continue
            environment = _environment(raw.decode(errors="replace").split("\0"))
            # The name in brackets may hold anything, also brackets; the fields follow the last one.
            state, parent = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[:2]
            if mark in environment.get(MARK, "").split(",") and state not in "ZX":
                command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                found.append(Process(int(folder.name), int(parent), tuple(command), environment))
    return found


def _from_ps(mark: str) -> list[Process]:
    """The same where there is no /proc: macOS shows the environment of one's own processes in `ps`."""
    show_environment = "-E" if sys.platform == "darwin" else "e"
    command = ["ps", "axww", show_environment, "-o", "pid=,ppid=,stat=,command="]
    found = []
    for line in subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.splitlines():
        fields = line.split()
        if len(fields) > 3 and not fields[2].startswith("Z"):
            environment = _environment(fields[4:])
            if mark in environment.get(MARK, "").split(","):
                found.append(Process(int(fields[0]), int(fields[1]), tuple(fields[3:]), environment))
    return found


def _environment(pairs: list[str]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


_guards: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}  # by pid: a fork needs a guard of its own


def kernel_mark() -> str:
    """The mark of everything that this process launches; the first call starts the guard."""
    me = os.getpid()
    if me not in _guards:
        mark = f"kernel-{uuid.uuid4().hex}"
        _guards[me] = mark, _start_guard(mark)
    return _guards[me][0]


def launch_mark() -> tuple[str, str]:
    """(mark, value) for a new launch: its own mark, and the variable's value, which holds the kernel's, too."""
    mark = f"launch-{uuid.uuid4().hex}"
    return mark, f"{kernel_mark()},{mark}"


def _start_guard(mark: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,  # the kernel's interrupt goes to its whole process group
    )


def _guard(parent: int, mark: str) -> None:
    """Wait until `parent` is gone, then end all that it launched. A poll, for no signal tells of it on macOS."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.getppid() == parent:
        time.sleep(_PERIOD_S)
    kill_marked(mark, quiet=10)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
