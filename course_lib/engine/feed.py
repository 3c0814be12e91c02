"""Batches for one rank, in the order of the plan, with randomness that needs no memory."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from course_lib.engine.order import Plan, Position, mix, share_indices
from course_lib.engine.watchdog import STOP_SIGNALS, die_with_parent
from course_lib.engine.world import World


def seed_everything(*numbers: int) -> None:
    """Seed Python's, numpy's and torch's global generators with a mix of `numbers`."""
    key = mix(*numbers)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # torch.manual_seed would ask every accelerator backend, which costs 80 microseconds on a CPU.
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(key)


class SeededDataset(Dataset[Any]):
    """`dataset` indexed by (epoch, index), each fetch under random numbers of its own.

    A random augmentation in the data set becomes a pure function of (seed, epoch, index): it survives a restart
    and does not depend on the number of ranks or loader workers, which never need to be told the epoch. A data set
    that draws nothing says so with an attribute `draws = False`, which saves some 7 microseconds a sample; a
    `collate` of the user's own may draw all the same, and is seeded by its first sample.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.seed = seed
        self.draws = type(dataset) is not TensorDataset and getattr(dataset, "draws", True)
        self.collate_draws = collate is not default_collate

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if self.draws:
            return [self._seeded(*key) for key in keys]
        if keys and self.collate_draws:
            seed_everything(self.seed, *keys[0])
        return [self.dataset[index] for _, index in keys]

    def _seeded(self, epoch: int, index: int) -> Any:
        seed_everything(self.seed, epoch, index)
        return self.dataset[index]


class _Lists:
    """The micro-batches' index lists, as an iterable that a DataLoader takes for its batch sampler."""

    def __init__(self, make: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.make()


class _Collate:
    """Collation that lets an empty share through, as None."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else None


def loader_worker(_: int) -> None:
    """What every loader worker does first: leave signals to the trainer, and die with it.

    A signal to the whole process group would otherwise end the workers before the trainer has stopped in order.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(os.getppid())


def feed(
    dataset: Dataset[Any],
    plan: Plan,
    at: Position,
    epochs: int,
    world: World,
    *,
    num_workers: int = 0,
    max_local_batch: int | None = None,
    shards: int | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterator[Any]:
    """The collated micro-batches of this rank from `at` to the end of epoch `epochs` - 1; None for an empty share.

    One loader serves all epochs, so its workers live as long as the run. They read ahead across the epochs; where
    training stands is the trainer's knowledge, not theirs.
    """
    cut = (world.rank, world.world_size, max_local_batch, shards)
    lists = _Lists(lambda: share_indices(plan, at, epochs, *cut))
    loader: DataLoader[Any] = DataLoader(
        SeededDataset(dataset, plan.seed, collate),
        batch_sampler=lists,
        num_workers=num_workers,
        collate_fn=_Collate(collate),
        pin_memory=world.device.type == "cuda",
        worker_init_fn=loader_worker if num_workers else None,
    )
    return iter(loader)
