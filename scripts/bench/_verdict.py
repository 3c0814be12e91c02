"""What a campaign of kills proved, from the events and the reports of the killed job and of an undisturbed one."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.engine import read_events
from course_lib.engine.report import surviving_steps
from course_lib.engine.runlog import Event
from course_lib.lab.plots import max_abs_loss_difference


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: when (Unix seconds), to whom, in which attempt, and how long after its processes appeared."""

    t: float
    rank: int
    pid: int
    attempt: int
    after_s: float


def exactly_once(events: list[Event], epochs: int, samples: int) -> bool:
    """Whether the surviving steps consume each epoch's order from its first sample to its last, without a gap."""
    steps = surviving_steps(events)
    place = (0, 0)
    for event in steps.values():
        low, high = event["samples"]
        if (event["epoch"], low) != place or high <= low:
            return False
        place = (event["epoch"], high) if high < samples else (event["epoch"] + 1, 0)
    return place == (epochs, 0) and list(steps) == list(range(len(steps)))


def recoveries(kills: Sequence[Kill], events: list[Event]) -> list[float]:
    """The seconds from each kill to the next generation's first step, for those kills that no other one followed."""
    seconds = []
    for kill, following in zip(kills, [*(k.t for k in kills[1:]), math.inf], strict=True):
        before = max(
            (e["generation"] for e in events if e["t"] <= kill.t and e["event"] == "snapshot_loaded"), default=0
        )
        new = (e["t"] for e in events if e["event"] == "step" and e["t"] > kill.t and e["generation"] > before)
        first = min(new, default=math.inf)
        if first < following:
            seconds.append(round(first - kill.t, 3))
    return seconds


def phase(kill: Kill, directory: Path) -> str:
    """What the victim was doing: "starting" until it has a generation, then "loading", and from its first step on
    "training"."""
    texts = [path.read_text() for path in (directory / "events").glob(f"*-{kill.pid}.jsonl")]
    return "starting" if not texts else "training" if '"event": "step"' in texts[0] else "loading"


def judge(
    directory: Path, reference: Path, outcome: dict[str, Any], epochs: int, samples: int
) -> tuple[dict[str, bool], dict[str, Any]]:
    """The claims, each with whether it holds, and the figures of a campaign in `directory`."""
    events, calm = read_events(directory).events, read_events(reference).events
    report, expected = (json.loads((path / "report.json").read_text()) for path in (directory, reference))
    kills = outcome["kills"]
    digests = ("weights_sha256", "optimizer_sha256")
    seconds = recoveries(kills, events)
    claims = {
        "exit code 0": outcome["exit_code"] == 0,
        "as many restarts as kills": outcome["attempts"] == len(kills) + 1,
        "no extra generation": report["generations"] <= len(kills) + 1,
        "bit-identical": all(report[name] == expected[name] for name in digests),
        "the same losses": max_abs_loss_difference(events, calm) == 0.0,
        "every sample once": exactly_once(events, epochs, samples),
    }
    phases = [phase(kill, directory) for kill in kills]
    figures = {
        "kills": len(kills),
        **{f"killed while {name}": phases.count(name) for name in ("starting", "loading", "training")},
        "restarts": outcome["attempts"] - 1,
        "generations": report["generations"],
        "steps": report["steps"],
        "steps done again": report["steps_replayed"],
        "recoveries": len(seconds),
        "recovery_seconds": [min(seconds), statistics.median(seconds), max(seconds)] if seconds else None,
        "bit_identical": claims["bit-identical"],
    }
    return claims, figures
