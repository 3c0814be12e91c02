"""The times in which a run did no step: before its first one, after a death, between a stop and the next start."""

from dataclasses import dataclass

from course_lib.lab.history import Attempt, History

Span = tuple[int, int]


@dataclass(frozen=True)
class Outage:
    """From `begin` to `end`, in microseconds, no step was done; then `new` began its first one, if there is a `new`.

    `old` did steps before. `died` is when there was a death to recover from: the fault that was injected; else the
    last step or evaluation before it, since nothing tells how far the next one had come. It is None when `old` had
    ended in order, or was never there, and no start failed. `failed` are the starts that died before a step, and in
    the times of `idle` nothing of the job ran: it had been started anew, by another agent, only at the end of each.
    """

    begin: int
    end: int
    died: int | None
    old: Attempt | None
    failed: tuple[Attempt, ...]
    new: Attempt | None
    idle: tuple[Span, ...]

    @property
    def starts(self) -> tuple[Attempt, ...]:
        return (*self.failed, *(() if self.new is None else (self.new,)))


def outages(history: History) -> list[Outage]:
    """The outages of a run in order: one before each attempt that did a step, and one after the last such attempt."""
    found: list[Outage] = []
    old: Attempt | None = None
    failed: list[Attempt] = []
    for attempt in history.attempts:
        if attempt.begun is not None:
            found.append(_outage(history, old, failed, attempt))
            old, failed = attempt, []
        else:
            failed.append(attempt)
    over = history.now is None or failed or (old is not None and old.stopped is not None)
    if over or old is None:
        found.append(_outage(history, old, failed, None))
    return [outage for outage in found if outage.begin < outage.end]


def _outage(history: History, old: Attempt | None, failed: list[Attempt], new: Attempt | None) -> Outage:
    end = new.begun if new is not None and new.begun is not None else history.end
    begin, died = history.begin, None
    if old is not None and old.stopped is not None:
        begin = old.stopped
    elif old is not None:
        worked = old.worked(before=end)
        faults = [us for worker in old.workers for us in worker.faults() if worked <= us < end]
        begin = died = min(faults, default=worked)
    if died is None and failed and failed[0].death < end:
        died = failed[0].death
    outage = Outage(begin, end, died, old, tuple(failed), new, ())
    return Outage(begin, end, died, old, tuple(failed), new, tuple(_idle(history, outage)))


def _idle(history: History, outage: Outage) -> list[Span]:
    """When nothing ran. After an end in order, until the next start; after a death, only if an agent is younger."""
    spans: list[Span] = []
    old = outage.old
    if old is not None and old.stopped is not None:
        first = min((max(attempt.launched or 0, outage.begin) if (attempt.launched or 0) > outage.begin
                     else attempt.born for attempt in outage.starts), default=outage.end)  # fmt: skip
        spans.append((outage.begin, min(max(first, outage.begin), outage.end)))
    for launched in sorted({attempt.launched for attempt in outage.starts if attempt.launched is not None}):
        earlier = history.heard_of(before=launched)
        if earlier is not None and (ended := max(outage.begin, earlier)) < launched <= outage.end:
            spans.append((ended, launched))
    return spans
