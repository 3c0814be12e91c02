"""What a run on changing numbers of ranks proves; each function checks the whole record first, as those of `claims`."""

from collections import defaultdict
from itertools import groupby
from pathlib import Path
from statistics import median

from course_lib.engine.runlog import Event
from course_lib.lab.claims import BrokenRecord, events_used_once


def _verified(run: Path | str) -> list[Event]:
    """The events of a finished run."""
    events = events_used_once(run)
    if not any(event["event"] == "finish" for event in events):
        raise BrokenRecord(f"{run}: no rank recorded that the run was finished")
    return events


def _steps(events: list[Event]) -> dict[int, list[Event]]:
    """The steps that each generation did, by generation; those that did none are left out."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["event"] == "step":
            found[event["generation"]].append(event)
    return dict(sorted(found.items()))


def journey(run: Path | str) -> list[int]:
    """On how many ranks the run trained, in order; a restart on as many ranks is no change."""
    return [ranks for ranks, _ in groupby(steps[0]["world_size"] for steps in _steps(_verified(run)).values())]


def batch_sizes(run: Path | str) -> dict[int, int]:
    """Number of ranks -> the samples of its largest step, all ranks together."""
    sizes: dict[int, int] = defaultdict(int)
    for steps in _steps(_verified(run)).values():
        for step in steps:
            low, high = step["samples"]
            sizes[step["world_size"]] = max(sizes[step["world_size"]], high - low)
    return dict(sorted(sizes.items()))


def done_again(run: Path | str) -> dict[str, int]:
    """How many steps were done again after an end that was "planned", and after a "death".

    Planned was the end of a generation of which every rank was asked to stop, and none had an error.
    """
    events = _verified(run)
    again = {"planned": 0, "death": 0}
    done: set[int] = set()
    why = "planned"
    for generation, steps in _steps(events).items():
        numbers = {step["step"] for step in steps}
        again[why] += len(numbers & done)
        done |= numbers
        mine = [event for event in events if event["generation"] == generation]
        asked = {event["rank"] for event in mine if event["event"] == "stop_requested"}
        in_order = len(asked) == steps[0]["world_size"] and not any(event["event"] == "error" for event in mine)
        why = "planned" if in_order else "death"
    return again


def own_times(run: Path | str, ranks: int) -> dict[int, tuple[float, float]]:
    """rank -> the medians of the seconds of a whole step, and of what it did by itself, where there were so many
    `ranks`."""
    found: dict[int, list[Event]] = defaultdict(list)
    for steps in _steps(_verified(run)).values():
        for step in steps:
            if step["world_size"] == ranks:
                found[step["rank"]].append(step)
    return {
        rank: (median(step["seconds"] for step in steps), median(step["own_seconds"] for step in steps))
        for rank, steps in sorted(found.items())
    }


def slowest(run: Path | str, ranks: int) -> int:
    """The rank that took longest by itself, in the starts of so many `ranks`."""
    times = own_times(run, ranks)
    return max(times, key=lambda rank: times[rank][1])
