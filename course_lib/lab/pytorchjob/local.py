"""A PyTorchJob on this machine: the operator's part, and the output of all its pods.

    job = read_job("pytorchjob.yaml")
    with LocalJob(job, "runs/k8s") as local:
        local.start()
        local.kill("demo-worker-1")     # SIGKILL to all its processes
        print(local.wait())             # Succeeded

Its work directory holds `volumes` (what claims hold: the next run finds it there), `logs` (a folder for each run, a
file for each life of a container) and `pods.json` (pod -> its address, phase, restarts, and the id of its PID 1).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from course_lib.engine import UsageError
from course_lib.lab.pytorchjob.conditions import Conditions
from course_lib.lab.pytorchjob.containers import Starter
from course_lib.lab.pytorchjob.documents import ManifestError
from course_lib.lab.pytorchjob.job import Pod, PyTorchJob
from course_lib.lab.pytorchjob.kubelet import LocalPod
from course_lib.lab.pytorchjob.limits import limits
from course_lib.lab.pytorchjob.logs import PodLogs
from course_lib.lab.pytorchjob.places import find_place
from course_lib.lab.pytorchjob.policies import BACKOFF_S, Condition, past_backoff_limit, replaced_by_operator, verdict
from course_lib.lab.pytorchjob.workdir import record, requests, take, usable

_POLL_S = 0.05
LINGER_S = 30.0  # how long pods that cleanPodPolicy None leaves alone may take to end


class LocalJob:
    """A job that runs here; a context manager, which leaves no process.

    `maps` are paths of the image -> folders. `backoff_base_s` is 10 s in a cluster. `isolated` asks for namespaces
    (True), or for none (False). `say` takes each line. Raises UsageError for a work directory or a port that is in use,
    and ManifestError for what a cluster or the image would have and this machine has not.
    """

    def __init__(
        self,
        job: PyTorchJob,
        workdir: Path | str,
        *,
        maps: Mapping[str, str] | None = None,
        backoff_base_s: float = BACKOFF_S,
        isolated: bool | None = None,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self.job, self.workdir = job, Path(workdir).resolve()
        self._say, self._base_s = say, backoff_base_s
        here = {path.rstrip("/"): str(Path(folder).resolve()) for path, folder in (maps or {}).items()}
        if missing := limits(job, here):
            raise ManifestError(missing)
        with ExitStack() as refused:
            self._lock = refused.enter_context(take(self.workdir))
            with usable(self.workdir):
                self._place = find_place(job, self.workdir, isolated)
                refused.callback(self._place.close)
                self._logs = PodLogs(self.workdir, job.pods, say)
            refused.pop_all()
        self.conditions = Conditions(lambda line: say(f"operator | {line}"))
        self._starter = Starter(job, self.workdir, self._logs, self._place, here)
        self._pods: dict[str, LocalPod] = {}
        self._began = 0.0
        self._linger: float | None = None
        self._stopped = self._unrecorded = False

    def __enter__(self) -> "LocalJob":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what is done to it ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Create the job and its pods."""
        self.conditions.set("Created", f"PyTorchJob {self.job.name} is created.")
        for line in filter(None, [_ignored(self.job), self._place.note]):
            self._say(f"local    | {line}")
        self._began = time.monotonic()
        for pod in self.job.pods:
            self._create(pod)
        self.step()

    def kill(self, pod: str) -> None:
        """SIGKILL to all processes of a pod's container, as when it runs out of memory."""
        self._named(pod).kill()

    def delete(self, pod: str) -> None:
        """As `kubectl delete pod`, or a node that is drained: SIGTERM, the grace period, and a new pod afterwards."""
        self._named(pod).delete()

    def stop(self) -> None:
        """As `kubectl delete pytorchjob`: all pods get SIGTERM; a second time, SIGKILL."""
        for pod in self._pods.values():
            pod.final = True
            pod.delete()
            if self._stopped:
                pod.kill()
        self._stopped = True

    def close(self) -> None:
        """End all that is left of the job, at once."""
        with ExitStack() as all_of_it:  # the rest, too, when one part resists
            all_of_it.callback(self._lock.close)
            all_of_it.callback(self._place.close)
            for pod in self._pods.values():
                pod.final = True
                all_of_it.callback(pod.kill)
        with suppress(BrokenPipeError):  # whoever read the lines has left
            for pod in self._pods.values():
                pod.step()
            self._logs.show(rest=True)

    # --- what it is doing --------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Condition | None:
        """How the job has ended, None while it has not."""
        ends: tuple[Condition, ...] = ("Succeeded", "Failed")
        return next((kind for kind in ends if self.conditions.holds(kind)), None)

    @property
    def done(self) -> bool:
        """Whether nothing of it runs, and nothing will."""
        over = self.phase is not None or self._stopped
        return over and not any(pod.living or pod.container is not None for pod in self._pods.values())

    def pids(self) -> dict[str, int]:
        """pod -> the process that is PID 1 of its container, of those that run."""
        return {name: pod.container.pid for name, pod in self._pods.items() if pod.living and pod.container}

    def restarts(self, pod: str) -> int:
        """How often the container was started again in the present pod."""
        return self._named(pod).restarts

    def wait(self, limit_s: float | None = None) -> Condition | None:
        """Run the job to its end, which is returned; None when it was stopped, or `limit_s` seconds have passed."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not self.done and (deadline is None or time.monotonic() < deadline):
            self.step()
            time.sleep(_POLL_S)
        self._logs.show(rest=self.done)
        return self.phase if self.done else None

    def step(self) -> None:
        """Do what is due now."""
        self._requests()
        ready = self._ready()
        changed = [pod.step() for pod in self._pods.values() if ready or pod.phase != "Pending" or not self._waits(pod)]
        self._logs.show()
        if self.phase is None and not self._stopped:
            self._reconcile()
        if self._linger is not None and time.monotonic() > self._linger:
            self._linger = None
            self._clean("cleanPodPolicy None would leave it running in a cluster; it is ended here")
        if any(changed):
            self._record()

    def _waits(self, pod: LocalPod) -> bool:
        """A worker's init container waits until the name of the master resolves, which it does when that runs."""
        return pod.pod.kind == "Worker" and self.job.replica("Master") is not None

    def _ready(self) -> bool:
        return any(pod.living for pod in self._pods.values() if pod.pod.kind == "Master")

    # --- the operator ------------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        states = [pod.state for pod in self._pods.values()]
        if past_backoff_limit(self.job, states):
            return self._finish("Failed", f"Job {self.job.name} has reached its backoffLimit {self.job.backoff_limit}.")
        if self.job.deadline_s is not None and time.monotonic() - self._began >= self.job.deadline_s:
            return self._finish("Failed", f"Job {self.job.name} was active longer than {self.job.deadline_s} s.")
        found = verdict(self.job, states)
        if found is not None and found[0] in ("Succeeded", "Failed"):
            return self._finish(*found)
        if found is not None:
            self.conditions.set(*found)
        for pod in list(self._pods.values()):
            failed = pod.phase == "Failed" and replaced_by_operator(pod.replica.restart_policy, pod.code or 0)
            if pod.gone or failed:
                self._say(f"operator | {pod.pod.name}: a new pod takes its place")
                self._create(pod.pod)
        return None

    def _create(self, pod: Pod) -> None:
        replica = self.job.replica_of(pod)
        with usable(self.workdir):
            start = self._starter.new_pod(pod, replica)
        self._pods[pod.name] = LocalPod(pod, replica, start, lambda line: self._say(f"kubelet  | {line}"), self._base_s)

    def _finish(self, kind: Condition, message: str) -> None:
        self.conditions.set(kind, message)
        for pod in self._pods.values():
            pod.final = True
        if self.job.clean_pod_policy != "None":
            self._clean(f"cleanPodPolicy {self.job.clean_pod_policy}")
        else:
            # After a success the other pods end by themselves; after a failure they would wait for it, or for ever.
            self._linger = time.monotonic() + (LINGER_S if kind == "Succeeded" else 0)

    def _clean(self, why: str) -> None:
        for pod in self._pods.values():
            if pod.phase in ("Pending", "Running"):
                self._say(f"operator | {pod.pod.name} is deleted: {why}")
                pod.delete()

    # --- its files ---------------------------------------------------------------------------------------------------

    def _requests(self) -> None:
        """What `… kill` and `… delete` have asked for."""
        for verb, name in requests(self.workdir):
            if name in self._pods:
                self._say(f"local    | asked to {verb} {name}")
                (self.kill if verb == "kill" else self.delete)(name)

    def _record(self) -> None:
        pods = {
            name: {
                "pid": pod.container.pid if pod.container is not None else None,
                "address": self._place.address(pod.pod),
                "phase": pod.phase,
                "restarts": pod.restarts,
            }
            for name, pod in self._pods.items()
        }
        try:
            record(self.workdir, pods)
        except OSError as error:  # it only informs
            if not self._unrecorded:
                self._say(f"local    | pods.json cannot be written ({error.strerror}): what it says is not so any more")
            self._unrecorded = True

    def _named(self, name: str) -> LocalPod:
        if name not in self._pods:
            raise UsageError(f"there is no pod {name!r}: the job has {', '.join(self._pods) or 'none yet'}")
        return self._pods[name]


def _ignored(job: PyTorchJob) -> str:
    return f"ignored here: {', '.join(job.ignored)}" if job.ignored else ""
