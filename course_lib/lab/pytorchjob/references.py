"""References `$(NAME)` that nothing in the manifest defines."""

import re
from collections.abc import Iterator

from course_lib.lab.pytorchjob.injected import REFERENCE, pod_environment
from course_lib.lab.pytorchjob.job import Container, PyTorchJob
from course_lib.lab.pytorchjob.shell import shell_script

_NESTED = re.compile(r"(?<!\$)\$\([^)]*\$\(([A-Z_][A-Z0-9_]*)\)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")
_SERVICE = re.compile(r"[A-Z0-9_]+_SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?$")  # which each pod gets of each service


def undefined(job: PyTorchJob) -> Iterator[str]:
    """A line for each reference to a variable that the pod will not have.

    Kubernetes leaves such a reference as it stands, and the program gets `$(NAME)` as its argument. In a shell's
    script a name in small letters is a command of the shell, as `$(hostname)`.
    """
    for container, known in _containers(job):
        for where, name in _unknown_words(container, known):
            if not _elsewhere(container, name):
                yield f"{where}: $({name}) is not defined in this pod"
        for where, name in _unknown_values(container):
            if not _elsewhere(container, name):
                late = " here: the operator's variables come after these; use it in command or args"
                yield f"{where}: $({name}) is not defined" + (late if name in known else " in this pod")
        if shell_script(container) is not None:
            for where, word in container.placed_words():
                if (nested := _NESTED.search(word)) is not None:
                    yield f"{where}: $({nested[1]}) stands in another $(…), where it stays as it is: write ${nested[1]}"


def known_elsewhere(job: PyTorchJob) -> Iterator[str]:
    """A line for each reference to a variable that may be defined, which only a cluster knows."""
    for container, known in _containers(job):
        for where, name in (*_unknown_words(container, known), *_unknown_values(container)):
            if whose := _elsewhere(container, name):
                yield f"{where}: $({name}) {whose}, which needs a cluster: set it in env, to run it here"


def _elsewhere(container: Container, name: str) -> str:
    if container.env_from:
        return "may come from envFrom"
    return "is of a service" if _SERVICE.match(name) else ""


def _containers(job: PyTorchJob) -> Iterator[tuple[Container, set[str]]]:
    for replica in job.replicas:
        pod = next(pod for pod in job.pods if pod.kind == replica.kind)
        yield replica.container, {*pod_environment(job, pod), *(name for name, _ in replica.container.env)}


def _unknown_words(container: Container, known: set[str]) -> Iterator[tuple[str, str]]:
    shell = shell_script(container) is not None
    for where, word in container.placed_words():
        for name in _unknown(word, known):
            if not (shell and not name.isupper()):
                yield where, name


def _unknown_values(container: Container) -> Iterator[tuple[str, str]]:
    above: set[str] = set()
    for number, (key, value) in enumerate(container.env):
        for name in _unknown(value, above) if isinstance(value, str) else ():
            yield f"{container.where}.env[{number}].value", name
        above.add(key)


def _unknown(text: str, known: set[str]) -> Iterator[str]:
    for match in REFERENCE.finditer(text):
        if match[1] != "$" and _NAME.match(match[2]) and match[2] not in known:
            yield match[2]
