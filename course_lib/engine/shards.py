"""The same bits on any number of ranks: the gradients of virtual shards, summed in a tree that no world size changes.

Floating-point addition is not associative, so DDP's mean over 2 ranks and over 3 ranks differ in their last bits. Here
the global batch is cut into `shards` parts whose samples and randomness depend on nothing but the step. A rank works
through a run of neighbouring shards, adds up the subtrees that are wholly its own, and only their roots travel.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from course_lib.engine.errors import UsageError
from course_lib.engine.order import share
from course_lib.engine.world import World

Flats = list[torch.Tensor]  # one flat tensor for each type of parameter


def refuse_unfit(model: nn.Module, max_local_batch: int | None) -> None:
    """Raise UsageError for what cannot have the same bits at every world size."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise UsageError("--virtual-shards sums the gradients itself: do not wrap the model in DistributedDataParallel")
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise UsageError("--virtual-shards needs a norm without batch statistics: use --norm group")
    if max_local_batch is not None:
        raise UsageError("--virtual-shards sets the size of a micro-batch: leave out --max-local-batch")


class ShardSum:
    """The sum of all shards' gradients of one step, taken up shard by shard and left in `.grad` on every rank."""

    def __init__(self, model: nn.Module, world: World, shards: int) -> None:
        """`shards` is the number of those that are not empty in this step."""
        self._world = world
        self._shards = shards
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._used = torch.zeros(len(self._parameters))
        self._sums: dict[tuple[int, int], Flats] = {}  # the finished subtrees, in order
        self._clear()

    def take(self, shard: int) -> None:
        """Move the gradients that `shard` has left, and add them to those of its neighbours in the tree."""
        self._used += torch.tensor([float(p.grad is not None) for p in self._parameters])
        low, high, flats = shard, shard + 1, self._flatten()
        self._clear()
        while (left := next(reversed(self._sums), None)) is not None and _siblings(left, (low, high), self._shards):
            flats = _add(self._sums.pop(left), flats)
            low = left[0]
        self._sums[low, high] = flats

    def finish(self) -> None:
        """Exchange the roots, and set `.grad` to the sum. A parameter that no shard used keeps none."""
        flats = self._reduce(0, self._shards)
        if self._world.world_size > 1:
            flats = flats or self._flatten()
            for flat in flats:
                dist.broadcast(flat, src=0)
            dist.all_reduce(self._used)
        assert flats is not None
        pieces = {flat.dtype: flat for flat in flats}
        for parameter, used in zip(self._parameters, self._used.tolist(), strict=True):
            flat = pieces[parameter.dtype]
            pieces[parameter.dtype] = flat[parameter.numel() :]
            parameter.grad = flat[: parameter.numel()].view_as(parameter) if used else None

    def _reduce(self, low: int, high: int) -> Flats | None:
        """The sum over [low, high) on the rank that owns `low`, None elsewhere; all ranks walk the same tree."""
        if (low, high) in self._sums or high - low == 1:
            return self._sums.pop((low, high), None)
        middle = _middle(low, high)
        left, right = self._reduce(low, middle), self._reduce(middle, high)
        mine, theirs = self._owner(low), self._owner(middle)
        if mine == theirs:
            return _add(left, right) if left is not None and right is not None else None
        if right is not None:
            for flat in right:
                dist.send(flat, dst=mine)
        if left is not None:
            other = [torch.empty_like(flat) for flat in left]
            for flat in other:
                dist.recv(flat, src=theirs)
            return _add(left, other)
        return None

    def _owner(self, shard: int) -> int:
        size = self._world.world_size
        return next(r for r in range(size) if shard < share(0, self._shards, r, size)[1])

    def _flatten(self) -> Flats:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        kinds = dict.fromkeys(grad.dtype for grad in grads)
        return [torch.cat([grad.reshape(-1) for grad in grads if grad.dtype == kind]) for kind in kinds]

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _middle(low: int, high: int) -> int:
    """Where the tree parts [low, high): after the largest power of two that is smaller than the whole."""
    return low + (1 << (high - low - 1).bit_length() - 1)


def _siblings(left: tuple[int, int], right: tuple[int, int], shards: int) -> bool:
    """Whether the two intervals are the halves of a node of the tree over `shards` leaves."""
    low, high = 0, shards
    while (low, high) != (left[0], right[1]):
        middle = _middle(low, high)
        low, high = (low, middle) if left[0] < middle else (middle, high)
        if high - low < right[1] - left[0]:
            return False
    return left[1] == right[0] == _middle(low, high)


def _add(left: Flats, right: Flats) -> Flats:
    for a, b in zip(left, right, strict=True):
        a.add_(b)
    return left


def exact_totals(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """The sum of each name over all parts, rounded once (Shewchuk 1997), so that their order plays no part."""
    parts = list(parts)
    names = sorted(set().union(*parts))
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in names}
