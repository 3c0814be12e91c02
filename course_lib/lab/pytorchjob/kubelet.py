"""A pod on this machine: its container is started, watched, and started again as its restartPolicy says."""

import time
from collections.abc import Callable

from course_lib.lab.processes import describe_exit
from course_lib.lab.pytorchjob.container import Container
from course_lib.lab.pytorchjob.job import Pod, Replica
from course_lib.lab.pytorchjob.policies import BACKOFF_S, Phase, PodState, backoff_s, calm_s, restarted_by_kubelet


class LocalPod:
    """One pod, from its creation to its end; a pod that is replaced is another object.

    `start` starts its container anew; `say` takes what the kubelet would have as an event.
    """

    def __init__(
        self, pod: Pod, replica: Replica, start: Callable[[], Container], say: Callable[[str], None], base_s: float
    ) -> None:
        self.pod, self.replica = pod, replica
        self.container: Container | None = None
        self.phase: Phase = "Pending"
        self.restarts = 0
        self.code: int | None = None
        self.deleted = False
        self.final = False  # the job is over: nothing is started again
        self._start, self._say, self._base_s = start, say, base_s
        self._crashes = 0
        self._due = 0.0
        self._deadline: float | None = None

    @property
    def state(self) -> PodState:
        """What the operator sees."""
        return PodState(self.pod.kind, self.phase, self.replica.restart_policy, self.restarts, self.deleted, self.code)

    @property
    def living(self) -> bool:
        """Whether its container runs."""
        return self.container is not None and self.container.poll() is None

    @property
    def gone(self) -> bool:
        """Whether it was deleted and has ended."""
        return self.deleted and self.container is None

    def step(self) -> bool:
        """Do what is due; whether something happened."""
        if self.container is not None:
            return self._watch(self.container)
        if self.phase in ("Pending", "Running") and not (self.deleted or self.final) and time.monotonic() >= self._due:
            self.restarts += self.phase == "Running"
            self.phase = "Running"
            self.container = self._start()
            if self.container.pid:
                self._say(f"{self.pod.name}: started, process {self.container.pid}")
            elif self.container.problem:
                self._say(f"{self.pod.name}: cannot be started: {self.container.problem}")
            return True
        return False

    def delete(self) -> None:
        """SIGTERM to PID 1 now; SIGKILL to all that is left when the grace period is over."""
        if not self.deleted:
            self.deleted = True
            if self.container is not None:
                self.container.terminate()
            self._deadline = time.monotonic() + self.replica.grace_s

    def kill(self) -> None:
        """SIGKILL to all processes of the container, as when it runs out of memory."""
        if self.container is not None:
            self.container.kill()

    def _watch(self, container: Container) -> bool:
        code = container.poll()
        if code is None:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._say(f"{self.pod.name}: the grace period is over, SIGKILL")
                container.kill()
                return True
            return False
        container.kill()  # what PID 1 has left behind ends with it
        self.container = None
        self.code = code
        ended = f"{self.pod.name}: container ended with {describe_exit(code)}"
        if self.deleted or self.final or not restarted_by_kubelet(self.replica.restart_policy, code):
            self.phase = "Succeeded" if code == 0 else "Failed"
            self._say(ended)
            return True
        if time.monotonic() - container.began >= calm_s(self._base_s or BACKOFF_S):
            self._crashes = 0
        self._crashes += 1
        wait = backoff_s(self._crashes, self._base_s)
        self._due = time.monotonic() + wait
        again = f"in {wait:g} s (CrashLoopBackOff)" if wait else "at once"
        self._say(f"{ended}; restartPolicy {self.replica.restart_policy}: it starts again {again}")
        return True
