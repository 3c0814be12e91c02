"""What becomes of a container that has ended, and of its job: the rules of the kubelet and of the training operator.

The operator's are those of release 1.9 (kubeflow/trainer, tag v1.9.4): `pkg/controller.v1/common/{job,pod}.go`,
`pkg/core/{job,pod,status}.go`, `pkg/util/train/train_util.go`, `pkg/controller.v1/pytorch/pytorchjob_controller.go`
(UpdateJobStatus) and `pkg/util/status.go`. The kubelet's back-off is that of the Kubernetes documentation ("Container
restarts", kubernetes.io/docs/concepts/workloads/pods/container-restarts): the first restart comes at once, the next
after 10 s, then the double each time, at most 300 s; after 10 minutes without an end it begins anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from course_lib.lab.pytorchjob.job import PyTorchJob, RestartPolicy

BACKOFF_S = 10.0
_BACKOFF_MOST, _BACKOFF_RESET = 30, 60  # of the base: 300 s and 10 minutes
RETRYABLE = 128  # with restartPolicy ExitCode, from this exit code on

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]
Condition = Literal["Created", "Running", "Restarting", "Succeeded", "Failed"]


def restarted_by_kubelet(policy: RestartPolicy, code: int) -> bool:
    """Whether the kubelet starts a container that ended so again, in the same pod.

    For ExitCode the operator gives the pod the policy Never, and makes a new pod itself.
    """
    return policy == "Always" or (policy == "OnFailure" and code != 0)


def replaced_by_operator(policy: RestartPolicy, code: int) -> bool:
    """Whether the operator makes a new pod in the place of one that failed so."""
    return policy == "ExitCode" and code >= RETRYABLE


def backoff_s(crashes: int, base_s: float = BACKOFF_S) -> float:
    """Seconds before the restart that follows the `crashes`-th end of a container (1 is its first)."""
    return 0.0 if crashes <= 1 else base_s * min(2.0 ** (crashes - 2), _BACKOFF_MOST)


def calm_s(base_s: float = BACKOFF_S) -> float:
    """Seconds after which an end counts as the first again."""
    return base_s * _BACKOFF_RESET


@dataclass(frozen=True)
class PodState:
    """What the operator sees of a pod. `restarts` counts those of its containers, so it is 0 in a new pod."""

    kind: str
    phase: Phase
    policy: RestartPolicy
    restarts: int = 0
    deleted: bool = False
    code: int | None = None


def past_backoff_limit(job: PyTorchJob, pods: Iterable[PodState]) -> bool:
    """Whether the job fails for its backoffLimit.

    Counted are the restarts that the kubelet has made in pods which run now: a new pod begins at 0, so the limit does
    not bound what ExitCode retries. A failed pod counts only against a limit of 0, since the operator's own count of
    retries is always 0 (`pkg/common/util/fake_workqueue.go`). Limits of 0 and 1 both end the job at the first restart.
    """
    if job.backoff_limit is None:
        return False
    states = list(pods)
    if job.backoff_limit == 0 and any(pod.phase == "Failed" for pod in states):
        return True
    count = sum(pod.restarts for pod in states if pod.phase == "Running" and pod.policy != "Never")
    return count >= max(job.backoff_limit, 1)


def verdict(job: PyTorchJob, pods: Iterable[PodState]) -> tuple[Condition, str] | None:
    """The condition that the pods give the job now, with its message; None when they change nothing.

    With a master the job is as the master is; without one all workers have to succeed, or, with an elasticPolicy, one.
    """
    states = list(pods)
    lead = "Master" if job.replica("Master") is not None else "Worker"
    leaders = [pod for pod in states if pod.kind == lead]
    done = [pod.phase == "Succeeded" for pod in leaders]
    if all(done) or (lead == "Worker" and job.elastic is not None and any(done)):
        return "Succeeded", f"PyTorchJob {job.name} is successfully completed."
    for kind in ("Master", "Worker"):
        failed = [pod for pod in states if pod.kind == kind and (pod.phase == "Failed" or pod.deleted)]
        if failed:
            final = any(_is_final(pod) for pod in failed)
            what = "failed" if final else "restarting"
            message = f"PyTorchJob {job.name} is {what} because {len(failed)} {kind} replica(s) failed."
            return ("Failed" if final else "Restarting"), message
    if any(pod.phase == "Running" for pod in leaders):
        return "Running", f"PyTorchJob {job.name} is running."
    return None


def _is_final(pod: PodState) -> bool:
    """Whether the job ends with this failed pod: not with one that is deleted, unless its policy is Never."""
    if pod.deleted or pod.policy != "ExitCode":
        return pod.policy == "Never"
    return not replaced_by_operator(pod.policy, pod.code or 0)
