"""The known traps of a PyTorchJob: each with the field's path, why it is one, and the cure.

What the operator does is read from its release 1.9 (see `injected` and `policies`), what torchrun does was measured
with torch 2.14.1 (DESIGN, facts 1, 2, 8 and 13). `lint_pod` has the traps of a single pod.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from course_lib.lab.pytorchjob.injected import processes
from course_lib.lab.pytorchjob.job import PyTorchJob, Replica
from course_lib.lab.pytorchjob.lint_pod import pod_traps
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
        found += [Trap(*trap) for trap in pod_traps(job, replica, command)]
        if command is not None:
            found += [Trap(*trap) for rule in _RULES for trap in rule(job, replica, command)]
    return found


Found = Iterator[tuple[str, str, str, str]]
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


def _nodes(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    if "WORLD_SIZE" in command.options.get("nnodes", ""):
        each, pods = processes(job), sum(r.replicas for r in job.replicas)
        why = "WORLD_SIZE is pods × nprocPerNode" + (
            f": torchrun waits for {pods * each} nodes, and there are {pods}"
            if each > 1
            else ", the number of nodes only as long as nprocPerNode is not above 1"
        )
        yield "nnodes-world-size", _where(replica), why, "leave --nnodes out: the operator sets PET_NNODES"


def _processes(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    given, policy = command.options.get("nproc_per_node"), job.nproc_per_node
    if given is None and policy == "auto":
        why = "without it PET_NPROC_PER_NODE is auto: a process for each GPU, or for each core where there is no GPU"
        yield "nproc-auto", "spec.nprocPerNode", why, 'say how many, in quotes: nprocPerNode: "1"'
    elif given is not None and given.isdigit() and int(given) != processes(job):
        why = f"--nproc_per_node {given} starts another number than nprocPerNode, by which WORLD_SIZE is counted"
        yield "nproc-differs", _where(replica), why, "leave --nproc_per_node out: the operator sets PET_NPROC_PER_NODE"


def _restarts(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    policy = job.elastic is not None and job.elastic.max_restarts is not None
    env = dict(replica.container.env)
    if not policy and "max_restarts" not in command.options and "PET_MAX_RESTARTS" not in env:
        why = "torchrun restarts nothing by default: one failed process ends the agent, and the pod with it"
        yield "max-restarts", _where(replica), why, "--max-restarts 3, or maxRestarts in an elasticPolicy"
    if replica.restart_policy == "ExitCode" and not command.gives_code:
        why = "torchrun ends with 1 whatever its workers ended with, and ExitCode restarts only from 128 on"
        cure = "python -m course_lib.engine.launch in torchrun's place (143 after a preemption), or OnFailure"
        yield "exit-code", f"{replica.where}.restartPolicy", why, cure
    if replica.restart_policy == "Always":
        why = "starts a container again after its success, too: the job never succeeds"
        yield "always", f"{replica.where}.restartPolicy", why, "restartPolicy: OnFailure"


def _rendezvous(job: PyTorchJob, replica: Replica, command: Command) -> Found:
    conf = command.options.get("rdzv_conf", "") + dict(replica.container.env).get("PET_RDZV_CONF", "")
    if job.elastic is not None:
        conf += ",".join(f"{key}=" for key, _ in job.elastic.conf)
    if "timeout" not in conf:
        wait = "the operator's init container waits 200 s for the master's name"
        why = "no rendezvous timeout: an agent waits 600 s for the others, and 60 s for a store that does not answer"
        why += f"; {wait}" if job.replica("Master") is not None else "; no pod waits for a name"
        yield (
            "rendezvous",
            _where(replica),
            why,
            "--rdzv-conf join_timeout=1800,read_timeout=300: longer than a pull takes",
        )
    alone = "standalone" in command.options or "PET_STANDALONE" in dict(replica.container.env)
    if alone and len(job.pods) > 1:
        yield "standalone", _where(replica), "with --standalone each pod trains alone", "leave it out"
    backend = command.options.get("rdzv_backend") or (job.elastic.backend if job.elastic is not None else "")
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    if backend == "c10d" and not command.gives_code and dict(replica.container.env).get(variable) != "1":
        why = "all restarts share one store, in which a restarted rank may read the address of a dead one"
        yield "shared-store", f"{replica.container.where}.env", why, f'{variable} with the value "1"'


def _where(replica: Replica) -> str:
    return f"{replica.container.where}.{'args' if replica.container.args else 'command'}"


_RULES: tuple[Callable[[PyTorchJob, Replica, Command], Found], ...] = (_nodes, _processes, _restarts, _rendezvous)
