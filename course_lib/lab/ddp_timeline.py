"""When each gradient of a backward pass was ready, and when each bucket's all-reduce began and ended."""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import World

WIDTH, LAYERS, BATCH = 768, 6, 128  # 2.4 MB of gradients a layer
ONE_LAYER_MB, EVERYTHING_MB = 2.0, 1000.0
STEPS = 4  # the last is recorded: DDP rebuilds its buckets after the first one


@dataclass
class Timeline:
    """Times of one backward pass in seconds of the system's monotonic clock, which the ranks of a machine share."""

    gradients: list[tuple[str, float]] = field(default_factory=list)
    buckets: list[dict[str, Any]] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def as_dict(self, start: float) -> dict[str, Any]:
        """The same with times in milliseconds since `start`, for JSON."""

        def ms(t: float) -> float:
            return round((t - start) * 1000, 3)

        return {
            "backward": [ms(t) for t in self.backward],
            "gradients": [[name, ms(t)] for name, t in self.gradients],
            "buckets": [b | {"began": ms(b["began"]), "ended": ms(b["ended"])} for b in self.buckets],
        }


def record_timeline(world: World, bucket_cap_mb: float) -> dict[str, Any]:
    """The fourth step of a small network under DDP with buckets of at most this many MB (2**20 bytes)."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)
    now = Timeline()
    for name, parameter in model.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(_ready, now, name))
    model.register_comm_hook(None, lambda _, bucket: _all_reduce(now, bucket, world.world_size))
    inputs = torch.randn(BATCH, WIDTH)
    for _ in range(STEPS):
        now.gradients, now.buckets = [], []
        loss = model(inputs).square().mean()
        dist.barrier()  # so that both ranks' passes begin together
        begin = time.monotonic()
        loss.backward()
        now.backward = [begin, time.monotonic()]
    start = min(world.gather(now.backward[0]))
    return now.as_dict(start)


def _ready(now: Timeline, name: str, _: torch.Tensor) -> None:
    now.gradients.append((name, time.monotonic()))


def _all_reduce(now: Timeline, bucket: GradBucket, ranks: int) -> torch.futures.Future[torch.Tensor]:
    """What DDP does for a full bucket, plus two looks at the clock: start the sum, and divide when it is there."""
    buffer = bucket.buffer()
    record: dict[str, Any] = {"bytes": buffer.numel() * buffer.element_size(), "gradients": len(bucket.gradients())}
    record["began"] = time.monotonic()
    now.buckets.append(record)
    work = dist.all_reduce(buffer, async_op=True)

    def finish(future: torch.futures.Future[Any]) -> torch.Tensor:
        record["ended"] = time.monotonic()
        mean: torch.Tensor = future.value()[0].div_(ranks)
        return mean

    return work.get_future().then(finish)
