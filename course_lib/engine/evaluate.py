"""Evaluation that counts every sample once, whatever the number of ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from course_lib.engine.errors import UsageError
from course_lib.engine.order import share
from course_lib.engine.state import unwrap
from course_lib.engine.tree import map_tensors
from course_lib.engine.world import World, shared


def evaluate(
    model: nn.Module,
    dataset: Dataset[Any],
    world: World,
    totals: Callable[[nn.Module, Any], Mapping[str, float | torch.Tensor]],
    *,
    batch_size: int = 256,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> dict[str, float]:
    """Means over all samples of `dataset` of what `totals(module, batch)` sums up, the same on every rank.

    Each rank takes its share of the samples and the sums and counts are added up, so nothing is padded and no
    mean of means is taken. It runs the inner module: DDP's forward broadcasts buffers even in eval mode, and a
    rank without samples would keep the others waiting. Rank 0's buffers must have been broadcast before.
    Raises UsageError for an empty data set.
    """
    size = len(dataset)  # type: ignore[arg-type]  # map-style data sets have a length
    if size == 0:
        raise shared(UsageError("the test set is empty: give a data set with at least one sample"))
    module = unwrap(model)
    modes = [(part, part.training) for part in module.modules()]  # parts may be frozen, each on its own
    module.eval()
    sums: dict[str, float] = {}
    mine = Subset(dataset, range(*share(0, size, world.rank, world.world_size)))
    try:
        with torch.no_grad():
            for batch in DataLoader(mine, batch_size=batch_size, collate_fn=collate):
                batch = map_tensors(batch, lambda tensor: tensor.to(world.device))
                for name, value in totals(module, batch).items():
                    sums[name] = sums.get(name, 0.0) + float(value)
    finally:
        for part, training in modes:
            part.training = training
    # A rank without samples doesn't know the names.
    names = sorted(set().union(*world.gather(set(sums))))
    return dict(zip(names, (s / size for s in world.sum([sums.get(name, 0.0) for name in names])), strict=True))
