"""What DDP does on real ranks: a job of a few seconds that records, scene by scene, what each of them saw.

    python -m course_lib.lab.ddp_evidence --run-dir runs/03-evidence

It writes evidence.json, {scene: [what rank 0 saw, what rank 1 saw]}, and each rank its own part into its events, with
which `claims.observed` compares it. The networks are so small that the numbers can be checked by head: `slope()` is
y = w·x with w = 0, and the gradient of the mean of y is the mean of x.
"""

import argparse
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, TCPStore
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from course_lib.engine import RunLog, World, evaluate, open_world, run
from course_lib.engine.order import share
from course_lib.lab.ddp_timeline import EVERYTHING_MB, ONE_LAYER_MB, record_timeline

RANKS = 2
HANG_S = 1.5


def slope() -> nn.Linear:
    """y = w·x for x of shape (N, 1), beginning at w = 0."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


def start(world: World) -> dict[str, Any]:
    """Each rank draws its own first weight; then DDP is wrapped around it."""
    torch.manual_seed(world.rank)
    module = nn.Linear(1, 1, bias=False)
    before = module.weight.item()
    DistributedDataParallel(module)
    return {"before": before, "after": module.weight.item(), "pid": os.getpid()}


def tail(world: World) -> dict[str, float]:
    """The last step of an epoch: the three samples 1, 2 and 9 for two ranks. The true gradient is their mean, 4."""
    samples = torch.tensor([[1.0], [2.0], [9.0]])
    low, high = share(0, 3, world.rank, world.world_size)
    weights = {"plain": 1.0, "weighted": (high - low) * world.world_size / 3}
    gradients = {}
    for name, weight in weights.items():
        model = DistributedDataParallel(slope())
        loss = model(samples[low:high]).mean() * weight
        loss.backward()
        gradients[name] = model.module.weight.grad.item()
    return gradients


def empty(world: World) -> dict[str, float]:
    """One sample, 5, for two ranks: rank 1 has none, and takes part with a stand-in of weight 0."""
    low, high = share(0, 1, world.rank, world.world_size)
    model = DistributedDataParallel(slope())
    loss = model(torch.tensor([[5.0]])).mean() * (high - low) * world.world_size
    loss.backward()
    return {"samples": high - low, "gradient": model.module.weight.grad.item()}


def accumulate(world: World) -> dict[str, Any]:
    """A share of four samples, one micro-batch each: rank 0 has 1, 2, 3, 4 and rank 1 has 5, 6, 7, 8."""
    found: dict[str, Any] = {}
    for name, parts in {"every time": 4, "no_sync": 4, "undivided": 1}.items():
        model, calls = DistributedDataParallel(slope()), [0]
        model.register_comm_hook(calls, _counted)
        for i in range(4):
            quiet = i < 3 and name != "every time"
            with model.no_sync() if quiet else nullcontext():
                loss = model(torch.tensor([[4.0 * world.rank + i + 1]])).mean() / parts
                loss.backward()
        found[name] = {"all-reduces": calls[0], "gradient": model.module.weight.grad.item()}
    return found


def _counted(calls: list[int], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls[0] += 1
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


class TwoHeads(nn.Module):
    """A body and two heads, of which `forward` uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = slope(), slope(), slope()
        nn.init.ones_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(x))
        return scores


def unused(world: World) -> dict[str, Any]:
    """Two steps of a network with a head that nothing uses, as DDP is by default and as it can be asked to be."""
    found: dict[str, Any] = {}
    for name, look in {"default": False, "find_unused_parameters": True}.items():
        model = DistributedDataParallel(TwoHeads(), find_unused_parameters=look)
        found[name] = {"steps": 0, "error": ""}
        try:
            for _ in range(2):
                model.zero_grad()
                model(torch.tensor([[1.0 + 2 * world.rank]])).mean().backward()
                found[name] |= {"gradient": model.module.body.weight.grad.item(), "steps": found[name]["steps"] + 1}
        except RuntimeError as error:
            found[name]["error"] = str(error)
    return found


def buffers(world: World) -> dict[str, float]:
    """The running mean of a batch norm after one step: rank 0 sees 0 and 2, rank 1 sees 10 and 12."""
    model = DistributedDataParallel(nn.BatchNorm1d(1))
    model(torch.tensor([[0.0], [2.0]]) + 10 * world.rank).sum().backward()
    mean = model.module.running_mean
    found = {"after a step": mean.item()}
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return found | {"after a broadcast": mean.item()}


def bypass(world: World) -> dict[str, list[float]]:
    """Three steps through `model(x)`, and three through `model.module(x)`, around which DDP cannot see anything."""
    found = {}
    for name in ("model(x)", "model.module(x)"):
        model = DistributedDataParallel(slope())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        called, found[name] = (model if name == "model(x)" else model.module), [0.0]
        for _ in range(3):
            optimizer.zero_grad()
            called(torch.tensor([[1.0 + 2 * world.rank]])).mean().backward()
            optimizer.step()
            found[name].append(model.module.weight.item())
    return found


def evaluation(world: World) -> dict[str, float]:
    """Five test samples of which 0 and 2 are answered rightly: by a padding sampler's means, and by exact sums."""
    right = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    mine: list[int] = list(DistributedSampler(TensorDataset(right), world.world_size, world.rank, shuffle=False))
    means = world.gather(float(right[mine].mean()))
    exact = evaluate(slope(), TensorDataset(right), world, lambda _, batch: {"accuracy": batch[0].sum()})
    return {"padded": sum(means) / len(means), "exact": exact["accuracy"]}


def hang(world: World) -> dict[str, str]:
    """Rank 1 has no sample left and leaves out its backward; rank 0's all-reduce waits for it."""
    group: Any = dist.new_group()
    model, said = DistributedDataParallel(slope(), process_group=group), "skipped its backward and went on"
    # Only now: a busy machine may take longer than that to make a group.
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=HANG_S))
    if world.rank == 0:
        try:
            model(torch.ones(1, 1)).mean().backward()
        except RuntimeError as error:
            said = str(error).splitlines()[0]
    world.gather(None)  # in the other group, which still works
    return {"said": said}


class Detector(nn.Module):
    """For an exercise: four layers, one of which does not take part. Don't look before you have answered it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.aux, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.norm(self.stem(x)))
        return scores


def second_step_error() -> str:
    """The line of DDP's complaint that matters, of a Detector on a world of one rank in this process."""
    with open_world("cpu"):
        model = DistributedDataParallel(Detector())
        try:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            return next(line for line in str(error).splitlines() if line.startswith("Parameter indices"))
    raise AssertionError("DDP did not complain")


SCENES: dict[str, Callable[[World], Any]] = {
    "start": start,
    "tail": tail,
    "empty": empty,
    "accumulate": accumulate,
    "unused": unused,
    "buffers": buffers,
    "bypass": bypass,
    "evaluation": evaluation,
    "layers": lambda world: record_timeline(world, ONE_LAYER_MB),
    "everything": lambda world: record_timeline(world, EVERYTHING_MB),
    "hang": hang,  # last: it leaves a group behind that nobody can use any more
}


def worker(rank: int, master: tuple[str, int], run_dir: Path) -> None:
    """A rank's process; `run` leaves out the interpreter's own end, in which the hang's group aborts now and then."""
    run(lambda: _play(rank, master, run_dir))


def _play(rank: int, master: tuple[str, int], run_dir: Path) -> None:
    """One rank: all scenes in order, and rank 0 writes down what the ranks saw."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    log = RunLog(run_dir)
    log.open()
    with open_world("cpu", rank=rank, world_size=RANKS, master=master) as world:
        found = {}
        for name, scene in SCENES.items():
            seen = scene(world)
            log("scene", name=name, seen=seen)
            found[name] = world.gather(seen)
            if rank == 0:
                print(f"recorded: {name}", flush=True)
        if rank == 0:
            (run_dir / "evidence.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="where evidence.json goes")
    run_dir = parser.parse_args().run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn(worker, args=(("127.0.0.1", store.port), run_dir), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    run(main)
