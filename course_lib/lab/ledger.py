"""The goodput ledger of a run: each microsecond from its first event to its last is of exactly one kind.

    productive    steps of the final history: no later start did them again, and no death lost them
    evaluating    from an epoch's last step, or the copy of its snapshot, to the record of its evaluation
    stalled       the training thread copies for a snapshot, waits for its writer, or hears what became of it
    replayed      steps and evaluations that a later start did again: here stands the time of those that were lost
    lost          work that a death threw away and nobody did again: whole steps (of a run that was given up, all that
                  no snapshot holds), and the part of a step in which an injected fault struck
    starting      from the start of the processes to their first step, when they replace nothing that died
    recovering    from a death to the first new step, or to the end of the records if none came: to notice it, kill,
                  meet again, start, import, join, load, warm up; starts that fail on the way are in it
    idle          nothing of the job runs: between an end in order, or the last word of a job whose agent died with
                  it, and the next launch
    unattributed  what the events do not tell; it is shown, and never added to another kind

One timeline stands for the whole job: in a synchronous job all ranks do the same, and the lowest rank's record counts.
The spans are painted over each other, newer generations last, on a canvas that is unattributed at first; so the kinds
add up to the wall time exactly, in whole microseconds, whatever the logs say.

`engine.report` counts alike: its `goodput` is `productive` over wall time, and its `recovery_seconds` go on to the end
of the first new step, where the ledger's `recovering` stops at its beginning. They part where the engine does not look:
a run that ended in a death (the engine counts steps that no snapshot holds), clocks that were set back, evaluations
within the `seconds` of a step (the scripts without a Trainer), and deaths that no fault tells of before the first step.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from course_lib.engine import read_events
from course_lib.engine.report import steps_replayed, surviving_steps
from course_lib.lab.history import ENDS, Attempt, Done, Event, History, micro, whole
from course_lib.lab.outages import Outage, outages
from course_lib.lab.recorded import read_history

KINDS = ("productive", "evaluating", "stalled", "replayed", "lost", "starting", "recovering", "idle", "unattributed")
LONG_US = 10_000_000  # of a shorter run, a slow write to the log can be more than a share is worth
MOST_UNATTRIBUTED = 0.02


@dataclass(frozen=True)
class Piece:
    """From `begin` to `end`, in microseconds since 1970, the job was busy with `kind`, as this generation or none."""

    begin: int
    end: int
    kind: str
    generation: int | None = None


@dataclass(frozen=True)
class Ledger:
    """The pieces of a run, without a gap; how many steps were of which kind; and its outages."""

    pieces: tuple[Piece, ...]
    steps: Counter[str]
    outages: tuple[Outage, ...]

    @property
    def wall(self) -> int:
        return self.pieces[-1].end - self.pieces[0].begin if self.pieces else 0

    def within(self, begin: int, end: int) -> list[Piece]:
        """The pieces between two moments, cut where these fall into one."""
        first = bisect_right(self.pieces, begin, key=lambda piece: piece.end)
        until = bisect_left(self.pieces, end, key=lambda piece: piece.begin)
        return [replace(p, begin=max(p.begin, begin), end=min(p.end, end)) for p in self.pieces[first:until]]

    def totals(self) -> dict[str, int]:
        """Microseconds of each kind; they add up to `wall`."""
        sums = dict.fromkeys(KINDS, 0)
        for piece in self.pieces:
            sums[piece.kind] += piece.end - piece.begin
        return sums

    def share(self, kind: str) -> float:
        return self.totals()[kind] / self.wall if self.wall else 0.0


def ledger_of(history: History) -> Ledger:
    """Account for every microsecond of a run."""
    found = outages(history)
    before = {id(outage.new): outage for outage in found}
    after = {id(outage.old): outage for outage in found}
    later = _Later(set(), set(), history.durable if _given_up(history) else math.inf, history.end)
    parts = [_waiting(outage) for outage in found if outage.new is None]
    count: Counter[str] = Counter()
    for attempt in reversed(history.attempts):  # so that what came later is known
        if attempt.begun is not None:
            outage = after.get(id(attempt))
            died = None if outage is None or attempt.stopped is not None else outage.begin
            fates = {step.number: later.fate(step.number) for step in attempt.steps}
            count.update(fates.values())
            inside = _work(attempt, fates, later.evaluated, died)
            parts.append([Piece(p.begin, min(p.end, later.begun), p.kind, p.generation) for p in inside])
            parts.append(_waiting(before[id(attempt)]) if id(attempt) in before else [])
        later.add(attempt)
    spans = [piece for part in reversed(parts) for piece in part]
    return Ledger(_paint(history.begin, history.end, spans), count, tuple(found))


@dataclass
class _Later:
    """What the attempts after one did: their steps and evaluations, the fewest steps that one of them found done, and
    when the first of them began to train."""

    steps: set[int]
    evaluated: set[int | None]
    found_done: float
    begun: int

    def fate(self, step: int) -> str:
        if step in self.steps:
            return "replayed"
        return "lost" if step >= self.found_done else "productive"

    def add(self, attempt: Attempt) -> None:
        self.steps |= {step.number for step in attempt.steps}
        self.evaluated |= {whole(e, "epoch") for w in attempt.workers for e in w.events if e["event"] == "epoch"}
        if attempt.generation is not None:
            self.found_done = min(self.found_done, attempt.loaded)
        if attempt.begun is not None:
            self.begun = min(self.begun, attempt.begun)


def _given_up(history: History) -> bool:
    """Whether nobody went on after the last death; then all is lost that no snapshot holds."""
    last = history.last_working
    return history.now is None and last is not None and last.stopped is None


def _waiting(outage: Outage) -> list[Piece]:
    """An outage in its parts."""
    generation = None if outage.new is None else outage.new.generation
    spans = [Piece(outage.begin, outage.end, "starting", generation)]
    if outage.died is not None:
        spans.append(Piece(max(outage.died, outage.begin), outage.end, "recovering", generation))
    return spans + [Piece(begin, end, "idle") for begin, end in outage.idle]


def _work(attempt: Attempt, fates: dict[int, str], again: set[int | None], died: int | None) -> list[Piece]:
    """The steps of an attempt, and what it did between them."""
    saved = {e["step"]: micro(e.get("stall_s")) or 0 for worker in attempt.workers for e in worker.events
             if e["event"] == "snapshot_saved" and whole(e, "step") is not None}  # fmt: skip
    end = attempt.ended if died is None else died
    steps = list(attempt.steps)
    spans: list[Piece] = []
    if (at := attempt.evaluates_from) is not None:
        opening = Done(-1, at, at, attempt.workers[0])
        spans += _between(opening, steps[0].begin if steps else end, 0, again)
    for step, until in zip(steps, [*(following.begin for following in steps[1:]), end], strict=False):
        spans.append(Piece(step.begin, step.end, fates[step.number]))
        spans += _between(step, until, saved.get(step.number + 1, 0), again)
    if died is not None and died > attempt.worked(before=died):  # a fault told when
        spans.append(Piece(max((piece.end for piece in spans), default=died), died, "lost"))
    return [Piece(piece.begin, piece.end, piece.kind, attempt.generation) for piece in spans]


def _between(step: Done, until: int, stall: int, again: set[int | None]) -> list[Piece]:
    """What the rank that recorded `step` did afterwards, before `until`, where the next one begins."""
    at = max(step.end, min(step.end + stall, until))
    spans = [Piece(step.end, at, "stalled")]
    events = step.worker.events
    for index in range(bisect_left(events, step.end, key=lambda e: int(e["us"])), len(events)):
        event = events[index]
        if event["us"] > until:
            break
        kind = "stalled" if event["event"] in ("snapshot_saved", "snapshot_skipped", *ENDS) else None
        if event["event"] == "epoch":
            kind = "replayed" if whole(event, "epoch") in again else "evaluating"
        if kind is not None and event["us"] > at:
            spans.append(Piece(at, event["us"], kind))
            at = event["us"]
    return spans


def _paint(begin: int, end: int, spans: list[Piece]) -> tuple[Piece, ...]:
    """The canvas from `begin` to `end` with each span over those before it; equal neighbours become one piece."""
    inside = [Piece(max(p.begin, begin), min(p.end, end), p.kind, p.generation) for p in spans]
    inside = [piece for piece in inside if piece.begin < piece.end]
    edges = sorted({begin, end, *(edge for piece in inside for edge in (piece.begin, piece.end))})
    colors: list[tuple[str, int | None]] = [("unattributed", None)] * (len(edges) - 1)
    for piece in inside:
        low, high = bisect_left(edges, piece.begin), bisect_left(edges, piece.end)
        colors[low:high] = [(piece.kind, piece.generation)] * (high - low)
    pieces: list[Piece] = []
    for left, right, color in zip(edges, edges[1:], colors, strict=False):
        if pieces and (pieces[-1].kind, pieces[-1].generation) == color:
            pieces[-1] = Piece(pieces[-1].begin, right, *color)
        else:
            pieces.append(Piece(left, right, *color))
    return tuple(pieces)


def check_ledger(run_dir: Path | str) -> list[str]:
    """What is wrong with the ledger of a run, in words: nothing, if it adds up and counts the steps as the engine does.

    At most 2 % may be unattributed, in a run of 10 s or more: in a shorter one a single slow write to the log is more.
    Raises UsageError for a directory without events.
    """
    history, events = read_history(run_dir, look=False), read_events(run_dir).events
    ledger = ledger_of(history)
    wall, total = history.end - history.begin, sum(ledger.totals().values())
    wrong = [f"the kinds add up to {total} us, but the wall time is {wall} us"] if total != wall else []
    edges = [history.begin, *(piece.end for piece in ledger.pieces)]
    if edges[-1] != history.end or any(p.begin != e or p.end <= e for p, e in zip(ledger.pieces, edges, strict=False)):
        wrong.append("the pieces do not follow one upon the other")
    counts = ledger.steps
    mine, theirs = (counts["productive"] + counts["lost"], counts["replayed"]), _engine_counts(events)
    plain = sum(attempt.generation is None for attempt in history.attempts if attempt.steps)
    if mine != theirs and plain <= 1:  # the engine takes all runs without generations for one
        wrong.append(f"{mine[0]} steps and {mine[1]} replayed ones, but the engine counts {theirs[0]} and {theirs[1]}")
    if wall >= LONG_US and (share := ledger.share("unattributed")) > MOST_UNATTRIBUTED:
        wrong.append(f"{share:.1%} of {wall / 1e6:.1f} s is unattributed")
    return wrong


def _engine_counts(events: list[Event]) -> tuple[int, int]:
    return len(surviving_steps(events)), steps_replayed(events)
