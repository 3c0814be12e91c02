"""The ports of a job that shares the machine's network: one job at a time has each, else the pods of two would mix."""

import errno
import re
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from string import Template

from course_lib.engine import UsageError
from course_lib.lab.pytorchjob.injected import pod_environment, resolve
from course_lib.lab.pytorchjob.job import PyTorchJob
from course_lib.lab.pytorchjob.torchrun import torchrun_command

_TORCHRUNS = "29400"  # of an endpoint without one
_PATIENCE_S = 1.0


def meeting_ports(job: PyTorchJob) -> set[int]:
    """Where the pods of a job meet: as the operator tells them, and as stands behind a pod's name in their words."""
    names = "|".join(re.escape(pod.name) for pod in job.pods)
    found = set()
    for pod in job.pods:
        container, known = job.replica_of(pod).container, pod_environment(job, pod)
        command = torchrun_command(container)
        options = command.options if command is not None else {}
        words = [Template(resolve(word, known)).safe_substitute(known) for word in container.words]
        found |= {known.get("MASTER_PORT", ""), options.get("master_port", "")}
        for text in (*words, *known.values()):
            found |= set(re.findall(rf"(?<![\w.-])(?:{names}):(\d+)", text))
        if re.fullmatch(names, resolve(options.get("rdzv_endpoint", ""), known)):
            found.add(_TORCHRUNS)
    return {int(port) for port in found if port.isdecimal() and 0 < int(port) < 2**16}


def hold(ports: Iterable[int], addresses: Iterable[str]) -> ExitStack:
    """Take the ports until what is returned is closed. Raises UsageError for one that somebody has.

    A datagram socket marks each as taken: torch's sockets are streams and do not see it, and the system closes it with
    its process, however that ends.
    """
    with ExitStack() as held:
        for port in sorted(ports):
            mark = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            try:
                mark.bind(("127.0.0.1", port))
                taken = any(_listens(address, port) for address in {"127.0.0.1", *addresses})
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
            if taken:
                raise UsageError(
                    f"port {port} is taken, and here it is the same for all jobs, whose pods would mix: end the job or "
                    "program that has it, or give the container another containerPort called pytorchjob-port"
                )
        return held.pop_all()


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_PATIENCE_S).close()
    except OSError:
        return False
    return True
