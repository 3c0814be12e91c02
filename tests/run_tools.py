"""Runs made by hand: the events of processes whose times are round, so that a test can say what they add up to."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from course_lib.lab.history import Event, History
from course_lib.lab.recorded import attempts_of, workers_of

S = 1_000_000  # microseconds
READY = 4  # seconds from a process's start to its first step


def event(name: str, t: float, rank: int = 0, generation: int | None = 1, **more: Any) -> Event:
    return {"t": t, "event": name, "rank": rank, "world_size": 2, "generation": generation} | more


def life(
    steps: Iterable[int] = (),
    begin: float = 0.0,
    generation: int | None = 1,
    rank: int = 0,
    *,
    loaded: int | None = None,
    **start: Any,
) -> list[Event]:
    """A process that began at `begin`, was ready after 4 s, and did these steps in a second each."""
    steps = list(steps)
    loaded = (steps or [0])[0] if loaded is None else loaded
    told = [
        event("process_start", begin, rank, None, **start),
        event("imported", begin + 1, rank, None),
        event("group_ready", begin + 2, rank, None, joined=begin + 1.5),
        event("snapshot_loaded", begin + 3, rank, generation, step=loaded),
    ]
    if steps:
        told.append(event("warm_up", begin + 3.25, rank, generation, step=steps[0]))
    done = [step(number, begin + READY + i + 1, rank, generation) for i, number in enumerate(steps)]
    return told + done


def step(number: int, t: float, rank: int = 0, generation: int | None = 1, seconds: float = 1.0) -> Event:
    return event("step", t, rank, generation, step=number, seconds=seconds, loss=1.0, epoch=0)


def saved(number: int, t: float, stall: float, generation: int = 1) -> Event:
    return event("snapshot_saved", t, 0, generation, step=number, stall_s=stall, write_s=stall)


def history(*files: list[Event], durable: int = 0, now: float | None = None) -> History:
    """The history of a run with one file for each of these lists."""
    workers = [worker for number, events in enumerate(files) for worker in workers_of(f"h-{number}", events)]
    return History(attempts_of(workers), None if now is None else round(now * S), durable)


def write(run_dir: Path, *files: list[Event], tail: str = "") -> Path:
    """The same on disk; `tail` stands at the end of the first file."""
    (run_dir / "events").mkdir(parents=True)
    for number, events in enumerate(files):
        text = "".join(json.dumps(e) + "\n" for e in events)
        (run_dir / "events" / f"h-{number}.jsonl").write_text(text + (tail if number == 0 else ""))
    return run_dir
