"""A run as its processes tell it: who lived when, who worked together, and which steps they did.

Times are whole microseconds, so that sums of them are exact.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

Event = dict[str, Any]
ENDS = ("finish", "stop_requested")


@dataclass(frozen=True)
class Worker:
    """One process: HOST-PID, who it was, and its events, to which `us` is added: when, in microseconds."""

    name: str
    events: tuple[Event, ...]
    back_us: int  # how far the clock was set back meanwhile, in all

    @property
    def rank(self) -> int:
        return int(self.events[-1]["rank"])

    @cached_property
    def generation(self) -> int | None:
        return max((int(e["generation"]) for e in self.events if e["generation"] is not None), default=None)

    @property
    def born(self) -> int:
        return int(self.events[0]["us"])

    @property
    def ended(self) -> int:
        return int(self.events[-1]["us"])

    @property
    def launched(self) -> int | None:
        """When its agent was started, or the process itself if it has none; None in logs that don't say."""
        return micro(self.events[0].get("launched"))

    def moments(self, *names: str) -> list[int]:
        return [e["us"] for e in self.events if e["event"] in names]

    def faults(self) -> list[int]:
        """When it was broken on purpose; to be slow is no death."""
        return [e["us"] for e in self.events if e["event"] == "fault" and e.get("kind") != "slow"]


@dataclass(frozen=True)
class Done:
    """A step that was done: from when to when, and whose record tells of it."""

    number: int
    begin: int
    end: int
    worker: Worker


@dataclass(frozen=True)
class Attempt:
    """The processes that worked together: those of a generation, or some that died before they had one."""

    workers: tuple[Worker, ...]  # the lowest rank first

    @property
    def generation(self) -> int | None:
        return self.workers[0].generation

    @property
    def born(self) -> int:
        return min(worker.born for worker in self.workers)

    @property
    def ended(self) -> int:
        return max(worker.ended for worker in self.workers)

    @property
    def launched(self) -> int | None:
        return min((worker.launched for worker in self.workers if worker.launched is not None), default=None)

    @cached_property
    def stopped(self) -> int | None:
        """When it had ended in order; None if it never did."""
        return max((us for worker in self.workers for us in worker.moments(*ENDS)), default=None)

    @cached_property
    def loaded(self) -> int:
        """The number of steps done at which it began."""
        starts = [whole(e, "step") for w in self.workers for e in w.events if e["event"] == "snapshot_loaded"]
        return min((step for step in starts if step is not None), default=0)

    @cached_property
    def steps(self) -> tuple[Done, ...]:
        """What it did, in order, without an overlap; all ranks record each step, and the lowest one's record counts.

        A loop of the learner's own records no `seconds`: there a step begins where the one before it, or the
        evaluation, ended, and the first has no length.
        """
        records: dict[int, Done] = {}
        for worker in reversed(self.workers):
            before: int | None = None
            for event in worker.events:
                us, taken = event["us"], micro(event.get("seconds"))
                if event["event"] == "step":
                    if taken is not None and us - taken < worker.born:
                        taken = None  # longer than the process's life: that is no time
                    begin = us - taken if taken is not None else us if before is None else before
                    records[int(event["step"])] = Done(int(event["step"]), min(begin, us), us, worker)
                if event["event"] in ("step", "epoch"):
                    before = us
        evaluated = sorted(us for worker in self.workers for us in worker.moments("epoch"))
        done: list[Done] = []
        at = self.born
        for step in sorted(records.values(), key=lambda step: (step.end, step.number)):
            at = max(at, step.begin, *evaluated[: bisect_right(evaluated, step.end)][-1:])
            done.append(replace(step, begin=min(at, step.end)))
            at = step.end
        return tuple(done)

    @cached_property
    def evaluates_from(self) -> int | None:
        """When it began with an evaluation that an earlier start had not come to the end of; None if it did not."""
        at = self.workers[0].born
        for event in self.workers[0].events:
            if event["event"] in ("step", "warm_up"):
                break
            if event["event"] == "epoch":
                return at
            at = event["us"]
        return None

    @property
    def begun(self) -> int | None:
        """When its first step began, or the evaluation if that was all there was to do; None if it came to neither."""
        return self.steps[0].begin if self.steps else self.evaluates_from

    def worked(self, before: int) -> int:
        """When the last step or evaluation was done; what an old generation says after `before` counts for nothing."""
        moments = [us for worker in self.workers for us in worker.moments("step", "epoch")]
        return max((us for us in moments if us <= before), default=self.born)

    @cached_property
    def death(self) -> int:
        """Of an attempt that did not get to a step: when it was broken, or failed; else when it was last heard of."""
        told = [us for worker in self.workers for us in [*worker.faults(), *worker.moments("error")]]
        return min(told, default=self.ended)


@dataclass(frozen=True)
class History:
    """All attempts in order; `now`, when the run is alive; what is on disk; and what could not be read."""

    attempts: tuple[Attempt, ...]
    now: int | None = None
    durable: int = 0  # the steps done in the newest snapshot that there is
    bad_lines: int = 0
    ahead_us: int = 0  # how far the last event is in the future of who read them

    @property
    def workers(self) -> list[Worker]:
        return [worker for attempt in self.attempts for worker in attempt.workers]

    @property
    def last_working(self) -> Attempt | None:
        """The last attempt that came to a step or an evaluation."""
        return next((attempt for attempt in reversed(self.attempts) if attempt.begun is not None), None)

    def heard_of(self, before: int) -> int | None:
        """When the last of the processes that were launched before then was last heard of; None if there were none."""
        launched, ended = self._lives
        count = bisect_left(launched, before)
        return ended[count - 1] if count else None

    @cached_property
    def _lives(self) -> tuple[list[int], list[int]]:
        """When the processes were launched, in order; and when the last of those up to each came to its end."""
        lives = sorted((worker.launched or worker.born, worker.ended) for worker in self.workers)
        return [launched for launched, _ in lives], list(accumulate((ended for _, ended in lives), max))

    @cached_property
    def begin(self) -> int:
        return min(attempt.born for attempt in self.attempts)

    @cached_property
    def end(self) -> int:
        return max([attempt.ended for attempt in self.attempts] + ([] if self.now is None else [self.now]))


def micro(t: Any) -> int | None:
    """Seconds as whole microseconds; None for what is no number."""
    return round(t * 1e6) if isinstance(t, (int, float)) and abs(t) < 1e12 else None


def whole(event: Event, name: str) -> int | None:
    """A field that should be a whole number; None if it is none."""
    value = event.get(name)
    return value if isinstance(value, int) else None
