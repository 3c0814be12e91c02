"""What a step, a snapshot and a recovery take in a real job, from its events, and what the job's goodput was."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.engine import UsageError
from course_lib.engine.report import surviving_steps
from course_lib.engine.runlog import Event


@dataclass(frozen=True)
class Constants:
    """The constants of a job, in seconds: with them the formulas and the simulator predict its goodput.

    pace: from one step to the next while nothing else happens, so with evaluations and whatever else training takes;
    `step_share` of it are the steps themselves. stall and write: of a snapshot, see economics. recovery: from a failure
    to the beginning of the first new step.
    """

    pace_s: float
    step_share: float
    stall_s: float
    write_s: float
    recovery_s: float


def measure(events: Sequence[Event], failures: Sequence[float] = ()) -> Constants:
    """The constants of a job that failed at these times (Unix seconds); without a failure the recovery is 0.

    The pace is a mean, as evaluations must count; the others are medians.
    """
    saved = [event for event in events if event["event"] == "snapshot_saved"]
    stalls = {(event["generation"], event["step"]): float(event["stall_s"]) for event in saved}
    between, seconds = [], []
    for earlier, later in _neighbours(events):
        between.append(later["t"] - earlier["t"] - stalls.get((later["generation"], later["step"]), 0.0))
        seconds.append(later["seconds"])
    if not between or not saved:
        raise UsageError("nothing can be measured: the run needs two steps in a row and a published snapshot")
    pace = statistics.fmean(between)
    recoveries = [first - failure - pace for failure, first in _recovered(events, failures)]
    return Constants(
        pace_s=pace,
        step_share=statistics.fmean(seconds) / pace,
        stall_s=statistics.median(stalls.values()),
        write_s=statistics.median(event["write_s"] - event["stall_s"] for event in saved),
        recovery_s=statistics.median(recoveries) if recoveries else 0.0,
    )


def window(events: Sequence[Event]) -> tuple[float, float]:
    """From the first step's beginning to the last one's end, in Unix seconds: without the job's start and its end."""
    steps = [event for event in events if event["event"] == "step"]
    if not steps:
        raise UsageError("the run has done no step")
    return min(step["t"] - step["seconds"] for step in steps), max(step["t"] for step in steps)


def measured_goodput(events: Sequence[Event]) -> float:
    """The time in the steps that count, as a share of `window`."""
    begin, end = window(events)
    return sum(float(step["seconds"]) for step in surviving_steps(list(events)).values()) / (end - begin)


def _neighbours(events: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Rank 0's pairs of steps that followed one another in one generation."""
    steps = [event for event in events if event["event"] == "step" and event["rank"] == 0]
    pairs = zip(steps, steps[1:], strict=False)
    return [(a, b) for a, b in pairs if (b["generation"], b["step"]) == (a["generation"], a["step"] + 1)]


def _recovered(events: Sequence[Event], failures: Sequence[float]) -> list[tuple[float, float]]:
    """(failure, end of the next generation's first step), but for failures that another one followed before that."""
    firsts: dict[int, float] = {}
    for event in events:
        if event["event"] == "step" and event["generation"] is not None:
            firsts.setdefault(event["generation"], event["t"])
    found = []
    for failure, following in zip(failures, [*failures[1:], float("inf")], strict=False):
        first = min((t for t in firsts.values() if t > failure), default=float("inf"))
        if first < following:
            found.append((failure, first))
    return found
