"""A soak: a job of three nodes under random faults for some minutes, and then the proof that nothing was lost.

Each round strikes once, as the seed decides: a worker, an agent or a whole node is killed, stopped or paused for
longer than its keep-alive, a node leaves in order or the whole job is preempted; then the job has to step again, and
the nodes that are missing come back. At the end its newest snapshot is compared, bit for bit, with that of one process
which nobody has disturbed, at the same step. `--seed` gives the same faults in the same order again.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.engine import SnapshotStore, read_events
from course_lib.engine.report import recovery_seconds, steps_replayed, summarize, surviving_steps
from course_lib.engine.runlog import Event
from course_lib.engine.snapshots.records import lineage
from course_lib.engine.snapshots.store import open_payload
from course_lib.engine.tree import digest
from course_lib.lab.job import JobFailed
from course_lib.lab.launch import start
from course_lib.lab.nodes import Cluster

NODES = ("a", "b", "c")
SAMPLES, BATCH = 1500, 100
STEPS, EPOCHS = SAMPLES // BATCH, 100_000  # steps of an epoch; it does not come to the end of the epochs
TIMEOUT_S, PATIENCE_S = 5, 120
SCRIPT = (
    f"scripts/ddp_torchrun.py --virtual-shards 4 --norm group --global-batch-size {BATCH} --snapshot-every 5 "
    f"--collective-timeout {TIMEOUT_S}"
)


@dataclass
class Chaos:
    """The job, the dice, and what has been done to it."""

    cluster: Cluster
    dice: random.Random
    done: list[tuple[str, str]] = field(default_factory=list)

    def signal_worker(self, node: str, signum: signal.Signals) -> None:
        (pid,) = self.cluster.workers(node).values()
        os.kill(pid, signum)

    def pause(self, node: str, seconds: float) -> None:
        self.cluster.pause(node)
        time.sleep(seconds)
        self.cluster.resume(node)

    def strike(self) -> str:
        """One fault, then a step of whoever is left, and of all nodes together; returns what was done."""
        kind, node = self.dice.choice(list(KINDS)), self.dice.choice(NODES)
        alone_s = self.dice.choice([0, 25])  # for so long the nodes that are left have to do without the others
        before = self.newest_step()
        KINDS[kind](self, node)
        self.done.append((kind, node))
        # A pause for a moment is survived as it is, all else by a new generation.
        self.until(lambda now: now[0] > before[0] or (kind == MOMENT and now > before), alone_s)
        self.until(lambda now: now[2] == len(NODES), 0)  # so that the next fault hits something
        return f"{kind} {node}"

    def until(self, done: Callable[[tuple[int, int, int]], bool], alone_s: float) -> None:
        """Wait for a step, and start again what has ended: after `alone_s` seconds, or when nobody is left."""
        began = time.monotonic()
        while not done(self.newest_step()):
            waited_s = time.monotonic() - began
            if waited_s > alone_s or not self.cluster.running():
                self.cluster.start(*(node for node in NODES if node not in self.cluster.running()))
            if waited_s > PATIENCE_S:
                raise JobFailed(f"no such step for {PATIENCE_S} s after {self.done[-1]}\n{self.cluster.report()}")
            time.sleep(0.2)

    def newest_step(self) -> tuple[int, int, int]:
        """(generation, step, world size) of the furthest step of the newest generation that has done one."""
        steps = [(e["generation"], e["step"], e["world_size"]) for e in self.cluster.events if e["event"] == "step"]
        return max(steps, default=(0, -1, 0))


MOMENT = "pause the node for a moment"
KINDS: dict[str, Callable[[Chaos, str], object]] = {
    "kill the worker": lambda c, node: c.signal_worker(node, signal.SIGKILL),
    "stop the worker": lambda c, node: c.signal_worker(node, signal.SIGSTOP),
    "preempt the job": lambda c, node: c.signal_worker(node, signal.SIGTERM),
    "kill the node": lambda c, node: c.cluster.kill(node),
    "kill two nodes": lambda c, node: c.cluster.kill(node, NODES[NODES.index(node) - 1]),
    "kill the agent": lambda c, node: c.cluster.kill_agent(node),
    "ask the node to leave": lambda c, node: c.cluster.stop(node),
    MOMENT: lambda c, node: c.pause(node, 1.5),
    "pause the node past its keep-alive": lambda c, node: c.pause(node, 9.0),
}


def soak(run_dir: Path, minutes: float, seed: int) -> list[tuple[str, str]]:
    """Disturb a job in `run_dir` for so long, then ask it to stop; returns what was done to it."""
    with Cluster(run_dir, f"{SCRIPT} --epochs {EPOCHS}", limit_s=60 * minutes + 600, max_restarts=1000) as cluster:
        chaos = Chaos(cluster, random.Random(seed))
        cluster.start(*NODES)
        cluster.wait_for(step=2, ranks=len(NODES))
        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline:
            time.sleep(chaos.dice.uniform(0.5, 4))
            print(f"{chaos.strike():42} then step {chaos.newest_step()[1]:6}", flush=True)
        for node in NODES:
            cluster.stop(node)
        cluster.wait(check=False, show=False)
        return chaos.done


def newest(run_dir: Path) -> tuple[int, str]:
    """The step of the newest snapshot of the run's line, and the digest of all that it holds of the training."""
    store = SnapshotStore(run_dir)
    seen = store.listing()
    manifest = lineage(seen.claims, seen.manifests)[0]
    content = open_payload(store.read(manifest))
    return manifest.step, digest({"state": content["state"], "progress": content["progress"]})


def undisturbed(run_dir: Path, steps: int) -> str:
    """What `newest` gives for one process that is asked to stop in the last of so many steps."""
    stop = f"--fault sigterm:rank=0,step={steps - 1},at=data"
    command = f"torchrun --standalone --nproc-per-node 1 {SCRIPT} --epochs {EPOCHS} {stop} --run-dir {run_dir}"
    start(command, limit_s=1200).wait(show=False, check=False)
    reached, state = newest(run_dir)
    if reached != steps:
        raise JobFailed(f"the undisturbed run has its newest snapshot at step {reached} instead of {steps}")
    return state


def exactly_once(events: list[Event], steps: int) -> bool:
    """Whether the first `steps` steps of the surviving history take up each epoch's samples one after another."""
    history = [event for number, event in surviving_steps(events).items() if number < steps]
    places = [(event["step"], event["epoch"], *event["samples"]) for event in history]
    return places == [(k, k // STEPS, k % STEPS * BATCH, (k % STEPS + 1) * BATCH) for k in range(steps)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="for how long the job is disturbed")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults, their order and their targets")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    options = parser.parse_args()
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")
    with tempfile.TemporaryDirectory() as folder:
        run_dir, reference = Path(folder, "chaos"), Path(folder, "undisturbed")
        done = soak(run_dir, options.minutes, options.seed)
        events = read_events(run_dir).events
        steps, state = newest(run_dir)
        same, once = state == undisturbed(reference, steps), exactly_once(events, steps)
    disturbed, recoveries = summarize(events), recovery_seconds(events)
    result = {
        "seed": options.seed,
        "minutes": options.minutes,
        "faults": dict(Counter(kind for kind, _ in done)),
        "generations": disturbed["generations"],
        "world_sizes": disturbed["world_sizes"],
        "steps": steps,
        "steps_replayed": steps_replayed(events),
        "recovery_s": {"median": statistics.median(recoveries), "max": max(recoveries)} if recoveries else {},
        "goodput": disturbed["goodput"],
        "bit_identical": same,
        "every_sample_once": once,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if same and once else 1


if __name__ == "__main__":
    sys.exit(main())
