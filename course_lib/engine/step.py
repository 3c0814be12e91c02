"""One optimizer step as the training loop sees it: its micro-batches, their weights, and what they add up to."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from course_lib.engine.errors import NonFiniteError
from course_lib.engine.feed import feed, seed_everything
from course_lib.engine.order import Plan, Position, cuts, share
from course_lib.engine.shards import ShardSum, exact_totals
from course_lib.engine.state import TrainState
from course_lib.engine.tree import map_tensors
from course_lib.engine.world import World, shared


class MicroBatch:
    """A part of this rank's share that goes through the model at once.

    `data` is what the loader collated, on the rank's device. `count` is the number of samples in it, 0 for the
    stand-in that a rank without a share gets, so that all ranks take part in each collective. `weight` turns the
    mean loss of this micro-batch into its part of the global batch's mean, after DDP has averaged over the ranks.
    """

    def __init__(self, data: Any, count: int, weight: float, step: "Step") -> None:
        self.data = data
        self.count = count
        self.weight = weight
        self._step = step
        self._totals: dict[str, float] = {}
        step.parts.append(self._totals)

    def backward(self, loss: torch.Tensor, **sums: torch.Tensor | float) -> None:
        """Backpropagate the mean loss of this micro-batch, weighted, and add up what the logs show.

        `sums` are totals over the micro-batch's samples, such as `correct`; use the same names in every step.
        """
        scaled = loss if self.weight == 1 else loss * self.weight
        scaler = self._step.scaler
        (scaler.scale(scaled) if scaler is not None else scaled).backward()  # type: ignore[no-untyped-call]
        self.add(loss=loss.item() * self.count, **sums)

    def add(self, **sums: torch.Tensor | float) -> None:
        """Add totals over this micro-batch's samples to the step's; for loops that do their own backward."""
        self._step.met = time.monotonic()
        for name, value in sums.items():
            # A stand-in's values count for nothing, not even when they are NaN.
            self._totals[name] = self._totals.get(name, 0.0) + (float(value) if self.count else 0.0)


@dataclass
class Step:
    """The step at hand. Iterate over it to get its micro-batches: one, or a split share's, or this rank's shards.

    `number` counts the run's steps from 0, `samples` is the half-open interval of the epoch's order that the step
    consumes over all ranks, `warmup` marks the throw-away step at a process's start, whose effects are undone.
    """

    number: int
    epoch: int
    samples: tuple[int, int]
    last_of_epoch: bool
    model: nn.Module
    world: World
    seed: int
    batches: list[Any]
    counts: list[int]
    scaler: torch.amp.GradScaler | None = None
    shards: int | None = None
    warmup: bool = False
    parts: list[dict[str, float]] = field(default_factory=list)
    met: float = 0.0  # when this rank last came out of a backward pass, where it met the others (monotonic seconds)

    @property
    def totals(self) -> dict[str, float]:
        """What this rank's micro-batches have added up to so far; nothing on a rank that has no shard."""
        return exact_totals(self.parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        self.parts.clear()
        return self._shares() if self.shards is None else self._shards(self.shards)

    def _shards(self, shards: int) -> Iterator[MicroBatch]:
        size = self.samples[1] - self.samples[0]
        filled = min(shards, size)
        sums = ShardSum(self.model, self.world, filled)
        first, _ = share(0, filled, self.world.rank, self.world.world_size)
        for shard, (data, count) in enumerate(zip(self.batches, self.counts, strict=True), first):
            data = self._on_device(data)
            seed_everything(self.seed, self.number, shard, -3)
            yield MicroBatch(data, count, count / size, self)
            sums.take(shard)
        sums.finish()
        self.met = time.monotonic()

    def _shares(self) -> Iterator[MicroBatch]:
        size = self.samples[1] - self.samples[0]
        template = self._template() if size < self.world.world_size else None
        for i, (data, count) in enumerate(zip(self.batches, self.counts, strict=True)):
            data = self._on_device(data if count else template)
            weight = count * self.world.world_size / size
            # Dropout has no generator to pass: it draws after a seed that only depends on where we are.
            seed_everything(self.seed, self.number, self.world.rank, i)
            last = i == len(self.batches) - 1
            with _few_samples(self.model, count, self.world), _sync(self.model, last):
                yield MicroBatch(data, count, weight, self)

    def _template(self) -> Any:
        """Rank 0's share, which is one sample, for the ranks whose share of a small step is empty."""
        return self.world.broadcast(self.batches[0])

    def _on_device(self, data: Any) -> Any:
        device = self.world.device
        moved = map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))
        # The warm-up's loop body may change its input in place, and the same batch comes once more.
        return map_tensors(moved, torch.clone) if self.warmup else moved


def steps_from(
    at: Position,
    epochs: int,
    dataset: Dataset[Any],
    plan: Plan,
    world: World,
    model: nn.Module,
    *,
    scaler: torch.amp.GradScaler | None = None,
    max_local_batch: int | None = None,
    shards: int | None = None,
    **loading: Any,
) -> Iterator[Step]:
    """The steps of this rank from `at` to the end of epoch `epochs` - 1; `loading` goes to `feed`.

    It saves nothing and resumes nothing: that is the Trainer's part.
    """
    batches = feed(dataset, plan, at, epochs, world, max_local_batch=max_local_batch, shards=shards, **loading)
    while at.epoch < epochs:
        if plan.epoch_done(at):
            at = plan.next_epoch(at)
            continue
        samples = plan.batch(at)
        mine = cuts(*samples, world.rank, world.world_size, max_local_batch, shards)
        yield Step(
            number=at.step,
            epoch=at.epoch,
            samples=samples,
            last_of_epoch=samples[1] == plan.samples,
            model=model,
            world=world,
            seed=plan.seed,
            batches=[next(batches) for _ in mine],
            counts=[high - low for low, high in mine],
            scaler=scaler,
            shards=shards,
        )
        at = plan.after_step(at)


def totals_over_ranks(step: Step, votes: list[float]) -> tuple[dict[str, float], list[float]]:
    """The step's totals over the whole global batch and the sums of the ranks' votes, the same on every rank."""
    own = step.totals
    if step.shards is None:
        sums = step.world.sum([*own.values(), *votes])  # sorted by name
        return dict(zip(own, sums, strict=False)), sums[len(own) :]
    views = step.world.gather((step.parts, votes))  # a rank without shards does not even know the names
    totals = exact_totals(part for parts, _ in views for part in parts)
    return totals, [math.fsum(column) for column in zip(*(votes for _, votes in views), strict=True)]


def refuse_nonfinite(step: Step, loss: float, state: TrainState) -> None:
    """Stop because of a loss that is NaN or infinite, unless it is a GradScaler's overflow, which skips the step."""
    # A rank's own buffers may have overflowed while the others' have not, so the ranks must agree.
    if state.scaler is not None and all(step.world.gather(state.is_finite())):
        return
    low, high = step.samples
    raise shared(
        NonFiniteError(
            f"the loss of step {step.number} is {loss} (samples {low} to {high - 1} of epoch {step.epoch}'s "
            "order): training stops, and nothing was snapshotted after it; "
            "a lower learning rate or gradient clipping often helps"
        )
    )


def _few_samples(model: nn.Module, count: int, world: World) -> Any:
    """With fewer than two samples there are no batch statistics: use the running ones."""
    return _running_statistics(model, world) if count < 2 else nullcontext()


@contextmanager
def _running_statistics(model: nn.Module, world: World) -> Iterator[None]:
    """A SyncBatchNorm takes its statistics over all ranks, who would wait for the one that does not take part."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    if world.world_size > 1:
        norms = [norm for norm in norms if not isinstance(norm, nn.SyncBatchNorm)]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def _sync(model: nn.Module, last: bool) -> Any:
    """DDP sums the gradients once a step, in the last micro-batch's backward."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
