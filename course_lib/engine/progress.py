"""Whether the run still gets anywhere: a step that kills every generation would be repeated for ever."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from course_lib.engine.runlog import Event, checked, log_files
from course_lib.engine.snapshots import Claim

LIMIT = 3
_TAIL_BYTES = 1 << 16

Deaths = dict[
    int, int | None
]  # for each generation the step that it died in; None if it ended in order, or before it had begun one


def last_words(run_dir: str | Path, generations: Iterable[int]) -> Deaths:
    """What the event logs that can be read here tell of how these generations ended; reads the ends of files only."""
    deaths: Deaths = {}
    for path in log_files(run_dir):
        with suppress(OSError):
            events = _tail(path)
            for generation in set(generations) & {e.get("generation") for e in events}:
                mine = [e for e in events if e.get("generation") == generation]
                merge(deaths, {generation: _died_in(mine)})
    return deaths


def merge(deaths: Deaths, others: Mapping[int, int | None]) -> None:
    """Take in what another process, or another node, knows of the generations: the furthest step counts."""
    for generation, step in others.items():
        known = deaths.get(generation, step)
        deaths[generation] = None if step is None or known is None else max(known, step)


def suspects(claims: Iterable[Claim]) -> list[Claim]:
    """The last `LIMIT` generations, if there are as many and all are of the job that this process belongs to."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    newest = sorted(claims, key=lambda claim: -claim.generation)[:LIMIT]
    same_job = run_id != "none" and all(claim.run_id == run_id for claim in newest)
    return newest if len(newest) == LIMIT and same_job else []


def hopeless_step(claims: Iterable[Claim], deaths: Deaths) -> int | None:
    """The step that the last `LIMIT` generations of this job have all died in; None if there is no such step.

    A job that was started anew (another TORCHELASTIC_RUN_ID) begins to count anew: somebody has looked at it.
    A torchrun without --standalone and --rdzv-id names no job, so there nothing is counted.
    """
    steps = {deaths.get(claim.generation) for claim in suspects(claims)}
    return steps.pop() if len(steps) == 1 else None


def _tail(path: Path) -> list[Event]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().splitlines()
    events = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            events.append(checked(json.loads(line)))
    return events


def _died_in(events: list[Event]) -> int | None:
    """The step after the last one that was done, counted from where the generation began."""
    if any(event.get("event") in ("stop_requested", "finish") for event in events):
        return None
    # A death before the first batch was at hand is in no step.
    begun = [event["step"] for event in events if event.get("event") == "warm_up"]
    return max([event["step"] + 1 for event in events if event.get("event") == "step"] + begun, default=None)
