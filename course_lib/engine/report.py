"""report.json: what a run's events add up to."""

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from course_lib.engine.runlog import Event, read_events


def surviving_steps(events: list[Event]) -> dict[int, Event]:
    """The step events that made the final weights, by step number: a replay by a newer generation wins.

    Every rank logs each step; the lowest one's record stands for all. A script without snapshots has no generations;
    when one ran in the same directory, its steps count as older.
    """
    done = [event for event in events if event["event"] == "step"]
    done.sort(key=lambda event: (event["generation"] or 0, -event["rank"]))  # the last one stays
    return dict(sorted({event["step"]: event for event in done}.items()))


def steps_replayed(events: list[Event]) -> int:
    """How many times a step was done again because of a death."""
    done = {(event["generation"], event["step"]) for event in events if event["event"] == "step"}
    return len(done) - len({step for _, step in done})


def recovery_seconds(events: list[Event]) -> list[float]:
    """For each death, the time from the fault (else from the last step before it) to the first new step, in s.

    `events` are in the order of their times.
    """
    seconds = []
    last_generation, last_step_t = 0, 0.0
    times = [event["t"] for event in events]
    for event in events:
        generation = event["generation"]
        # A rank of the old generation can still log its last step after a peer has died.
        if event["event"] != "step" or generation is None or generation < last_generation:
            continue
        if generation > last_generation:
            between = events[bisect_right(times, last_step_t) : bisect_left(times, event["t"])]
            faults = [e["t"] for e in between if e["event"] == "fault" and e.get("kind") != "slow"]
            stopped = any(e["event"] in ("stop_requested", "finish") for e in between)
            # Before the first step of all, only a fault tells of a death.
            if not stopped and (faults or last_generation > 0):
                seconds.append(round(event["t"] - min(faults, default=last_step_t), 3))
        last_generation, last_step_t = generation, event["t"]
    return seconds


def summarize(events: list[Event]) -> dict[str, Any]:
    """The part of a report that follows from the events alone.

    `goodput` is the time of the steps that count, over the time from the first process's start to the last event.
    """
    steps = surviving_steps(events)
    loaded = {e["generation"]: e["world_size"] for e in events if e["event"] == "snapshot_loaded"}
    wall = events[-1]["t"] - min(e["t"] for e in events) if events else 0.0
    return {
        "steps": len(steps),
        "generations": len(loaded),
        "world_sizes": [loaded[generation] for generation in sorted(loaded)],
        "steps_replayed": steps_replayed(events),
        "recovery_seconds": recovery_seconds(events),
        "goodput": round(sum(e.get("seconds", 0.0) for e in steps.values()) / wall, 4) if wall else 0.0,
    }


def write_report(run_dir: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Summarize the events in `run_dir`, add `extra`, and write report.json there; returns it.

    A report that can't be written says so on stderr and costs nothing else.
    """
    log = read_events(run_dir)
    report = summarize(log.events) | {"bad_lines": log.bad_lines} | extra
    temporary = run_dir / ".report.json.tmp"
    try:
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(run_dir / "report.json")
    except OSError as error:
        print(f"no report: {error}", file=sys.stderr, flush=True)
    return report


def epoch_line(record: Mapping[str, Any], epochs: int, global_batch_size: int) -> str:
    """The line that rank 0 prints for an epoch, short enough for a notebook's width; the events hold the rest.

    `train_loss` and `train_accuracy` stand together, as do others that begin with the same word.
    """
    groups: dict[str, list[str]] = {}
    for name, value in record.items():
        if name not in ("epoch", "steps", "lr"):
            group, _, metric = name.partition("_")
            groups.setdefault(group, [group]).append(f"{metric} {value:.4f}".lstrip())
    parts = [f"epoch {record['epoch'] + 1}/{epochs}", f"global batch {global_batch_size}"]
    return " | ".join([*parts, *(" ".join(words) for words in groups.values())])
