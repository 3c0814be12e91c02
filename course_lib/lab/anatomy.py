"""Where the time of a recovery goes: its phases, from the death to the end of the first new step.

    failed starts    starts on the way that died before a step, from the death to the death of the last of them
    detection        until the first of the survivors has left, told by its agent or because it lost its peer itself
    kill             the agent ends its other workers: until the last of them that could speak has left
    idle             nothing of the job ran, until somebody launched it anew
    launch           a new agent starts; only after idle
    rendezvous       the agents agree on who takes part, until each makes a folder for a worker that it will start
    process start    from there until the kernel had made the process
    import           the interpreter starts and imports, until the script opens its log
    process group    until the process has joined its peers
    data             the script loads its data set and builds the model, until the Trainer is there
    snapshot load    find, agree on, read and load the newest good snapshot; claim a generation
    evaluation       of an epoch whose steps were all done already
    first batch      the loader starts and brings the first batch
    warm-up          the throw-away step
    first step       the first new step of the run

A phase of the job ends when the last rank has come to its end, the recovery with the first record of a new step. What
the records do not tell apart has a joint name, such as `detection + kill + rendezvous` where no worker survived to say
when it left. A worker that was hung, and was killed, leaves no word either: the wait for its end is in `rendezvous`.
Phases add up to the recovery exactly: they are differences of whole microseconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from course_lib.lab.history import Attempt, Worker, micro
from course_lib.lab.outages import Outage

PHASES = (
    "failed starts", "detection", "kill", "idle", "launch", "rendezvous", "process start", "import", "process group",
    "data", "snapshot load", "evaluation", "first batch", "warm-up", "first step",
)  # fmt: skip
Bound = tuple[str, int | None]  # a phase, and when it ended, if that is known


@dataclass(frozen=True)
class Phase:
    """One phase, or some that cannot be told apart, from when to when in microseconds."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class Recovery:
    """From the death to the end of the first new step: the job's phases, and each new rank's own.

    `before` are the attempts that came to their end: the one that had worked, if there was one, and failed starts.
    """

    died: int
    end: int
    before: tuple[Attempt, ...]
    new: Attempt
    phases: tuple[Phase, ...]
    ranks: dict[int, tuple[Phase, ...]]

    @property
    def total(self) -> int:
        return self.end - self.died


def recoveries(outages: Iterable[Outage]) -> list[Recovery]:
    """The recoveries of a run, in order: its outages that a death began and a new step ended."""
    return [_recovery(o, o.died, o.new) for o in outages if o.died is not None and o.new is not None and o.new.steps]


def _recovery(outage: Outage, died: int, new: Attempt) -> Recovery:
    end = max(died, min(us for worker in new.workers for us in worker.moments("step")[:1]))
    before = _agent(outage, died)
    own = {worker.rank: _own(worker) for worker in new.workers}
    slowest = [(name, _latest([dict(mine).get(name) for mine in own.values()])) for name, _ in own[new.workers[0].rank]]
    slowest[-1] = ("first step", end)
    phases = _cut(died, end, before + slowest)
    told = [us for _, us in before if us is not None]
    born = max([died, *told])
    ranks = {rank: _cut(born, max(born, mine[-1][1] or end), mine) for rank, mine in own.items()}
    gone = (*(() if outage.old is None else (outage.old,)), *outage.failed)
    return Recovery(died, end, gone, new, phases, ranks)


def _agent(outage: Outage, died: int) -> list[Bound]:
    """The phases that no worker lives through, as far as what is left of the old ones tells."""
    bounds: list[Bound] = []
    victims = outage.old.workers if outage.old is not None else ()
    if outage.failed:
        died = max(attempt.death for attempt in outage.failed)
        victims = outage.failed[-1].workers
        if died > (outage.died or died):
            bounds.append(("failed starts", died))
    left = [us for worker in victims for us in worker.moments("left") if us >= died]
    bounds += [("detection", min(left, default=None)), ("kill", max(left, default=None))]
    for begin, end in [span for span in outage.idle if span[1] >= died][-1:]:
        bounds[-1] = ("kill", max(begin, died))
        bounds += [("idle", end), ("launch", None)]
    return bounds


def _own(worker: Worker) -> list[Bound]:
    """What a new worker went through."""
    events = {event["event"]: event for event in reversed(worker.events)}  # the first of each name
    start, ready, step = (events.get(name, {}) for name in ("process_start", "group_ready", "step"))
    warm, evaluated = events.get("warm_up", {}).get("us"), events.get("epoch", {}).get("us")
    begun = None if "us" not in step else step["us"] - (micro(step.get("seconds")) or 0)
    bounds = [
        ("rendezvous", micro(start.get("spawned"))),
        ("process start", start.get("us")),
        ("import", events.get("imported", {}).get("us")),
        ("process group", micro(ready.get("joined"))),
        ("data", ready.get("us")),
        ("snapshot load", events.get("snapshot_loaded", {}).get("us")),
        ("evaluation", evaluated),
        ("first batch", warm),
        ("warm-up", begun),
        ("first step", step.get("us")),
    ]
    came_first = evaluated is not None and warm is not None and evaluated < warm
    return [bound for bound in bounds if came_first or bound[0] != "evaluation"]


def _latest(moments: list[int | None]) -> int | None:
    return max((us for us in moments if us is not None), default=None)


def _cut(begin: int, end: int, bounds: Iterable[Bound]) -> tuple[Phase, ...]:
    """The phases between `begin` and `end`: none ends before the one before it, and those of unknown end are joined."""
    phases: list[Phase] = []
    names: list[str] = []
    at = begin
    for name, us in bounds:
        names.append(name)
        if us is not None:
            until = min(max(us, at), end)
            phases.append(Phase(" + ".join(names), at, until))
            at, names = until, []
    return tuple(phase for phase in phases if phase.end > phase.begin)


def medians(found: list[Recovery]) -> dict[str, float]:
    """For each phase that occurs, the median of its seconds over all recoveries; 0 in those that lack it."""
    names = list(dict.fromkeys(phase.name for recovery in found for phase in recovery.phases))
    seconds = [{phase.name: (phase.end - phase.begin) / 1e6 for phase in recovery.phases} for recovery in found]
    return {name: median(mine.get(name, 0.0) for mine in seconds) for name in sorted(names, key=_place)}


def _place(name: str) -> tuple[int, int]:
    parts = name.split(" + ")
    return PHASES.index(parts[0]), len(parts)
