"""What a run that was killed tells of goodput; each function checks the whole record first, as those of `claims`."""

import json
from pathlib import Path

from course_lib.engine.report import steps_replayed, surviving_steps
from course_lib.lab.account import Report, examine
from course_lib.lab.claims import BrokenRecord, events_used_once
from course_lib.lab.constants import Constants, measure, measured_goodput, window
from course_lib.lab.simulator import replay

# The parts of the time from the first step to the last, and the ledger's kinds that each is made of.
PARTS = {
    "steps that count": ("productive",),
    "between steps": ("evaluating", "starting", "idle", "unattributed"),
    "stalled": ("stalled",),
    "done again": ("replayed", "lost"),
    "recovering": ("recovering",),
}


def report_of(run: Path | str) -> Report:
    """The report of a run whose record is sound."""
    events_used_once(run)
    return examine(run, look=False)


def adds_up(run: Path | str) -> bool:
    """Whether the ledger's kinds are the time from the first event to the last one, to the microsecond."""
    report = report_of(run)
    return sum(report.ledger.totals().values()) == report.history.end - report.history.begin


def phases_add_up(run: Path | str) -> list[bool]:
    """For each recovery, whether its phases follow one upon the other from the death to the first new step."""
    found = []
    for recovery in report_of(run).recoveries:
        edges = [recovery.died, *(phase.end for phase in recovery.phases)]
        joined = all(phase.begin == edge for phase, edge in zip(recovery.phases, edges, strict=False))
        found.append(joined and edges[-1] == recovery.end)
    return found


def counts_the_same_steps(run: Path | str) -> bool:
    """Whether the ledger counts as many steps, and steps done again, as the engine does from the events."""
    events, steps = events_used_once(run), report_of(run).ledger.steps
    return (steps["productive"], steps["replayed"]) == (len(surviving_steps(events)), steps_replayed(events))


def kill_times(run: Path | str) -> list[float]:
    """When its ranks were killed, by what `story.tell` wrote down, in Unix seconds."""
    path = Path(run) / "logs" / "story.jsonl"
    if not path.is_file():
        return []
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(float(deed["t"]) for deed in told if deed["what"] == "kill")


def constants(run: Path | str) -> Constants:
    """Pace, stall, write and recovery of a run."""
    return measure(events_used_once(run), kill_times(run))


def goodput_of(run: Path | str) -> float:
    """The share of the time, from the first step to the last, in steps that count."""
    return measured_goodput(events_used_once(run))


def mtbf_of(run: Path | str) -> float:
    """The mean time between the run's kills, from its first step to its last one."""
    begin, end = window(events_used_once(run))
    kills = [kill for kill in kill_times(run) if begin < kill < end]
    if not kills:
        raise BrokenRecord(f"{run}: nobody was killed while it trained, so there is no time between kills")
    return (end - begin) / len(kills)


def measured_parts(run: Path | str) -> dict[str, float]:
    """The share of each of `PARTS` in the time from the first step to the last one."""
    begin, end = (round(t * 1e6) for t in window(events_used_once(run)))
    kinds: dict[str, int] = {}
    for piece in report_of(run).ledger.within(begin, end):
        kinds[piece.kind] = kinds.get(piece.kind, 0) + piece.end - piece.begin
    return {part: sum(kinds.get(kind, 0) for kind in names) / (end - begin) for part, names in PARTS.items()}


def predicted_parts(run: Path | str, found: Constants, every: int) -> dict[str, float]:
    """The same by the simulator, for a job with the constants `found` that is killed when this run was."""
    begin, end = window(events_used_once(run))
    times = [kill - begin for kill in kill_times(run) if begin < kill < end]
    costs = {"stall_s": found.stall_s, "write_s": found.write_s, "recovery_s": found.recovery_s}
    shares = replay(times, end - begin, every * found.pace_s, **costs).shares
    return {
        "steps that count": shares["productive"] * found.step_share,
        "between steps": shares["productive"] * (1 - found.step_share),
        "stalled": shares["stalled"],
        "done again": shares["replayed"],
        "recovering": shares["recovering"] + shares["waiting"],
    }
