"""Traps of a single pod: its process 1, its grace period, its memory and its volumes."""

import re
from collections.abc import Iterator
from pathlib import PurePath, PurePosixPath

from course_lib.lab.pytorchjob.injected import is_shell
from course_lib.lab.pytorchjob.job import SHARED, PyTorchJob, Replica
from course_lib.lab.pytorchjob.torchrun import Command

SHUTDOWN_S = 30  # torchrun's --shutdown-timeout by default: SIGTERM to its workers, and so long later SIGKILL


def pod_traps(job: PyTorchJob, replica: Replica, command: Command | None) -> Iterator[tuple[str, str, str, str]]:
    """(name, path, why, cure) of each."""
    yield from _first_process(replica, command)
    yield from _grace(replica, command)
    yield from _memory(replica, command)
    yield from _snapshots(job, replica, command)


def _first_process(replica: Replica, command: Command | None) -> Iterator[tuple[str, str, str, str]]:
    container = replica.container
    if not is_shell(container):
        return
    script = " ".join(container.words[2:]).strip().replace("\\\n", " ")
    last = re.split(r"[\n;]|&&|\|\|", script.rstrip("; \n"))[-1].strip()
    # Measured: bash 5.2 gives its own process to the last command of a script, dash 0.5.12 (Debian's sh) never does.
    launcher = re.search(r"torchrun|torch\.distributed|engine\.launch", last)
    given_away = PurePath(container.words[0]).name == "bash" and (launcher or command is None)
    if not (last.startswith("exec ") or given_away):
        why = "the shell is process 1, which gets the SIGTERM and does not pass it on: training never hears of it"
        yield "shell", f"{container.where}.command", why, "exec before the last command, or the command without a shell"


def _grace(replica: Replica, command: Command | None) -> Iterator[tuple[str, str, str, str]]:
    given = command.options.get("shutdown_timeout", "") if command is not None else ""
    shutdown = int(given) if given.isdigit() else SHUTDOWN_S
    if replica.grace_s <= shutdown:
        path = f"{replica.where}.template.spec.terminationGracePeriodSeconds"
        why = f"SIGKILL comes after {replica.grace_s} s, and torchrun may wait {shutdown} s for its workers' snapshot"
        yield "grace", path, why, f"more than --shutdown-timeout ({shutdown}), which is more than a snapshot takes"


def _memory(replica: Replica, command: Command | None) -> Iterator[tuple[str, str, str, str]]:
    if command is not None and command.script_option("num-workers") == "0":
        return
    if not any(mount.path == "/dev/shm" and mount.memory for mount in replica.container.mounts):
        why = "/dev/shm has 64 MB in a container: loader workers that pass batches through it die with a bus error"
        cure = "an emptyDir volume with medium: Memory, mounted at /dev/shm, or --num-workers 0"
        yield "shm", f"{replica.container.where}.volumeMounts", why, cure


def _snapshots(job: PyTorchJob, replica: Replica, command: Command | None) -> Iterator[tuple[str, str, str, str]]:
    mounts = replica.container.mounts
    shared = [mount.path for mount in mounts if mount.kind in SHARED]
    path = f"{replica.container.where}.volumeMounts"
    cure = "a persistentVolumeClaim (ReadWriteMany for several nodes), with the run directory in it"
    if not shared:
        kinds = ", ".join(sorted({mount.kind for mount in mounts})) or "no volume"
        yield "no-shared-volume", path, f"{kinds}: a pod that is made anew finds no snapshot", cure
        return
    given = command.script_option("run-dir") if command is not None else None
    if given is not None and given.startswith("/") and not any(_below(given, mount) for mount in shared):
        yield "run-dir", path, f"--run-dir {given} is in none of the shared volumes ({', '.join(shared)})", cure


def _below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
