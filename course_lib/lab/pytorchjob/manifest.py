"""From a manifest to a job: the checks of the API server, and those of the operator's webhook.

The fields and their types are those of the v1 API (kubeflow/trainer, tag v1.9.4: `pkg/apis/kubeflow.org/v1`, and the
CRD in `manifests/base/crds`), the checks those of `pkg/webhooks/pytorch/pytorchjob_webhook.go`, the defaults those of
`pytorch_defaults.go`.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.lab.pytorchjob.documents import ManifestError, read_documents
from course_lib.lab.pytorchjob.fields import Fields
from course_lib.lab.pytorchjob.job import Elastic, Kind, PyTorchJob, Replica, RestartPolicy
from course_lib.lab.pytorchjob.podspec import read_template
from course_lib.lab.pytorchjob.references import undefined

_API, _KIND = "kubeflow.org/v1", "PyTorchJob"
_RUN_POLICY = (
    "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy",
    "suspend", "managedBy",
)  # fmt: skip
_ELASTIC = (
    "minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone",
    "nProcPerNode", "maxRestarts", "metrics",
)  # fmt: skip
_NPROC = re.compile(r"auto|cpu|gpu|xpu|[1-9]\d*$")
_PORT = 2**16 - 1
_LABEL = 63  # the longest name of a service, which each pod gets


def read_job(path: Path | str, name: str | None = None) -> PyTorchJob:
    """The PyTorchJob in the file: the first, or the one called `name`. Raises ManifestError with all that is wrong."""
    documents = read_documents(Path(path))
    findings: list[str] = []
    jobs = [document for document in documents if document.get("kind") == _KIND]
    chosen = [d for d in jobs if name is None or _name_of(d) == name]
    if not chosen:
        raise ManifestError([_nothing_to_run(path, documents, name)])
    document = chosen[0]
    others = [d for d in documents if d is not document]
    job = _read(Fields(document, "", findings), [f"{d.get('kind')} {_name_of(d)}" for d in others])
    if not findings:
        findings += undefined(job)
    if findings:
        raise ManifestError(findings)
    return job


def _name_of(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, dict) else "without a name"


def _nothing_to_run(path: Path | str, documents: list[dict[str, Any]], name: str | None) -> str:
    kinds = [document.get("kind") for document in documents]
    if name is not None and _KIND in kinds:
        there = ", ".join(_name_of(document) for document in documents if document.get("kind") == _KIND)
        return f"metadata.name: {path} has no PyTorchJob called {name}; there is {there}"
    if kinds == [None]:
        return f"kind: is missing: it has to be {_KIND}"
    found = ", ".join(str(kind) for kind in kinds)
    hint = ": a TrainJob is of the v2 API, which this does not run" if "TrainJob" in kinds else ""
    return f"kind: has to be {_KIND}, not {found}{hint}"


def _read(top: Fields, others: list[str]) -> PyTorchJob:
    top.only(("apiVersion", "kind", "metadata", "spec", "status"))
    if (version := top.text("apiVersion", required=True)) not in (None, _API):
        top.wrong("apiVersion", f"has to be {_API}, not {version}")
    metadata = top.object("metadata", required=True)
    name, generated = _names(metadata) if metadata.values or "metadata" in top else ("", "")
    spec = top.object("spec", required=True)
    spec.only(("runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"))
    ignored: dict[str, None] = {}
    replicas = _replicas(spec, ignored) if "spec" in top else ()
    elastic = _elastic(spec, replicas, ignored)
    nproc = _nproc(spec)
    if nproc is None and (elastic is None or elastic.nproc_per_node is None):
        nproc = "auto"
    lines = [f"other documents: {', '.join(others)}"] if others else []
    run = spec.object("runPolicy")
    run.only(_RUN_POLICY)
    lines += [f"{field} of runPolicy" for field in _RUN_POLICY if field in run and field not in _HONOURED]
    job = _with_policy(run, name, replicas, nproc, elastic)
    longest = max((pod.name for pod in job.pods), key=len, default="")
    if len(longest) > _LABEL:
        metadata.wrong("name", f"is too long: a pod would be called {longest}, and {_LABEL} letters are the most")
    namespace = metadata.text("namespace") or "default"
    return replace(job, ignored=(*lines, *ignored), namespace=namespace, generated=generated)


def _names(metadata: Fields) -> tuple[str, str]:
    """(the name, what `generateName` gives if the cluster is to make it)."""
    generated = metadata.text("generateName") if "name" not in metadata else None
    field = "generateName" if generated else "name"
    name = f"{generated}xxxxx" if generated else metadata.text("name", required=True) or ""
    if name and not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        given = generated or name
        metadata.wrong(field, f"{given!r} has to be small letters, digits and -, to begin with a letter")
    return name, generated or ""


_HONOURED = ("cleanPodPolicy", "activeDeadlineSeconds", "backoffLimit", "suspend")


def _with_policy(
    run: Fields, name: str, replicas: tuple[Replica, ...], nproc: str | None, elastic: Elastic | None
) -> PyTorchJob:
    clean: Any = run.choice("cleanPodPolicy", ("All", "Running", "None"), "None")
    return PyTorchJob(
        name=name,
        replicas=replicas,
        nproc_per_node=nproc,
        elastic=elastic,
        clean_pod_policy=clean,
        backoff_limit=run.number("backoffLimit"),
        deadline_s=run.number("activeDeadlineSeconds", low=1),
        suspend=run.flag("suspend"),
        given=frozenset(run.values),
    )


def _nproc(spec: Fields) -> str | None:
    given = spec.text("nprocPerNode")
    if given is not None and not _NPROC.fullmatch(given):
        spec.wrong("nprocPerNode", f"has to be auto, cpu, gpu or a number of processes, not {given!r}")
    return given


def _replicas(spec: Fields, ignored: dict[str, None]) -> tuple[Replica, ...]:
    specs = spec.object("pytorchReplicaSpecs", required=True)
    if "pytorchReplicaSpecs" in spec and not specs.values and isinstance(spec.values["pytorchReplicaSpecs"], dict):
        spec.wrong("pytorchReplicaSpecs", "is empty: it needs a Master, or Workers, or both")
    specs.only(("Master", "Worker"))
    found = []
    kinds: tuple[Kind, ...] = ("Master", "Worker")
    for kind in kinds:
        if kind in specs.values:
            found.append(_replica(specs.object(kind, required=True), kind, ignored))
    return tuple(found)


def _replica(given: Fields, kind: Kind, ignored: dict[str, None]) -> Replica:
    given.only(("replicas", "restartPolicy", "template"))
    count = given.number("replicas", low=-(2**31))
    if kind == "Master" and (count != 1) and not isinstance(given.values.get("replicas"), str | float | list | dict):
        given.wrong("replicas", f"has to be 1: a job has one master ({'nothing' if count is None else count} is given)")
    elif kind == "Worker" and count is not None and count < 1:
        given.wrong("replicas", f"has to be 1 or more, not {count}: leave Worker out if there is none")
        count = 1
    policies = ("Always", "OnFailure", "Never", "ExitCode")
    policy: Any = given.choice("restartPolicy", policies, "OnFailure")
    container, grace_s, unused = read_template(given.object("template", required=True), "template" in given)
    ignored.update(dict.fromkeys(unused))
    restart: RestartPolicy = policy
    return Replica(kind, 1 if count is None else count, restart, container, grace_s, given.path)


def _elastic(spec: Fields, replicas: tuple[Replica, ...], ignored: dict[str, None]) -> Elastic | None:
    if "elasticPolicy" not in spec:
        return None
    given = spec.object("elasticPolicy")
    given.only(_ELASTIC)
    worker = next((replica for replica in replicas if replica.kind == "Worker"), None)
    if worker is None:
        spec.wrong("pytorchReplicaSpecs.Worker", "is missing: an elasticPolicy needs workers")
    nproc = given.number("nProcPerNode", low=1)
    if nproc is not None and "nprocPerNode" in spec:
        given.wrong("nProcPerNode", "must not be used with spec.nprocPerNode: leave one")
    low, high = given.number("minReplicas", low=1), given.number("maxReplicas", low=1)
    if low is not None and high is not None and high < low:
        given.wrong("maxReplicas", f"is {high}, less than minReplicas {low}")
    least = low or high or (worker.replicas if worker is not None else 1)
    most = high or least
    conf = tuple(_setting(pair) for pair in given.objects("rdzvConf"))
    if "metrics" in given:
        ignored["metrics of elasticPolicy: nothing here scales the job"] = None
    return Elastic(
        min_replicas=least,
        max_replicas=most,
        backend=given.choice("rdzvBackend", ("c10d", "etcd", "etcd-v2"), "c10d") or "c10d",
        port=given.number("rdzvPort", low=1, high=_PORT),
        host=given.text("rdzvHost"),
        id=given.text("rdzvId"),
        conf=conf,
        standalone=given.flag("standalone"),
        max_restarts=given.number("maxRestarts"),
        nproc_per_node=nproc,
    )


def _setting(pair: Fields) -> tuple[str, str]:
    pair.only(("key", "value"))
    return pair.text("key", required=True) or "", pair.text("value", "") or ""
