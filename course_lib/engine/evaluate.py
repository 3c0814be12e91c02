"""Evaluation that counts every sample once, whatever the number of ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from course_lib.engine.errors import UsageError
from course_lib.engine.order import share
from course_lib.engine.shards import exact_totals
from course_lib.engine.state import unwrap
from course_lib.engine.tree import map_tensors
from course_lib.engine.world import World, shared


def evaluate(
    model: nn.Module,
    dataset: Dataset[Any],
    world: World,
    totals: Callable[[nn.Module, Any], Mapping[str, float | torch.Tensor]],
    *,
    batch_size: int = 64,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> dict[str, float]:
    """Means over all samples of `dataset` of what `totals(module, batch)` sums up, the same on every rank.

    Each rank takes its share of the batches and the sums and counts are added up, so nothing is padded and no
    mean of means is taken; the result has the same bits at every world size. It runs the inner module: DDP's
    forward broadcasts buffers even in eval mode, and a rank without samples would keep the others waiting. Rank 0's
    buffers must have been broadcast before.
    Raises UsageError for an empty data set.
    """
    size = len(dataset)  # type: ignore[arg-type]  # map-style data sets have a length
    if size == 0:
        raise shared(UsageError("the test set is empty: give a data set with at least one sample"))
    module = unwrap(model)
    modes = [(part, part.training) for part in module.modules()]  # parts may be frozen, each on its own
    module.eval()
    # Whole batches go to the ranks, so that what a batch adds up to is the same at every world size.
    first, last = (batch * batch_size for batch in share(0, -(-size // batch_size), world.rank, world.world_size))
    mine = Subset(dataset, range(first, min(last, size)))
    parts: list[dict[str, float]] = []
    try:
        with torch.no_grad():
            for batch in DataLoader(mine, batch_size=batch_size, collate_fn=collate):
                batch = map_tensors(batch, lambda tensor: tensor.to(world.device))
                parts.append({name: float(value) for name, value in totals(module, batch).items()})
    finally:
        for part, training in modes:
            part.training = training
    sums = exact_totals(part for rank in world.gather(parts) for part in rank)
    return {name: total / size for name, total in sums.items()}
