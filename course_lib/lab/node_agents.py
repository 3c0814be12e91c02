"""How the nodes of one job are started, and the settings of the rendezvous through which they find each other."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.lab.job import Job, JobFailed
from course_lib.lab.launch import start
from course_lib.lab.networks import Network, free_port
from course_lib.lab.output import AGENT_LOG
from course_lib.lab.processes import describe_exit

# Settings of torchrun's rendezvous (--rdzv-conf) for jobs whose nodes come and go. Whole seconds.
TUNED: Mapping[str, int] = {
    # After a change, a round that has the least number of nodes but not the largest waits so long for more: 30 s by
    # default, at every loss of a node. It has to cover the time by which nodes differ in stopping their workers, a
    # snapshot included: who comes too late waits for the next round, and costs everybody another restart.
    "last_call_timeout": 2,
    # A node is dead when its heartbeat is interval × attempts old: 15 s by default, 6 s here. Two attempts are too
    # few (one heartbeat that comes late splits the job in two), and an agent that waits looks only once a second,
    # so an interval of 1 s makes late ones common. The nodes' clocks are compared: they must agree within a second.
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 3,
}
# torchrun's own values, written out, for comparison.
DEFAULT: Mapping[str, int] = {"last_call_timeout": 30, "keep_alive_interval": 5, "keep_alive_max_attempt": 3}
# Left as they are: join_timeout (600 s), for which too few nodes wait for more before they give up, and read_timeout
# (60 s), which an agent that is cut off from the store survives: a shorter one turns a short cut into lost nodes.

_STORE_GONE = "RendezvousConnectionError"  # how an agent's traceback ends then
_POLL_S = 0.05
_STORE_LIVES_S = 86_400.0  # it outlives the nodes, whose life is bounded, and ends with whoever started it
_STORE_S = 60.0  # seconds that the rendezvous process may take to come up, on a loaded machine


@dataclass
class Agents:
    """Starts the agents of a job, and its rendezvous process, each with a folder of its own for its output.

    `options` are torchrun's beside those of the rendezvous, `script` is the script with its options. `endpoint` is
    where the store is, empty until that is known; `store_host` is the node whose agent serves it, if one does.
    """

    run_dir: Path
    script: str
    options: Sequence[str]
    settings: Mapping[str, int]
    network: Network
    environment: Mapping[str, str | None]
    limit_s: float
    endpoint: str = ""
    store_host: str | None = None

    def start(self, name: str) -> Job:
        """Start the agent of node `name`; the first one serves the store, unless there is one."""
        address = self.network.address(name)
        if not self.endpoint:
            # Not port 0, which nobody else could be told of.
            self.endpoint, self.store_host = f"{address}:{free_port(address)}", name
        settings = {**self.settings, "is_host": str(name == self.store_host).lower()}
        conf = ",".join(f"{key}={value}" for key, value in settings.items())
        logs = self._logs(name)
        words = ["torchrun", *self.options, "--rdzv-backend=c10d", f"--rdzv-endpoint={self.endpoint}"]
        words += [f"--rdzv-conf={conf}", f"--local-addr={address}", f"--log-dir={logs}", "--redirects=3"]
        command = f"{shlex.join(words)} {self.script} --run-dir {shlex.quote(str(self.run_dir))}"
        return self._start(command, logs, name)

    def start_store(self) -> Job:
        """Start the rendezvous process, and wait until it serves."""
        command = f"python -m course_lib.lab.rendezvous --host {self.network.host} --parent {os.getpid()}"
        job = self._start(command, self._logs("rendezvous"), None, _STORE_LIVES_S)
        deadline = time.monotonic() + _STORE_S
        try:
            while "rendezvous at " not in (said := job.output()):
                if not job.running or time.monotonic() > deadline:
                    raise JobFailed(f"the rendezvous process did not come up: {said}")
                time.sleep(_POLL_S)
        except BaseException:  # also an interrupt
            job.kill()
            raise
        self.endpoint = said.split("rendezvous at ", 1)[1].split()[0]
        return job

    def _start(self, command: str, logs: Path, name: str | None, limit_s: float | None = None) -> Job:
        inside = self.network.inside(name)
        return start(command, limit_s=limit_s or self.limit_s, environment=self.environment, logs=logs, inside=inside)

    def _logs(self, name: str) -> Path:
        """A new folder for the next life of `name`."""
        lives = len(list((self.run_dir / "logs").glob(f"{name}-*")))
        logs = self.run_dir / "logs" / f"{name}-{lives + 1}"
        logs.mkdir(parents=True)
        return logs


def describe(job: Job) -> str:
    """What a node is doing, or how it ended."""
    if job.running:
        return f"runs rank {', '.join(map(str, ranks))}" if (ranks := job.workers()) else "waits, without a rank"
    return f"ended with {describe_exit(job.exit_code or 0)}" + ": it lost the store" * lost_store(job)


def lost_store(job: Job) -> bool:
    """Whether a node ended because it could no longer reach the rendezvous store."""
    if job.running or job.exit_code == 0:
        return False
    return _STORE_GONE in (job.logs / AGENT_LOG).read_text(errors="replace")
