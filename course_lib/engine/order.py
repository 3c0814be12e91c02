"""The order of samples: a pure function of (seed, epoch), the same at every world size.

Step k of an epoch consumes the next B samples of that epoch's permutation, and rank r takes its share of them.
Nothing here has a state: a position is two integers, so a resume needs nothing but those two, and any number of
ranks can go on from it without losing a sample or seeing one twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from course_lib.engine.errors import UsageError


@dataclass(frozen=True)
class Position:
    """Where training stands: between two optimizer steps, or between an epoch's last step and its evaluation.

    `step` counts the optimizer steps done since the beginning, `next_sample` the samples of `epoch` already used.
    When they are all used, the epoch's evaluation is still to do; after it the position is the next epoch's start.
    """

    epoch: int = 0
    next_sample: int = 0
    step: int = 0


@dataclass(frozen=True)
class Plan:
    """The experiment's order: `samples` in the data set, `global_batch_size` of them a step, and the seed."""

    samples: int
    global_batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("the training set is empty: give a data set with at least one sample")
        if self.global_batch_size < 1:
            raise UsageError(f"--global-batch-size must be at least 1, not {self.global_batch_size}")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch; the last one may be smaller than the global batch, never empty."""
        return -(-self.samples // self.global_batch_size)

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of all samples in `epoch`, as int64 indices of shape (samples,).

        It sorts raw Philox words, because numpy guarantees a bit generator's stream for all versions and does
        not guarantee what `permutation` makes of it (NEP 19).
        """
        words = np.random.Philox(key=mix(self.seed, epoch)).random_raw(self.samples)
        return np.argsort(words, kind="stable").astype(np.int64)

    def batch(self, at: Position) -> tuple[int, int]:
        """The half-open interval of the epoch's order that the step at `at` consumes."""
        return at.next_sample, min(at.next_sample + self.global_batch_size, self.samples)

    def after_step(self, at: Position) -> Position:
        """The position once the step at `at` is done."""
        return Position(at.epoch, self.batch(at)[1], at.step + 1)

    def next_epoch(self, at: Position) -> Position:
        """The start of the epoch after `at`'s."""
        return Position(at.epoch + 1, 0, at.step)

    def epoch_done(self, at: Position) -> bool:
        """Whether every sample of the position's epoch was used."""
        return at.next_sample >= self.samples


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rank's part of the half-open interval [start, stop); parts differ by at most one, low ranks get more."""
    size, extra = divmod(stop - start, world_size)
    low = start + rank * size + min(rank, extra)
    return low, low + size + (rank < extra)


def pieces(start: int, stop: int, largest: int | None) -> list[tuple[int, int]]:
    """Cut [start, stop) into the fewest even pieces of at most `largest` samples; an empty one stays one piece."""
    count = 1 if not largest else max(1, -(-(stop - start) // largest))
    return [share(start, stop, i, count) for i in range(count)]


def cuts(
    start: int, stop: int, rank: int, world_size: int, max_local_batch: int | None = None, shards: int | None = None
) -> list[tuple[int, int]]:
    """The intervals of the step's samples [start, stop) that `rank` puts through the model, one after the other.

    Without `shards` they are its share, in pieces of at most `max_local_batch`; it can be empty. With `shards` they
    are the rank's part of as many shards as the step can fill, the same shards at every world size.
    """
    if shards is None:
        return pieces(*share(start, stop, rank, world_size), max_local_batch)
    filled = min(shards, stop - start)
    return [share(start, stop, shard, filled) for shard in range(*share(0, filled, rank, world_size))]


def share_indices(
    plan: Plan,
    at: Position,
    epochs: int,
    rank: int,
    world_size: int,
    max_local_batch: int | None = None,
    shards: int | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """The (epoch, index) pairs of each micro-batch of `rank`, from `at` to the end of the last epoch.

    Lists can be empty: a step's share is, when the step has fewer samples than there are ranks.
    """
    while at.epoch < epochs:
        order = plan.permutation(at.epoch)
        while not plan.epoch_done(at):
            for low, high in cuts(*plan.batch(at), rank, world_size, max_local_batch, shards):
                yield [(at.epoch, index) for index in order[low:high].tolist()]
            at = plan.after_step(at)
        at = plan.next_epoch(at)


def mix(*numbers: int) -> int:
    """A 64-bit key from several integers (any sign, up to 64 bits each), well mixed and always the same.

    SplitMix64's finaliser (Steele, Lea and Flood 2014) after each number. It seeds the counter-based randomness:
    nothing needs to be remembered, so nothing can be lost.
    """
    mask = (1 << 64) - 1
    key = 0x9E3779B97F4A7C15
    for number in numbers:
        key = (key + (number & mask) + 0x9E3779B97F4A7C15) & mask
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & mask
        key ^= key >> 31
    return key
