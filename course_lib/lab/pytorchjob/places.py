"""Where pods run: each in namespaces of its own, as in a cluster, or all together where the system allows no such.

In namespaces a pod has its own network and address, its own name, and process ids that begin at 1: a command that
ignores SIGTERM because nothing handles it (as every PID 1 does) ignores it here too. The other pods' names resolve.
Without them, pods are processes with an address of the loopback each, and names are replaced by addresses. A process
that hides SIGTERM from what it has started then ends itself, and torchrun takes every address of the loopback for its
own: the rendezvous store is served by the agent that comes first, not by the one that the manifest names. And a port
is the same for all jobs, so one job at a time has it (`ports`).
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Protocol

from course_lib.engine import UsageError
from course_lib.lab.netns import Namespaces
from course_lib.lab.networks import free_port
from course_lib.lab.pytorchjob.job import Pod, PyTorchJob
from course_lib.lab.pytorchjob.ports import hold, meeting_ports

# PID 1 of a pod, until all is in place and it gives way to the container's command.
SETUP = 'set -e; hostname "$1"; mount -t proc proc /proc; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class Place(Protocol):
    """`note` says in a line what a pod lacks here, empty where it lacks nothing; `names` are to be replaced."""

    note: str
    isolated: bool
    names: Mapping[str, str]

    def address(self, pod: Pod) -> str: ...

    def inside(self, pod: Pod) -> list[str]: ...

    def environment(self, pod: Pod) -> Mapping[str, str]: ...

    def close(self) -> None: ...


class Isolated:
    """Each pod in namespaces of its own. Raises UsageError where this user may not make them.

    And OSError where `workdir` cannot be written to.
    """

    note = ""
    isolated = True
    names: Mapping[str, str] = {}

    def __init__(self, pods: Sequence[Pod], workdir: Path) -> None:
        if len(pods) > len(ascii_lowercase):
            raise UsageError(f"{len(pods)} pods are too many for one machine: {len(ascii_lowercase)} are the most")
        self._letters = dict(zip((pod.name for pod in pods), ascii_lowercase, strict=False))
        self._network = Namespaces("".join(self._letters.values()))
        self._hosts = workdir / "hosts"
        # The second form is what torch's store looks up for a client, and would ask a name server for.
        forms = [f"{prefix}{self.address(pod)} {pod.name}" for pod in pods for prefix in ("", "::ffff:")]
        lines = ["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost", "::1 localhost", *forms]
        try:
            self._hosts.write_text("\n".join(lines) + "\n")
        except OSError:
            self.close()
            raise
        try:
            self._try(pods[0])
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            said = getattr(error, "stderr", None)
            raise UsageError(f"this system does not let you make a container ({said or error})".strip()) from None

    def address(self, pod: Pod) -> str:
        return self._network.address(self._letters[pod.name])

    def inside(self, pod: Pod) -> list[str]:
        """The words that run a command as PID 1 of a pod; they end with its exit code."""
        own = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--"]
        setup = ["sh", "-c", SETUP, "pod", pod.name, str(self._hosts)]
        return [*self._network.inside(self._letters[pod.name]), *own, *setup]

    def environment(self, pod: Pod) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        self._network.close()

    def _try(self, pod: Pod) -> None:
        subprocess.run([*self.inside(pod), "true"], check=True, capture_output=True, text=True, timeout=10)


class Together:
    """All pods in the machine's own network and process table. Raises UsageError where another job has their port."""

    isolated = False

    def __init__(self, job: PyTorchJob, reason: str) -> None:
        pods = job.pods
        self.names: Mapping[str, str] = {pod.name: _loopback(pod.rank) for pod in pods}
        self._ports = hold(meeting_ports(job), self.names.values())
        self.note = f"pods share this machine's network and processes ({reason}): their names are replaced by " + (
            f"addresses, {pods[0].name} by {self.names[pods[0].name]}"
        )

    def address(self, pod: Pod) -> str:
        return self.names[pod.name]

    def inside(self, pod: Pod) -> list[str]:
        return []

    def environment(self, pod: Pod) -> Mapping[str, str]:
        return {"PET_LOCAL_ADDR": self.names[pod.name]}  # else torchrun takes the machine's own name

    def close(self) -> None:
        self._ports.close()


def _loopback(rank: int) -> str:
    """An address of the loopback for each pod; on macOS, which has only one, the same for all."""
    address = f"127.0.0.{2 + rank % 200}"
    try:
        free_port(address)
    except OSError:
        return "127.0.0.1"
    return address


def find_place(job: PyTorchJob, workdir: Path, isolated: bool | None = None) -> Place:
    """Namespaces if this user may make them, unless `isolated` is False; if it is True, nothing else will do."""
    if isolated is False:
        return Together(job, "as asked")
    try:
        return Isolated(job.pods, workdir)
    except UsageError as error:
        if isolated:
            raise
        return Together(job, str(error))
