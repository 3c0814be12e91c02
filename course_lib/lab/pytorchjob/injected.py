"""What a pod of a PyTorchJob finds in its environment, and what `$(NAME)` stands for.

Taken from the training operator of release 1.9 (kubeflow/trainer, tag v1.9.4): `pkg/controller.v1/pytorch/envvar.go`
(which variables, when, and their order), `master.go` (MASTER_*), `elastic.go` (PET_RDZV_* and what belongs to it).
The operator appends its variables to those of the manifest, and of two with one name the last one counts: a manifest
cannot override them. How references resolve is Kubernetes' (kubernetes/kubernetes,
`third_party/forked/golang/expansion/expand.go`): from left to right, `$$` is a dollar, and an undefined one stays.
"""

import re
from collections.abc import Mapping

from course_lib.lab.pytorchjob.job import Container, Elastic, Pod, PyTorchJob, Source

REFERENCE = re.compile(r"\$(\$|\(([^)]*)\))")


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

    return REFERENCE.sub(value, text)


def pod_fields(job: PyTorchJob, pod: Pod, address: str = "") -> dict[str, str]:
    """The fields that a `fieldRef` may name, as far as they are known: its address only where the pod has one."""
    known = {"metadata.name": pod.name, "metadata.namespace": job.namespace}
    return known | ({"status.podIP": address} if address else {})


def value_of(source: Source, fields: Mapping[str, str]) -> str | None:
    """The value behind a `valueFrom`, None where only a cluster knows it."""
    return fields.get(source.what) if source.kind == "fieldRef" else None


def own_environment(container: Container, fields: Mapping[str, str]) -> dict[str, str]:
    """What the manifest sets, as far as it is known; a value may refer to those above it."""
    found: dict[str, str] = {}
    for name, given in container.env:
        value = value_of(given, fields) if isinstance(given, Source) else resolve(given, found)
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def environment(job: PyTorchJob) -> dict[str, dict[str, str]]:
    """pod -> its environment, without what comes with the image, and what only a cluster knows (`unknown`)."""
    return {pod.name: pod_environment(job, pod) for pod in job.pods}


def pod_environment(job: PyTorchJob, pod: Pod) -> dict[str, str]:
    """The environment of one pod, as far as it is known before the pod has an address."""
    return own_environment(job.replica_of(pod).container, pod_fields(job, pod)) | injected(job, pod)


def unknown(job: PyTorchJob, pod: Pod) -> list[str]:
    """What is in the pod's environment as well, and only a cluster knows: the names, and where each comes from."""
    container, known = job.replica_of(pod).container, pod_environment(job, pod)
    sources = {name: given for name, given in container.env if isinstance(given, Source) and name not in known}
    names = [f"{name} ({source.kind} {source.what})" for name, source in sources.items()]
    return names + [f"whatever {each} holds" for each in container.env_from]
