"""Processes for tests: started in a group of their own, bounded in time, and proved gone afterwards.

Every process gets a variable with a value of its own in its environment, which all its descendants inherit.
So a worker that left the process group (torchrun starts each worker in a new session) or lost its parent is
still found.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import psutil
import pytest

REPO = Path(__file__).resolve().parent.parent
BENCH = REPO / "scripts" / "bench"
MARK = "COURSE_TEST_MARK"
GRACE = 5.0  # seconds that descendants have to leave after the process that was waited for
TAIL = 50  # lines of output that a failure shows

# What torchrun reads or sets: tests see a plain torchrun, whatever the shell that runs pytest has exported.
_LAUNCHER = re.compile("RANK$|WORLD_SIZE$|LOCAL_|GROUP_|ROLE_|MASTER_|PET_|TORCHELASTIC_|TORCH_DISABLE_SHARE_")

Env = Mapping[str, str | None]


@dataclass(frozen=True)
class Completed:
    """A process that ended: its exit code (negative: a signal ended it), and stdout and stderr together."""

    returncode: int
    output: str

    def tail(self, lines: int = TAIL) -> str:
        return "\n".join(self.output.splitlines()[-lines:])


@dataclass(frozen=True)
class Running:
    """What `running` started; a test may signal it (`pid`) or any of its descendants (`processes`)."""

    popen: subprocess.Popen[bytes]
    mark: str
    log: IO[bytes]
    deadline: float

    @property
    def pid(self) -> int:
        return self.popen.pid

    def processes(self) -> list[psutil.Process]:
        """The process itself while it lives, and every living descendant."""
        return leftovers(self.mark, self.pid)

    def output(self) -> str:
        """What it and its descendants have written so far."""
        self.log.flush()
        return Path(self.log.name).read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Return when `text` is in the output; fail when the process ends, or its time is up, without it."""
        while text not in self.output():
            if self.popen.poll() is not None and text not in self.output():
                self._fail(f"ended with exit code {self.popen.returncode} and did not write {text!r}")
            if time.monotonic() > self.deadline:
                self._fail(f"did not write {text!r} in time")
            time.sleep(0.05)

    def wait(self) -> Completed:
        """Wait for the end, and for every descendant to leave within the grace; fail when either does not."""
        try:
            code = self.popen.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._fail("did not end in time")
        limit = time.monotonic() + GRACE
        while (left := self.processes()) and time.monotonic() < limit:
            time.sleep(0.05)
        if left:
            self._fail(f"ended with exit code {code} and left behind: {'; '.join(map(describe, left))}")
        return Completed(code, self.output())

    def _fail(self, what: str) -> NoReturn:
        # Described before they are killed, and killed before pytest prints: what hung is half the diagnosis.
        living = "\n".join(map(describe, self.processes()))
        kill_all(self.mark, self.pid)
        tail = Completed(0, self.output()).tail()
        pytest.fail(f"{self.popen.args!r}\n{what}\nliving then:\n{living}\nlast {TAIL} lines:\n{tail}", pytrace=False)


def describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    return f"pid {process.pid} (gone)"


def leftovers(mark: str, group: int | None = None) -> list[psutil.Process]:
    """Living processes whose environment carries this mark, or that are in this process group.

    The group adds descendants that cleared their environment, as `env -i` does. A zombie does not count.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            marked = mark in process.environ().get(MARK, "").split(",")
            if marked or (os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process)
    return found


def kill_all(mark: str, group: int, patience: float = 10.0) -> None:
    """SIGKILL all of `leftovers` until there are none: a dying agent may still be starting workers."""
    limit = time.monotonic() + patience
    while (found := leftovers(mark, group)) and time.monotonic() < limit:
        for process in found:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        time.sleep(0.02)


def child_env(env: Env | None, mark: str) -> dict[str, str]:
    """This process's environment, marked, with this checkout first on the path; None removes a variable."""
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    marks = ",".join(filter(None, [os.environ.get(MARK), mark]))  # a pytest that a test launched: both find it
    changes: dict[str, str | None] = {"PYTHONPATH": path, **(env or {}), MARK: marks}
    return {k: v for k, v in {**os.environ, **changes}.items() if v is not None}


@contextmanager
def running(
    cmd: Sequence[str | Path], timeout: float = 240.0, env: Env | None = None, cwd: Path | None = None
) -> Iterator[Running]:
    """Start `cmd` in a session of its own; whatever happens in the block, nothing of it lives afterwards.

    `timeout` is in seconds from the start and bounds `wait` and `wait_for`. The output goes to a file, since
    a pipe that a leftover holds open would block its reader. `cwd` is by default the caller's directory.
    """
    mark = uuid.uuid4().hex
    with tempfile.NamedTemporaryFile(prefix="course-test-", suffix=".log") as log:
        popen = subprocess.Popen(
            [str(word) for word in cmd],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_env(env, mark),
            cwd=cwd,
        )
        try:
            yield Running(popen, mark, log, time.monotonic() + timeout)
        finally:
            kill_all(mark, popen.pid)
            popen.wait(10)


def launch(
    cmd: Sequence[str | Path], timeout: float = 240.0, env: Env | None = None, cwd: Path | None = None
) -> Completed:
    """Run `cmd` to its end, whatever its exit code. Passing `timeout` or leaving a process behind fails."""
    with running(cmd, timeout, env, cwd) as process:
        return process.wait()


def torchrun_cmd(
    *args: str | Path | float,
    script: str | Path,
    nproc: int = 2,
    max_restarts: int = 0,
    run_dir: Path | None = None,
    standalone: bool = True,
    agent_args: Sequence[str] = (),
) -> list[str]:
    """The command line of one torchrun agent, for `running` or `launch`.

    A relative `script` is taken from the repository's root. `run_dir` becomes `--run-dir`. Without
    `standalone` the rendezvous comes from `agent_args` (torchrun's default there is one fixed port).
    """
    if not standalone and not agent_args:
        raise ValueError("standalone=False needs agent_args that name a rendezvous")
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *(["--standalone"] if standalone else []),
        *agent_args,
    ]
    agent += [f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
    tail = [] if run_dir is None else ["--run-dir", str(run_dir)]
    return [*agent, str(REPO / script), *map(str, args), *tail]


def torchrun_env(env: Env | None = None) -> dict[str, str | None]:
    """What a torchrun agent gets on top of this process's environment; `env` has the last word.

    One thread a rank, no progress bars, and nothing that an outer launcher left. In particular
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not set: scripts must survive the plain torchrun that people type.
    """
    plain = {name: None for name in os.environ if _LAUNCHER.match(name)}
    return {**plain, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "RES_OPTIONS": "timeout:1 attempts:1", **(env or {})}


def torchrun(
    *args: str | Path | float,
    script: str | Path,
    nproc: int = 2,
    max_restarts: int = 0,
    timeout: float = 240.0,
    run_dir: Path | None = None,
    env: Env | None = None,
    cwd: Path | None = None,
    standalone: bool = True,
    agent_args: Sequence[str] = (),
) -> Completed:
    """Run one torchrun agent to its end, as `launch` does. See `torchrun_cmd` and `torchrun_env`."""
    cmd = torchrun_cmd(
        *args,
        script=script,
        nproc=nproc,
        max_restarts=max_restarts,
        run_dir=run_dir,
        standalone=standalone,
        agent_args=agent_args,
    )
    return launch(cmd, timeout, torchrun_env(env), cwd)


def free_port() -> int:
    """A TCP port that was free a moment ago. Prefer port 0 wherever the program can choose for itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
