"""A job on several nodes, all on this machine: each node is an agent of torchrun with an address of its own.

    with Cluster(run, "scripts/ddp_torchrun.py --virtual-shards 4", nodes="1:3") as c:
        c.start("a", "b", "c")
        c.wait_for(step=5, ranks=3)
        c.kill("b")                      # SIGKILL to its agent and workers at once, as when a machine dies
        c.wait_for(ranks=2)              # the two others go on
        c.start("b")                     # back, at the same address
        c.wait_for(ranks=3)
        c.wait()                         # to the end, with the workers' lines; JobFailed unless it is a good end

`c.pause("a")` and `c.resume("a")` stop and continue all processes of a node, `c.stop("a")` is SIGTERM to its agent,
`c.workers("a")` are its ranks and their process ids, `c.output("a")` what the node has said, `c.report()` a line for
each node on how it ended. A node started beyond the largest number of nodes is a hot spare. Whatever happens in the
block, and to the notebook, nothing of it lives afterwards.

Nodes are called a to h, at the addresses 127.0.0.2 to 127.0.0.9: torchrun gives rank 0 to the node whose address is
the smallest string, so to the first in the alphabet. All of 127.* is there on Linux; macOS needs an alias for each.
"""

import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from course_lib.engine import UsageError
from course_lib.lab.follow import Event, EventFollower
from course_lib.lab.job import LIMIT_S, Job, JobFailed
from course_lib.lab.networks import NAMES, Loopback, Network
from course_lib.lab.node_agents import DEFAULT as DEFAULT
from course_lib.lab.node_agents import TUNED, Agents, describe, lost_store

_POLL_S = 0.05


class Cluster:
    """A job of several nodes on one run directory; a context manager, which leaves no process.

    `script` is the script with its options, without --run-dir. `nodes` is what --nnodes takes, `ranks` the workers of
    a node. With `rendezvous` the store is a process of its own (`course_lib.lab.rendezvous`); without, the agent of
    the node that is started first serves it; a string is the HOST:PORT of one that exists, to which `job_id` gives
    the name of the job there. `limit_s` bounds the life of each node.
    """

    def __init__(
        self,
        run_dir: Path | str,
        script: str,
        nodes: str = "1:3",
        *,
        ranks: int = 1,
        rendezvous: bool | str = True,
        settings: Mapping[str, int] = TUNED,
        max_restarts: int = 10,
        limit_s: float = LIMIT_S,
        environment: Mapping[str, str | None] | None = None,
        network: Network | None = None,
        job_id: str | None = None,
    ) -> None:
        self.run_dir, self.limit_s = Path(run_dir), limit_s
        where = network or Loopback()
        name = job_id or f"{self.run_dir.name}-{uuid.uuid4().hex[:8]}"
        size = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", f"--rdzv-id={name}"]
        given = {**where.environment(), **(environment or {})}
        self._agents = Agents(self.run_dir, script, size, settings, where, given, limit_s)
        self._agents.endpoint = rendezvous if isinstance(rendezvous, str) else ""
        self._nodes: dict[str, Job] = {}
        self._killed: set[str] = set()
        self._stopped: set[str] = set()
        self._followed = EventFollower(self.run_dir)
        self._store = self._agents.start_store() if rendezvous is True else None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    # --- what is done to the nodes -------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """Start nodes; one that was there before comes back at the same address."""
        for name in names:
            if not isinstance(name, str) or name not in NAMES or len(name) != 1:
                raise UsageError(f"a node is called by one letter from {NAMES[0]} to {NAMES[-1]}, not {name!r}")
            if name in self._nodes and self._nodes[name].running:
                raise UsageError(f"node {name} runs already")
            if name in self._nodes:
                self._nodes[name].kill()  # where a worker doesn't die with its agent
            self._nodes[name] = self._agents.start(name)
            self._killed.discard(name)
            self._stopped.discard(name)

    def kill(self, *names: str) -> None:
        """SIGKILL to the agents and workers of these nodes, as when the machines lose their power."""
        for name in names:
            self.node(name).kill()
            self._killed.add(name)

    def kill_store(self) -> None:
        """SIGKILL to the rendezvous process, or to the node whose agent serves the store."""
        if self._store is not None:
            self._store.kill()
        elif self._agents.store_host is not None:
            self.kill(self._agents.store_host)

    def kill_agent(self, name: str) -> None:
        """SIGKILL to the agent alone; its workers see to it themselves that they don't outlive it."""
        self._killed.add(name)
        self._signal(name, signal.SIGKILL, agent_only=True)

    def stop(self, name: str) -> None:
        """SIGTERM to the agent of a node, as a scheduler sends it before it takes the node away."""
        self.node(name).terminate()
        self._stopped.add(name)

    def pause(self, name: str, agent_only: bool = False) -> None:
        """SIGSTOP to all processes of a node, or to its agent only: a machine that swaps, or that is moved."""
        self._signal(name, signal.SIGSTOP, agent_only)

    def resume(self, name: str) -> None:
        """SIGCONT to all processes of a node."""
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, signum: signal.Signals, agent_only: bool = False) -> None:
        job = self.node(name)
        for process in job.processes():
            if not agent_only or process.parent == os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def kill_all(self) -> None:
        """End all nodes and the rendezvous process."""
        with ExitStack() as all_of_them:  # the others, too, when one resists
            for job in [*self._nodes.values(), self._store]:
                if job is not None:
                    all_of_them.callback(job.kill)

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the store, for --rdzv-endpoint; empty before a node serves it."""
        return self._agents.endpoint

    # --- what it is doing ----------------------------------------------------------------------------------------

    def node(self, name: str) -> Job:
        """The job that node `name` is, in its present life."""
        if name not in self._nodes:
            raise UsageError(f"there is no node {name!r} yet: start it first")
        return self._nodes[name]

    def running(self) -> list[str]:
        """The names of the nodes whose agents live."""
        return [name for name, job in sorted(self._nodes.items()) if job.running]

    def workers(self, name: str) -> dict[int, int]:
        """rank -> process id of the workers of a node that live now."""
        return self.node(name).workers()

    def output(self, name: str, lines: int | None = None) -> str:
        """What a node's agent and workers have said in its present life, or the last `lines` of that."""
        return self.node(name).output(lines=lines)

    @property
    def events(self) -> list[Event]:
        """What the job has recorded since this object was made."""
        return self._followed.update()

    @property
    def generation(self) -> int:
        """The newest generation that has loaded its snapshot, 0 before the first."""
        return max((e["generation"] for e in self.events if e["event"] == "snapshot_loaded"), default=0)

    def report(self) -> str:
        """A line for each node: whether it runs, or how it ended."""
        return "\n".join(f"node {name}: {self._state(name)}" for name in sorted(self._nodes))

    def _state(self, name: str) -> str:
        return "killed" if name in self._killed and not self._nodes[name].running else describe(self._nodes[name])

    # --- waiting for it ------------------------------------------------------------------------------------------

    def wait_for(self, step: int = 0, ranks: int | None = None, after: int = 0, limit_s: float | None = None) -> Event:
        """Return when the newest generation has done `step`; its event is returned.

        With `ranks` it must have so many, with `after` its number must be higher. Raises JobFailed when all nodes have
        ended before, or it takes more than `limit_s` seconds (by default the limit of a node); then all are killed.
        """
        what = f"step {step} was done{f' by {ranks} ranks' if ranks else ''}"
        found: list[Event] = []

        def done() -> bool:
            newest = self.generation
            steps = (e for e in self.events if e["event"] == "step" and e["generation"] == newest)
            found[:] = [e for e in steps if e["step"] >= step and ranks in (None, e["world_size"])]
            return bool(found) and newest > after

        self._wait(done, what, limit_s, show=False)
        return found[0]

    def wait(self, check: bool = True, show: bool = True, limit_s: float | None = None) -> None:
        """Wait until all nodes have ended, and show their workers' lines as they come, if `show`.

        If `check`, raises JobFailed when no node came to the end, or one ended badly by itself.
        """
        if not self._nodes:
            raise UsageError("there is no node yet: start some first")
        self._wait(None, "it ended", limit_s, show)
        bad, good = self._bad(), any(job.exit_code == 0 for job in self._nodes.values())
        self.kill_all()
        if check and (bad or not good):
            raise self._failure(f"ended badly on node {', '.join(bad or sorted(self._nodes))}")

    def _bad(self) -> list[str]:
        """The nodes that ended badly by themselves. (torchrun has 1 for a spare that was never needed.)"""
        ended = {name: job for name, job in self._nodes.items() if job.exit_code != 0}
        worked = {name for name, job in ended.items() if any(job.logs.rglob("stdout.log"))}
        return sorted(worked - self._killed - self._stopped)

    def _wait(self, done: Callable[[], bool] | None, what: str, limit_s: float | None, show: bool) -> None:
        deadline = time.monotonic() + (self.limit_s + 5 if limit_s is None else limit_s)
        try:
            while True:
                ended = not self.running()
                for job in self._nodes.values() if show else ():
                    job.show()
                if done() if done is not None else ended:
                    return
                if ended:
                    raise self._failure(f"ended before {what}")
                if time.monotonic() > deadline:
                    raise self._failure(f"was killed: {limit_s or self.limit_s:g} s passed before {what}")
                time.sleep(_POLL_S)
        except BaseException:  # also an interrupt
            self.kill_all()
            raise

    def _failure(self, what: str) -> JobFailed:
        """One line that says what happened, a line for each node, and the last lines of the nodes that ended badly."""
        if any(map(lost_store, self._nodes.values())):
            node = self._agents.store_host
            host = f"node {node}, whose agent served it" if node else "a process of its own"
            what += f": the host of the rendezvous store is gone ({host}), and every agent ends with it"
        bad = [name for name in sorted(self._nodes) if name not in self._killed and self._nodes[name].exit_code != 0]
        tails = [f"node {name}:\n{self._nodes[name].tail()}" for name in bad]
        return JobFailed("\n".join([f"the job {what}", self.report(), *tails]))
