"""Traps of a single pod: its process 1, its grace period, its memory and its volumes."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from course_lib.lab.pytorchjob.job import SHARED, Replica
from course_lib.lab.pytorchjob.shell import Script, Statement, shell_script
from course_lib.lab.pytorchjob.torchrun import Command, launcher_at

SHUTDOWN_S = 30  # torchrun's --shutdown-timeout by default: SIGTERM to its workers, and so long later SIGKILL


Found = Iterator[tuple[str, str, str, str]]


def pod_traps(replica: Replica, command: Command | None) -> Found:
    """(name, path, why, cure) of each."""
    yield from _policy(replica)
    yield from _first_process(replica)
    yield from _grace(replica, command)
    words = command or Command(rest=replica.container.words)
    yield from _memory(replica, words)
    yield from _snapshots(replica, words)


def _policy(replica: Replica) -> Found:
    path = f"{replica.where}.restartPolicy"
    if replica.restart_policy == "Always":
        why = "starts a container again after its success, too: the job never succeeds"
        yield "always", path, why, "restartPolicy: OnFailure"
    if replica.restart_policy == "Never":
        yield "never", path, "the first pod that is lost ends the job", "restartPolicy: OnFailure"


def _first_process(replica: Replica) -> Found:
    script = shell_script(replica.container)
    if script is None or not script.statements:
        return
    path = f"{replica.container.where}.{'command' if replica.container.command else 'args'}"
    cure = "exec before the last command, or the command without a shell"
    launch = _launch(script)
    traps = [s for s in script.statements if s.words[0] == "trap" and {"TERM", "SIGTERM", "15"} & {*s.words[2:]}]
    # Measured: bash 5.2 gives its own process to the last command of a script, dash 0.5.12 (Debian's sh) never does.
    given = launch.words[0] == "exec" or (script.shell == "bash" and launch is script.statements[-1] and not traps)
    if given and not (launch.piped or launch.background):
        return
    action = traps[-1].words[1] if traps else ""
    if launch.background and (_calls(script, action) or "kill" in action):
        # Measured with both shells: the wait ends with the signal, and the script with it.
        if _calls(script, action) or "wait" in action or sum(s.words[0] == "wait" for s in script.statements) > 1:
            return
        why = (
            "the trap passes SIGTERM on, and the shell's wait ends with it: process 1 is gone before training has saved"
        )
        yield "shell", path, why, 'wait in the trap, too, as in trap "kill -TERM $pid; wait $pid" TERM, or exec'
        return
    why = "the shell is process 1, which gets the SIGTERM and does not pass it on: training never hears of it"
    yield "shell", path, why, cure


def _launch(script: Script) -> Statement:
    """The statement that trains: torchrun's, or the one that takes the shell's place, or that waits, or the last."""
    starts = [s for s in script.statements if launcher_at(s.words) is not None]
    execs = [s for s in script.statements if s.words[0] == "exec"]
    behind = [s for s in script.statements if s.background]
    return (*starts, *execs, *behind, script.statements[-1])[0]


def _calls(script: Script, action: str) -> bool:
    """Whether a trap calls a function of the script, whose body is not looked into."""
    names = [s.words[s.words[0] == "function" :][:1] for s in script.statements]
    return (action,) in names and action not in ("exit", "true")


def _grace(replica: Replica, command: Command | None) -> Found:
    if command is None:
        return  # nobody waits but the script itself
    given = command.options.get("shutdown_timeout", "")
    shutdown = int(given) if given.isdecimal() else SHUTDOWN_S
    if replica.grace_s <= shutdown:
        path = f"{replica.where}.template.spec.terminationGracePeriodSeconds"
        why = f"SIGKILL comes after {replica.grace_s} s, and torchrun may wait {shutdown} s for its workers' snapshot"
        yield "grace", path, why, f"more than --shutdown-timeout ({shutdown}), which is more than a snapshot takes"


def _memory(replica: Replica, command: Command) -> Found:
    if command.script_option("num-workers") == "0":
        return
    if not any(mount.path == "/dev/shm" and mount.memory for mount in replica.container.mounts):
        why = "/dev/shm has 64 MB in a container: loader workers that pass batches through it die with a bus error"
        cure = "an emptyDir volume with medium: Memory, mounted at /dev/shm, or --num-workers 0"
        yield "shm", f"{replica.container.where}.volumeMounts", why, cure


def _snapshots(replica: Replica, command: Command) -> Found:
    mounts = replica.container.mounts
    shared = [mount.path for mount in mounts if mount.kind in SHARED]
    path = f"{replica.container.where}.volumeMounts"
    cure = "a persistentVolumeClaim (ReadWriteMany for several nodes), with the run directory in it"
    if not shared:
        kinds = ", ".join(sorted({mount.kind for mount in mounts})) or "no volume"
        yield "no-shared-volume", path, f"{kinds}: a pod that is made anew finds no snapshot", cure
        return
    given = command.script_option("run-dir")
    if given is not None and given.startswith("/") and not any(_below(given, mount) for mount in shared):
        yield "run-dir", path, f"--run-dir {given} is in none of the shared volumes ({', '.join(shared)})", cure


def _below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
