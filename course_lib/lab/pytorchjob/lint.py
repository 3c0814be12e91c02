"""The known traps of a PyTorchJob: each with the field's path, why it is one, and the cure.

What the operator does is read from its release 1.9 (see `injected` and `policies`), what torchrun does was measured
with torch 2.14.1 (DESIGN, facts 1, 2, 8 and 13). `lint_pod` has the traps of a single pod.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from course_lib.lab.pytorchjob.injected import processes
from course_lib.lab.pytorchjob.job import SHARED, PyTorchJob, Replica
from course_lib.lab.pytorchjob.lint_pod import Found, pod_traps
from course_lib.lab.pytorchjob.torchrun import Command, torchrun_command


@dataclass(frozen=True)
class Trap:
    """Something that goes wrong although the manifest is accepted. `name` is short and stays the same."""

    name: str
    path: str
    why: str
    cure: str


def lint(job: PyTorchJob) -> list[Trap]:
    """The traps in a manifest, in the order of its fields; an empty list when none is known."""
    found = [Trap(*trap) for rule in _JOB_RULES for trap in rule(job)]
    for replica in job.replicas:
        command = torchrun_command(replica.container)
        found += [Trap(*trap) for trap in pod_traps(replica, command)]
        if command is not None:
            found += [Trap(*trap) for rule in _RULES for trap in rule(job, replica, command)]
    return found


_RUN = "spec.runPolicy"


def _cleaning(job: PyTorchJob) -> Found:
    if "cleanPodPolicy" not in job.given or job.clean_pod_policy == "None":
        why = "None, the default, leaves pods running when the job has ended: one that hangs keeps its GPUs"
        yield "clean-pod-policy", f"{_RUN}.cleanPodPolicy", why, "cleanPodPolicy: Running"


def _limits(job: PyTorchJob) -> Found:
    policies = {replica.restart_policy for replica in job.replicas}
    if job.backoff_limit and "ExitCode" in policies:
        why = "counts restarts within a pod; ExitCode makes a new pod each time, so nothing bounds them"
        yield "backoff-exit-code", f"{_RUN}.backoffLimit", why, "activeDeadlineSeconds bounds the job as a whole"
    if job.backoff_limit is not None and job.backoff_limit < 2 and policies & {"OnFailure", "Always"}:
        why = f"a limit of {job.backoff_limit} ends the job at the first restart of a container"
        yield "backoff-first", f"{_RUN}.backoffLimit", why, "backoffLimit: 3 allows two restarts in all, of all pods"


def _elastic(job: PyTorchJob) -> Found:
    path = "spec.elasticPolicy"
    if job.elastic is None:
        return
    if job.elastic.standalone:
        why = "sets PET_STANDALONE to an empty text, at which torchrun ends (int('')); and each pod would train alone"
        yield "standalone", f"{path}.standalone", why, "leave it out"
    worker = job.replica("Worker")
    if worker is not None and worker.replicas > job.elastic.max_replicas:
        why = f"is {job.elastic.max_replicas}, with {worker.replicas} workers: the others wait without a rank"
        yield "elastic-size", f"{path}.maxReplicas", why, f"maxReplicas: {worker.replicas} or more"
    if job.replica("Master") is not None:
        most = job.elastic.max_replicas
        why = f"PET_NNODES counts workers only, {most} at most; the master is one node more, and waits without a rank"
        yield "elastic-master", path, why, "no Master in an elastic job"


_JOB_RULES: tuple[Callable[[PyTorchJob], Found], ...] = (_cleaning, _limits, _elastic)
_LEAVE_OUT = "leave --nnodes out: the operator sets PET_NNODES"


def _nodes(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    given, pods = command.options.get("nnodes", ""), len(job.pods)
    if "WORLD_SIZE" in given:
        each = processes(job)
        why = "WORLD_SIZE is pods × nprocPerNode" + (
            f": torchrun waits for {pods * each} nodes, and there are {pods}"
            if each > 1
            else ", the number of nodes only as long as nprocPerNode is not above 1"
        )
        yield "nnodes-world-size", replica.container.words_at, why, _LEAVE_OUT
    if (span := _span(given)) is not None:
        low, high = span
        if low > pods:
            why = f"torchrun waits for {low} nodes, and there are {pods}"
        elif high < pods:
            why = f"{high} of the {pods} pods can train, and the others wait without a rank"
        else:
            why = f"with {pods} pods each rendezvous waits out its last_call_timeout for a node that never comes"
        most = job.elastic.max_replicas if job.elastic is not None else pods
        if high not in (pods, most) or low > pods:
            yield "nnodes-differs", replica.container.words_at, f"--nnodes {given}: {why}", _LEAVE_OUT


def _halves(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    policy = job.elastic
    span, path = _span(command.options.get("nnodes", "")), replica.container.words_at
    if span is None and policy is not None:
        span, path = (policy.min_replicas, policy.max_replicas), "spec.elasticPolicy.minReplicas"
    shared = any(mount.kind in SHARED for mount in replica.container.mounts)
    if span is not None and not shared and span[0] < span[1] and 2 * span[0] <= span[1]:
        why = f"{span[0]} is not more than half of {span[1]}: without a shared volume, two sides of a cut network train"
        yield "nnodes-halves", path, why, f"{span[1] // 2 + 1} at least, or a volume that all pods share"


def _span(nnodes: str) -> tuple[int, int] | None:
    """MIN and MAX of --nnodes, None where it is neither a number nor two."""
    found = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", nnodes)
    return (int(found[1]), int(found[2] or found[1])) if found is not None else None


def _processes(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    given, policy = command.options.get("nproc_per_node"), job.nproc_per_node
    if given is None and policy == "auto":
        why = "without it PET_NPROC_PER_NODE is auto: a process for each GPU, or for each core where there is no GPU"
        yield "nproc-auto", "spec.nprocPerNode", why, 'say how many, in quotes: nprocPerNode: "1"'
    elif given is not None and given.isdecimal() and int(given) != processes(job):
        why = f"--nproc_per_node {given} starts another number than nprocPerNode, by which WORLD_SIZE is counted"
        yield (
            "nproc-differs",
            replica.container.words_at,
            why,
            "leave --nproc_per_node out: the operator sets PET_NPROC_PER_NODE",
        )


def _restarts(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    policy = job.elastic is not None and job.elastic.max_restarts is not None
    given = "max_restarts" in command.options or replica.container.variable("PET_MAX_RESTARTS") != ""
    if not policy and not given:
        why = "torchrun restarts nothing by default: one failed process ends the agent, and the pod with it"
        yield "max-restarts", replica.container.words_at, why, "--max-restarts 3, or maxRestarts in an elasticPolicy"
    if replica.restart_policy == "ExitCode" and not command.gives_code:
        why = "torchrun ends with 1 whatever its workers ended with, and ExitCode restarts only from 128 on"
        cure = "python -m course_lib.engine.launch in torchrun's place (143 after a preemption), or OnFailure"
        yield "exit-code", f"{replica.where}.restartPolicy", why, cure


def _rendezvous(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    alone = "standalone" in command.options or "PET_STANDALONE" in dict(replica.container.env)
    if alone and len(job.pods) > 1:
        yield "standalone", replica.container.words_at, "with --standalone each pod trains alone", "leave it out"
    container, policy, options = replica.container, job.elastic, command.options
    backend = options.get("rdzv_backend") or (policy.backend if policy else container.variable("PET_RDZV_BACKEND"))
    conf = [options.get("rdzv_conf", ""), container.variable("PET_RDZV_CONF")]
    conf += [f"{key}=" for key, _ in policy.conf] if policy is not None else []
    unset = None not in conf and not any("timeout" in (text or "") for text in conf)
    if unset and backend is not None and not alone and len(job.pods) > 1:
        why, setting = "no rendezvous timeout: an agent waits 600 s for the others", "timeout=1800"
        if backend == "c10d":
            why, setting = f"{why}, and 60 s for a store that does not answer", "join_timeout=1800,read_timeout=300"
        wait = "the operator's init container waits 200 s for the master's name"
        why += f"; {wait}" if job.replica("Master") is not None else "; no pod waits for a name"
        yield "rendezvous", container.words_at, why, f"--rdzv-conf {setting}: longer than a pull takes"
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if backend == "c10d" and not command.gives_code and container.variable(variable) not in ("1", None):
        why = "all restarts share one store, in which a restarted rank may read the address of a dead one"
        yield "shared-store", f"{container.where}.env", why, f'{variable} with the value "1"'


_RULES: tuple[Callable[[PyTorchJob, Replica, Command], Found], ...] = (
    _nodes,
    _halves,
    _processes,
    _restarts,
    _rendezvous,
)
