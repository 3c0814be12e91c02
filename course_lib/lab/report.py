"""Where the time of a run went: `python -m course_lib.lab.report RUN_DIR [--html PATH] [--json PATH]`

Prints the run's goodput ledger and the phases of its recoveries, and writes them with figures into one HTML page that
needs nothing else, RUN_DIR/report.html. It works for a run of any script of the course, also one that crashed, that
changed its number of ranks, or that is still going on, which is reported as of now. `course_lib.lab.ledger` and
`course_lib.lab.anatomy` say what each kind of time and each phase is.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from course_lib.engine import UsageError, read_events, run
from course_lib.engine.report import summarize
from course_lib.engine.runlog import Event
from course_lib.lab.anatomy import Recovery, medians, recoveries
from course_lib.lab.history import History
from course_lib.lab.ledger import KINDS, MOST_UNATTRIBUTED, Ledger, ledger_of
from course_lib.lab.recorded import read_history

_LINE, _CELL = 100, 9  # characters of a line, and of a number in it
_WHOLE = "death to first new step done"
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
        working = [attempt for attempt in self.history.attempts if attempt.begun is not None]
        ends = {e["event"] for worker in working[-1].workers for e in worker.events} if working else set()
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
        ahead = self.history.ahead_us / 1e6
        found = [
            f"{bad} line{'s' * (bad != 1)} of the event logs could not be read" if bad else "",
            f"clocks were set back, by {back:.3f} s in all: times near that are off by as much" if back > 0.001 else "",
            f"the last event is dated {ahead:.0f} s ahead of this machine's time" if ahead > 60 else "",
            f"{lost} step{'s' * (lost != 1)} were lost and not done again" if lost else "",
            *self._differences(),
        ]
        if self.ledger.share("unattributed") > MOST_UNATTRIBUTED:
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


def text(report: Report) -> str:
    """The tables, at most 100 columns wide."""
    ranks = len({worker.rank for worker in report.history.workers})
    about = f"{report.state}, {ranks} rank{'s' * (ranks != 1)}, {report.generations} generation"
    lines = [f"{about}{'s' * (report.generations != 1)}: {headline(report)}", "", f"{'':14}{'seconds':>12}   share"]
    totals, steps = report.ledger.totals(), report.ledger.steps
    for kind in KINDS:
        count = f"{steps[kind]:>8} step{'s' * (steps[kind] != 1)}" if steps[kind] else ""
        lines.append(f"{kind:14}{totals[kind] / 1e6:12.6f} {report.ledger.share(kind):>7.2%}{count}")
    lines += [f"{'wall time':14}{sum(totals.values()) / 1e6:12.6f} {1:>7.2%}", ""]
    return "\n".join([*lines, *_recovery_table(report), *(f"note: {note}" for note in report.notes())]).rstrip()


def _recovery_table(report: Report) -> list[str]:
    """A column for each recovery, as far as they fit, and the medians of all."""
    if not report.recoveries:
        return []
    middle = medians(list(report.recoveries))
    wide = max(map(len, [*middle, _WHOLE])) + 1
    shown = report.recoveries[: (_LINE - wide) // _CELL - 1]
    many = len(report.recoveries) > 1
    heads = [*map(str, range(1, len(shown) + 1)), *(["median"] if many else [])]
    lines = [f"{'recovery':{wide}}" + "".join(f"{head:>{_CELL}}" for head in heads)]
    for name, seconds in [*middle.items(), (_WHOLE, report.median_recovery or 0.0)]:
        cells = [sum(p.end - p.begin for p in found.phases if name in (p.name, _WHOLE)) / 1e6 for found in shown]
        row = "".join(f"{cell:{_CELL}.3f}" if cell else " " * _CELL for cell in [*cells, *([seconds] if many else [])])
        lines.append(f"{name:{wide}}{row}".rstrip())
    if (more := len(report.recoveries) - len(shown)) > 0:
        lines.append(f"{more} more recoveries are in the medians")
    return [*lines, ""]


def _readable(path: Path | str) -> str:
    """A path in letters that can be printed and written, whatever bytes it has."""
    return os.fsencode(path).decode(errors="replace")


class _Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help explains)")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report and write its page; raises UsageError for a directory that holds no run."""
    parser = _Parser("python -m course_lib.lab.report", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the --run-dir of a run")
    parser.add_argument(
        "--html", type=Path, metavar="PATH", help="where to write the page; default RUN_DIR/report.html"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there, too")
    options = parser.parse_args(argv)
    target = options.html or options.run_dir / "report.html"
    engines = options.run_dir / "report.json"
    files = [path.resolve() for path in (engines, target, options.json) if path is not None]
    if len(set(files)) < len(files):
        raise UsageError(f"--html and --json must be two files, and not the engine's {engines}: give another path")
    report = examine(options.run_dir)
    print(text(report), flush=True)
    from course_lib.lab.report_page import page  # here, since it imports what draws: the numbers come at once

    written = {target: page(report)}
    if options.json is not None:
        written[options.json] = json.dumps(report.as_json(), indent=1) + "\n"
    for path, content in written.items():
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
        print(f"wrote {_readable(path)}", flush=True)


if __name__ == "__main__":
    run(main)
