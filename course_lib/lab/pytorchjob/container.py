"""One life of a container: a command, its log, its exit code, and the end of all its processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from course_lib.lab.processes import JOB_SETTINGS, MARK, kill_marked, launch_mark, marked
from course_lib.lab.pytorchjob.job import Pod
from course_lib.lab.pytorchjob.places import SETUP, Place

START_ERROR = 128  # what Kubernetes reports for a command that cannot be started
_START_S = 20.0
# What a process of a job, or the shell around it, may carry, and no image does.
_FOREIGN = ("PET_", "TORCHELASTIC_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
_FOREIGN_NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


@dataclass(frozen=True)
class Plan:
    """What a container runs: resolved words and variables, the folder it works in, and the file for its output."""

    pod: Pod
    words: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    log: Path


def image_environment(pod: Pod) -> dict[str, str]:
    """What would come with the image: this environment's programs first on the path, and nothing of another job."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN) and k not in _FOREIGN_NAMES}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    settings = {k: v for k, v in JOB_SETTINGS.items() if not k.startswith(_FOREIGN)}
    return kept | settings | {"PATH": path, "HOSTNAME": pod.name}


class Container:
    """A container that has been started; `pid` is its PID 1, as this machine numbers it."""

    def __init__(self, plan: Plan, place: Place) -> None:
        self.mark, value = launch_mark()
        self.began = time.monotonic()
        self.pid = 0
        self.problem = ""  # why it could not be started, unless its log says so
        self._process: subprocess.Popen[bytes] | None = None
        # The marks of whoever started the runner stay: a notebook finds the workers by them, and ends them.
        marks = ",".join(filter(None, [os.environ.get(MARK, ""), value]))
        environment = {**image_environment(plan.pod), **place.environment(plan.pod), **plan.environment, MARK: marks}
        try:
            self._process = _begin(plan, place.inside(plan.pod), environment)
        except OSError as error:  # the disk is full, or the program is none for this machine
            self.problem = f"{error.filename or plan.words[0]}: {error.strerror}"
        if self._process is not None:
            self.pid = self._first(self._process) if place.isolated else self._process.pid

    def _first(self, process: subprocess.Popen[bytes]) -> int:
        """The process that is PID 1 of the pod, once it is the container's command."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and process.poll() is None:
            for child in marked(self.mark):
                if child.parent == process.pid and SETUP not in child.command:
                    return child.pid
            time.sleep(0.01)
        return process.pid  # it has ended already

    def poll(self) -> int | None:
        """The exit code, 128 and the signal's number where one ended it; None while it runs."""
        if self._process is None:
            return START_ERROR
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def terminate(self) -> None:
        """SIGTERM to PID 1, and to nothing else."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End all its processes, and wait until they are gone."""
        kill_marked(self.mark, quiet=2)
        if self._process is not None:
            self._process.wait(_START_S)


def _begin(plan: Plan, inside: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    with plan.log.open("ab") as log:
        if shutil.which(plan.words[0], path=environment["PATH"]) is None and not (
            "/" in plan.words[0] and os.access(plan.folder / plan.words[0], os.X_OK)
        ):
            log.write(f"cannot be started: there is no program {plan.words[0]}\n".encode())
            return None
        return subprocess.Popen(
            [*inside, *plan.words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=plan.folder,
            start_new_session=True,  # Ctrl-C is the runner's, which sends SIGTERM as the kubelet does
        )
