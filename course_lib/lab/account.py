"""A run's time, accounted for: its history, its ledger, its recoveries, and what a reader should know of them."""

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from course_lib.engine import read_events
from course_lib.engine.report import summarize
from course_lib.engine.runlog import Event
from course_lib.lab.anatomy import Recovery, recoveries
from course_lib.lab.history import History
from course_lib.lab.ledger import LONG_US, MOST_UNATTRIBUTED, Ledger, ledger_of
from course_lib.lab.recorded import read_history

_AGREE_S, _AGREE_SHARE = 0.002, 0.002


@dataclass(frozen=True)
class Report:
    """All that is known of a run's time."""

    name: str
    history: History
    ledger: Ledger
    recoveries: tuple[Recovery, ...]
    events: list[Event]

    @property
    def state(self) -> str:
        """How the run stands."""
        last = self.history.last_working
        ends = {e["event"] for worker in last.workers for e in worker.events} if last is not None else set()
        if self.history.now is not None:
            return "running"
        if "finish" in ends:
            return "finished"
        return "stopped as asked" if "stop_requested" in ends else "died"

    @property
    def generations(self) -> int:
        return len({attempt.generation for attempt in self.history.attempts if attempt.generation is not None})

    @property
    def median_recovery(self) -> float | None:
        """The median of the recoveries in seconds."""
        return median(recovery.total / 1e6 for recovery in self.recoveries) if self.recoveries else None

    def notes(self) -> list[str]:
        """What a reader of the figures should know."""
        back = sum(worker.back_us for worker in self.history.workers) / 1e6
        lost, bad = self.ledger.steps["lost"], self.history.bad_lines
        ahead, now = self.history.ahead_us / 1e6, self.history.now
        found = [
            f"{bad} line{'s' * (bad != 1)} of the event logs could not be read" if bad else "",
            f"clocks were set back, by {back:.3f} s in all: times near that are off by as much" if back > 0.001 else "",
            f"the last event is dated {ahead:.0f} s ahead of this machine's time" if ahead > 60 else "",
            f"{lost} step{'s' * (lost != 1)} were lost and not done again{' so far' * (now is not None)}"
            if lost
            else "",
            *(self._differences() if now is None else []),  # the engine stops at the last event
        ]
        if self.ledger.share("unattributed") > MOST_UNATTRIBUTED and self.ledger.wall >= LONG_US:
            found.append(f"more than {MOST_UNATTRIBUTED:.0%} of the time is unattributed: the events do not tell of it")
        return [note for note in found if note]

    def _differences(self) -> list[str]:
        """Where report.json counts otherwise; `course_lib.lab.ledger` says why that may be."""
        engine = summarize(self.events)
        found = []
        if abs(engine["goodput"] - self.ledger.share("productive")) > _AGREE_SHARE:
            found.append(f"the engine's goodput is {engine['goodput']:.1%}: it counts lost steps, and evaluations "
                         "within a step's seconds")  # fmt: skip
        mine, theirs = [recovery.total / 1e6 for recovery in self.recoveries], engine["recovery_seconds"]
        if len(mine) != len(theirs) or any(abs(a - b) > _AGREE_S for a, b in zip(mine, theirs, strict=True)):
            found.append(f"the engine's recovery_seconds are {theirs}: it dates a death by steps and faults only")
        return found

    def as_json(self) -> dict[str, Any]:
        """The same in numbers: microseconds, so that they add up exactly."""
        return {
            "run": self.name,
            "state": self.state,
            "wall_us": self.ledger.wall,
            "ledger_us": self.ledger.totals(),
            "goodput": self.ledger.share("productive"),
            "steps": dict(self.ledger.steps),
            "recoveries": [
                {
                    "died_us": recovery.died - self.history.begin,
                    "total_us": recovery.total,
                    "phases_us": {phase.name: phase.end - phase.begin for phase in recovery.phases},
                    "ranks_us": {
                        str(rank): {phase.name: phase.end - phase.begin for phase in phases}
                        for rank, phases in recovery.ranks.items()
                    },
                }  # fmt: skip
                for recovery in self.recoveries
            ],
            "notes": self.notes(),
        }


def examine(run_dir: Path | str, look: bool = True) -> Report:
    """The report of the run in `run_dir`; raises UsageError when it holds no events."""
    history = read_history(run_dir, look)
    ledger = ledger_of(history)
    found = tuple(recoveries(ledger.outages))
    return Report(_readable(run_dir), history, ledger, found, read_events(run_dir).events)


def headline(report: Report) -> str:
    """One line: goodput, recoveries, and how long they took."""
    count = len(report.recoveries)
    words = f"goodput {report.ledger.share('productive'):.1%}, {count} recover{'y' if count == 1 else 'ies'}"
    if report.median_recovery is not None:
        words += f" of {report.median_recovery:.2f} s" + " in the median" * (count > 1)
    return words


def _readable(path: Path | str) -> str:
    """A path in letters that can be printed and written, whatever bytes it has."""
    return os.fsencode(path).decode(errors="replace")
