"""Which rank is slow: in a synchronous step all ranks take equally long, since the fast ones wait for the slow one.

So each rank measures what it does by itself: loading, forward and backward until its last gradient is there, and
what comes after the backward pass; the wait for the others, in between, is left out. On a GPU this is the host's time:
a slow device shows only in a loop that waits for it (as one that reads the loss in each step does, at the end).
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from torch import Tensor, nn

from course_lib.engine.runlog import RunLog
from course_lib.engine.step import Step
from course_lib.engine.world import World

WINDOW = 10  # steps: one slow step is a hiccup, and no straggler
_FACTOR, _LEAST_S = 2.0, 0.05


class Stragglers:
    """Measures each rank's own seconds in each step, and names a rank that is slower than its peers.

    Slow is one whose median over the last `WINDOW` steps is over twice the median of the other ranks, and at least
    50 ms more (on a busy machine less than that is noise). It is named once, on rank 0, and again only after it has
    been as fast as the others in between.
    """

    def __init__(self, model: nn.Module, world: World, log: RunLog, say: Callable[[str], None]) -> None:
        self._world, self._log, self._say = world, log, say
        self._recent: deque[list[float]] = deque(maxlen=WINDOW)
        self._slow: set[int] = set()
        self.begin()
        # The backward pass ends with the layer that came first, so its gradient is the last one.
        first = next((p for p in model.parameters() if p.requires_grad), None)
        if first is not None and world.world_size > 1:
            first.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]

    def begin(self) -> float:
        """The step begins now, with the rank's work for its batch; returns the moment in monotonic seconds."""
        self._begun = self._ready = time.monotonic()
        return self._begun

    def _gradient_is_there(self, _: Tensor) -> None:
        self._ready = time.monotonic()

    def own_seconds(self, step: Step) -> float:
        """What the step that ends now has cost this rank without its wait for the others; of shards, each."""
        parts = len(step.counts) if step.shards is not None else 1  # one rank may have more than another
        if parts == 0:
            return 0.0
        return (self._ready - self._begun) / parts + time.monotonic() - max(step.met, self._ready)

    def note(self, step: int, seconds: list[float]) -> None:
        """Take in every rank's own seconds of a step, which are the same list on all ranks."""
        self._recent.append(seconds)
        if self._world.rank != 0 or len(seconds) < 2 or len(self._recent) < WINDOW:
            return
        typical = [median(column) for column in zip(*self._recent, strict=True)]
        busy = {rank: mine for rank, mine in enumerate(typical) if mine > 0}  # the others hold no shard
        for rank, mine in busy.items():
            others = median([theirs for other, theirs in busy.items() if other != rank] or [mine])
            if mine < _FACTOR * others or mine < others + _LEAST_S:
                self._slow.discard(rank)
            elif rank not in self._slow:
                self._slow.add(rank)
                self._log("straggler", step=step, slow_rank=rank, own_seconds=mine, others_seconds=others)
                self._say(
                    f"rank {rank} is slow: it takes {mine * 1000:.0f} ms a step by itself, the others "
                    f"{others * 1000:.0f} (medians of {WINDOW} steps up to step {step})"
                )
