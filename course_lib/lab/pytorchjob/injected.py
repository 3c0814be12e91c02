"""What a pod of a PyTorchJob finds in its environment, and what `$(NAME)` stands for.

Taken from the training operator of release 1.9 (kubeflow/trainer, tag v1.9.4): `pkg/controller.v1/pytorch/envvar.go`
(which variables, when, and their order), `master.go` (MASTER_*), `elastic.go` (PET_RDZV_* and what belongs to it).
The operator appends its variables to those of the manifest, and of two with one name the last one counts: a manifest
cannot override them. How references resolve is Kubernetes' (kubernetes/kubernetes,
`third_party/forked/golang/expansion/expand.go`): from left to right, `$$` is a dollar, and an undefined one stays.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from course_lib.lab.pytorchjob.job import Container, Elastic, Pod, PyTorchJob

_REFERENCE = re.compile(r"\$(\$|\(([^)]*)\))")
_NESTED = re.compile(r"(?<!\$)\$\([^)]*\$\(([A-Z_][A-Z0-9_]*)\)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")


def injected(job: PyTorchJob, pod: Pod) -> dict[str, str]:
    """What the operator adds to the environment of a pod, in its order."""
    found = {"PYTHONUNBUFFERED": "1"}
    nodes = sum(replica.replicas for replica in job.replicas)
    if (master := job.replica("Master")) is not None:
        port, address = str(master.container.port), f"{job.name}-master-0"
        found |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": address, "PET_MASTER_ADDR": address}
        found |= {"WORLD_SIZE": str(nodes * processes(job)), "RANK": str(pod.rank), "PET_NODE_RANK": str(pod.rank)}
    if job.nproc_per_node is not None:
        found["PET_NPROC_PER_NODE"] = job.nproc_per_node
    if job.elastic is None:
        return found | {"PET_NNODES": str(nodes)}
    return found | _elastic(job, job.elastic)


def processes(job: PyTorchJob) -> int:
    """The processes of a pod, as WORLD_SIZE counts them: 1 unless `nprocPerNode` is a number."""
    given = job.nproc_per_node or ""
    return int(given) if re.fullmatch(r"[-+]?\d+", given) else 1


def _elastic(job: PyTorchJob, policy: Elastic) -> dict[str, str]:
    worker = job.replica("Worker")
    assert worker is not None  # an elasticPolicy without workers is refused
    host = policy.host if policy.host is not None else f"{job.name}-worker-0"
    port = policy.port if policy.port is not None else worker.container.port
    found = {"PET_RDZV_ENDPOINT": f"{host}:{port}", "PET_RDZV_BACKEND": policy.backend}
    found["PET_NNODES"] = f"{policy.min_replicas}:{policy.max_replicas}"
    optional = {
        "PET_MAX_RESTARTS": policy.max_restarts,
        "PET_NPROC_PER_NODE": policy.nproc_per_node,
        "PET_RDZV_ID": policy.id,
        "PET_RDZV_CONF": ",".join(f"{key}={value}" for key, value in policy.conf) or None,
        "PET_STANDALONE": "" if policy.standalone else None,
    }
    return found | {name: str(value) for name, value in optional.items() if value is not None}


def resolve(text: str, environment: Mapping[str, str]) -> str:
    """`text` with each `$(NAME)` that is defined replaced by its value."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else environment.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def own_environment(container: Container) -> dict[str, str]:
    """What the manifest sets; a value may refer to those above it."""
    found: dict[str, str] = {}
    for name, value in container.env:
        found[name] = resolve(value, found)
    return found


def environment(job: PyTorchJob) -> dict[str, dict[str, str]]:
    """pod -> its environment, without what comes with the image."""
    return {pod.name: pod_environment(job, pod) for pod in job.pods}


def pod_environment(job: PyTorchJob, pod: Pod) -> dict[str, str]:
    replica = job.replica(pod.kind)
    assert replica is not None
    return own_environment(replica.container) | injected(job, pod)


def is_shell(container: Container) -> bool:
    """Whether a shell runs a script that stands in the command itself."""
    words = container.words
    return (
        bool(words)
        and PurePath(words[0]).name in ("sh", "bash", "dash", "ash", "zsh")
        and any(re.fullmatch(r"-[a-z]*c", word) for word in words[1:4])
    )


def undefined(job: PyTorchJob) -> Iterator[str]:
    """A line for each reference to a variable that the pod will not have.

    Kubernetes leaves such a reference as it stands, and the program gets `$(NAME)` as its argument. In a shell's
    script a name in small letters is a command of the shell, as `$(hostname)`.
    """
    for replica in job.replicas:
        container = replica.container
        pod = next(pod for pod in job.pods if pod.kind == replica.kind)
        known = pod_environment(job, pod)
        for field, words in (("command", container.command), ("args", container.args)):
            for number, word in enumerate(words):
                if is_shell(container) and (nested := _NESTED.search(word)):
                    where = f"{container.where}.{field}[{number}]"
                    yield f"{where}: $({nested[1]}) stands in another $(…), where it stays as it is: write ${nested[1]}"
                for name in _unknown(word, known):
                    if not (is_shell(container) and not name.isupper()):
                        yield f"{container.where}.{field}[{number}]: $({name}) is not defined in this pod"
        above: dict[str, str] = {}
        for number, (key, value) in enumerate(container.env):
            for name in _unknown(value, above):
                late = " here: the operator's variables come after these; use it in command or args"
                where = f"{container.where}.env[{number}].value"
                yield f"{where}: $({name}) is not defined" + (late if name in known else " in this pod")
            above[key] = value


def _unknown(text: str, known: Mapping[str, str]) -> Iterator[str]:
    for match in _REFERENCE.finditer(text):
        if match[1] != "$" and _NAME.match(match[2]) and match[2] not in known:
            yield match[2]
