"""What was done to the nodes of a job, beside what the job records of itself; and both as lanes to be drawn.

A job's events name ranks, not nodes: rank 1 is another machine after rank 0's was lost. So whoever kills, starts and
stops nodes writes it down, a line each in RUN/logs/story.jsonl. Of nodes with one rank each, torchrun numbers the ranks
in the order of their names, so the two records together say which node was which rank.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.engine import read_events
from course_lib.lab.nodes import Cluster

Event = dict[str, Any]
ALONE = "d"  # the lane of a start without nodes: torchrun on one machine, or plain python
GONE = {"kill", "stop", "pause", "lost"}


@dataclass(frozen=True)
class Deed:
    """What was done, when (Unix seconds) and to which node: start, kill, stop, pause, resume, hang, or lost, of an
    agent that ended by itself."""

    t: float
    what: str
    node: str


@dataclass(frozen=True)
class Life:
    """A worker process: its node, rank and generation; when it began, trained first, trained last (all the time, if it
    ended in order), and was last heard of."""

    node: str
    rank: int
    ranks: int
    generation: int
    born: float
    trained: float | None
    busy: float
    ended: float


@dataclass(frozen=True)
class Story:
    """A job's lives and deeds, and the steps that rank 0 recorded: (t, step, generation, loss)."""

    lives: tuple[Life, ...]
    deeds: tuple[Deed, ...]
    steps: tuple[tuple[float, int, int, float], ...]


def tell(run: Path | str, what: str, *nodes: str) -> None:
    """Write down what is being done to nodes."""
    path = Path(run) / "logs" / "story.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for node in nodes:
            file.write(json.dumps({"t": time.time(), "what": what, "node": node}) + "\n")


class ToldCluster(Cluster):
    """A Cluster that writes down what is done to its nodes."""

    def start(self, *names: str) -> None:
        super().start(*names)
        tell(self.run_dir, "start", *names)

    def kill(self, *names: str) -> None:
        tell(self.run_dir, "kill", *names)
        super().kill(*names)

    def stop(self, name: str) -> None:
        tell(self.run_dir, "stop", name)
        super().stop(name)

    def pause(self, name: str, agent_only: bool = False) -> None:
        tell(self.run_dir, "pause", name)
        super().pause(name, agent_only)

    def resume(self, name: str) -> None:
        tell(self.run_dir, "resume", name)
        super().resume(name)


def read_story(run: Path | str) -> Story:
    """The story of a run that was told; times are seconds since its first deed or event."""
    path = Path(run) / "logs" / "story.jsonl"
    deeds = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return story(deeds, read_events(run).events)


def story(deeds: Iterable[Event], events: Iterable[Event]) -> Story:
    """Join deeds and events, whose times must be of one clock. Processes that never had a generation are left out."""
    told = sorted((Deed(d["t"], d["what"], d["node"]) for d in deeds), key=lambda deed: deed.t)
    found = sorted(events, key=lambda event: float(event["t"]))
    zero = min([deed.t for deed in told[:1]] + [float(event["t"]) for event in found[:1]])
    groups: dict[tuple[int, int], list[Event]] = {}
    for event in found:
        if event["generation"] is not None:
            groups.setdefault((event["generation"], event["rank"]), []).append(event)
    lives = [_life(key, group, told, found, zero) for key, group in sorted(groups.items())]
    steps = [(e["t"] - zero, e["step"], e["generation"], e["loss"]) for e in found if e["event"] == "step"
             and e["rank"] == 0]  # fmt: skip
    return Story(tuple(lives), tuple(Deed(d.t - zero, d.what, d.node) for d in told), tuple(steps))


def _life(key: tuple[int, int], group: list[Event], deeds: list[Deed], events: list[Event], zero: float) -> Life:
    (generation, rank), ranks = key, group[0]["world_size"]
    begun = [e["t"] for e in events if e["event"] == "process_start" and e["rank"] == rank and e["t"] <= group[0]["t"]]
    steps = [e["t"] - zero for e in group if e["event"] == "step"]
    node, ended = _node(rank, ranks, group[0]["t"], deeds), group[-1]["t"] - zero
    in_order = any(e["event"] in ("stop_requested", "finish") for e in group)
    busy = ended if in_order or not steps else steps[-1]
    born = max(begun, default=group[0]["t"]) - zero
    return Life(node, rank, ranks, generation, born, steps[0] if steps else None, busy, ended)


def _node(rank: int, ranks: int, t: float, deeds: list[Deed]) -> str:
    """The node that was `rank` of `ranks` at the time: of more nodes than that, those that were there first."""
    alive: dict[str, float] = {}
    for deed in deeds:
        if deed.t <= t and deed.what in GONE:
            alive.pop(deed.node, None)
        elif deed.t <= t and deed.what in ("start", "resume"):
            alive[deed.node] = deed.t
    if not alive:
        return ALONE
    members = sorted(sorted(alive, key=lambda node: alive[node])[:ranks])
    return members[rank] if rank < len(members) else ALONE
