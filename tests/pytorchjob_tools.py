"""Small PyTorchJobs for tests: their containers are shell commands, so that a job takes a second."""

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from helpers import free_port

from course_lib.lab.pytorchjob import LocalJob, PyTorchJob, read_job

MANIFESTS = Path(__file__).resolve().parent / "manifests"
LIMIT_S = 60.0  # a bound on hanging


def replica(script: str, replicas: int = 1, policy: str = "OnFailure", **spec: Any) -> dict[str, Any]:
    """A replica whose container runs `script` in a shell; `spec` are fields of its pod."""
    container: dict[str, Any] = {"name": "pytorch", "image": "none", "command": ["sh", "-c", script]}
    container |= spec.pop("container", {})
    return {"replicas": replicas, "restartPolicy": policy, "template": {"spec": {"containers": [container], **spec}}}


def manifest(run_policy: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A PyTorchJob called `demo`; `master` and `worker` are replicas, other fields those of spec.

    Without namespaces one job of a machine at a time has a port, and tests run two at a time: this one's is free.
    """
    given = copy.deepcopy(fields)
    ports = [{"name": "pytorchjob-port", "containerPort": free_port()}]
    for kind in {"master", "worker"} & {*given}:
        given[kind]["template"]["spec"]["containers"][0].setdefault("ports", ports)
    kinds = {kind: given.pop(kind.lower(), None) for kind in ("Master", "Worker")}
    spec = {"pytorchReplicaSpecs": {kind: it for kind, it in kinds.items() if it}, "runPolicy": dict(run_policy or {})}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "demo"}, "spec": spec | given}


def write(folder: Path, document: Mapping[str, Any], name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(dict(document)))
    return path


def job(folder: Path, run_policy: Mapping[str, Any] | None = None, **fields: Any) -> PyTorchJob:
    return read_job(write(folder, manifest(run_policy, **fields)))


def at_free_port(made: PyTorchJob) -> PyTorchJob:
    """A job of a file, with a port of its own."""
    port = free_port()
    boxes = [dataclasses.replace(replica.container, port=port) for replica in made.replicas]
    pairs = zip(made.replicas, boxes, strict=True)
    return dataclasses.replace(made, replicas=tuple(dataclasses.replace(r, container=box) for r, box in pairs))


class Ran:
    """A job that was run to its end: how it ended, its conditions, its lines, and the restarts of each pod."""

    def __init__(self, folder: Path, made: PyTorchJob, **options: Any) -> None:
        self.lines: list[str] = []
        given = {"backoff_base_s": 0.0, "say": self.lines.append, "isolated": False} | options
        with LocalJob(made, folder / "work", **given) as local:
            local.start()
            self.phase = local.wait(LIMIT_S)
            self.done = local.done
            self.history = local.conditions.history
            self.restarts = {pod.name: local.restarts(pod.name) for pod in made.pods}
        assert self.done, "\n".join(self.lines)

    def said(self, pod: str) -> list[str]:
        """What a pod's containers have said."""
        pairs = [line.split(" | ", 1) for line in self.lines]
        return [text for head, text in pairs if head.strip() == pod]
