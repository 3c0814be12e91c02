"""What the same bits on any number of ranks cost: a step with `--virtual-shards V` against one of DDP, on two ranks.

Blocks of steps of both kinds take turns in one job, in the order DDP, shards, shards, DDP: a machine that slowly
becomes busier favours neither; the figure is the median over the fours. Two ranks cannot share three shards evenly, so
an odd V has a floor: the rank with more shards does `floor` times its fair part of the work. Under torchrun, this file
is the job.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _stall_jobs import Endless
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import Plan, Position, World, open_world, run
from course_lib.engine.step import Step, steps_from, totals_over_ranks
from course_lib.lab.launch import job_environment, torchrun_command
from course_lib.workloads.data import DataSpec, load
from course_lib.workloads.vision import build_model

RANKS = 2
SHARDS, SAMPLES = (2, 3, 4, 7, 8), (8, 16, 32, 64, 128)
STEPS, LEAD = 4, 2


class Contender:
    """One way to train, a step at a time, on the digits."""

    def __init__(self, world: World, batch: int, shards: int | None, steps: int) -> None:
        data = load(DataSpec("digits", None))
        self._world = world
        self._model: nn.Module = build_model("tiny", "group", data.shape[0], len(data.classes), seed=0)
        if shards is None:
            self._model = DistributedDataParallel(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        samples = Endless(data.train, steps * batch)
        plan = Plan(steps * batch, batch, 0)
        self._steps: Iterator[Step] = steps_from(Position(), 1, samples, plan, world, self._model, shards=shards)

    def block(self, steps: int) -> float:
        """Seconds for so many steps, from a moment when all ranks are here to the next."""
        dist.barrier()
        started = time.monotonic()
        for _ in range(steps):
            step = next(self._steps)
            self._optimizer.zero_grad()
            for batch in step:
                images, labels = batch.data
                batch.backward(cross_entropy(self._model(images), labels))
            self._optimizer.step()
            totals_over_ranks(step, [0.0])
        dist.barrier()
        return time.monotonic() - started


def compare(world: World, shards: int, samples: int, fours: int) -> dict[str, Any]:
    """The ratio of step times for one V and one B/V."""
    batch, steps = shards * samples, LEAD + 2 * STEPS * fours
    ddp, sharded = (Contender(world, batch, kind, steps) for kind in (None, shards))
    for contender in (ddp, sharded):
        contender.block(LEAD)
    taken: list[tuple[float, float]] = []
    for _ in range(fours):
        first, *both, last = ddp.block(STEPS), sharded.block(STEPS), sharded.block(STEPS), ddp.block(STEPS)
        taken.append((first + last, sum(both)))
    ratios = sorted(mine / theirs for theirs, mine in taken)
    share = -(-shards // RANKS)
    return {
        "shards": shards,
        "samples_a_shard": samples,
        "global_batch": batch,
        "ddp_step_ms": round(1000 * statistics.median(t for t, _ in taken) / (2 * STEPS), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "floor": round(share * RANKS / shards, 3),
    }


def worker(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with open_world("cpu", say=lambda text: None) as world:
        rows = [compare(world, v, b, options.fours) for v in options.shards for b in options.samples]
        if world.rank == 0:
            Path(options.out).write_text(json.dumps(rows))


def show(rows: list[dict[str, Any]]) -> None:
    print(f"step time, shards / DDP, {RANKS} ranks (floor: what an uneven share of the shards costs by itself)")
    sizes = sorted({row["samples_a_shard"] for row in rows})
    print(f"{'B/V':>12} " + " ".join(f"{size:>7}" for size in sizes) + "    floor")
    for shards in sorted({row["shards"] for row in rows}):
        mine = {row["samples_a_shard"]: row for row in rows if row["shards"] == shards}
        line = " ".join(f"{mine[size]['ratio']:7.2f}" for size in sizes)
        print(f"{f'V = {shards}':>12} {line} {next(iter(mine.values()))['floor']:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS, help="numbers of shards V")
    parser.add_argument("--samples", type=int, nargs="+", default=SAMPLES, help="samples a shard, B/V")
    parser.add_argument("--fours", type=int, default=6, help="measurements of four blocks each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(*options.shards, *options.samples, options.fours) < 1:
        parser.error("--shards, --samples and --fours take whole numbers from 1 on")
    if "LOCAL_RANK" in os.environ:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        given = ["--fours", options.fours, "--out", out, "--shards", *options.shards, "--samples", *options.samples]
        command = torchrun_command(Path(__file__).resolve(), *given, ranks=RANKS, max_restarts=0)
        subprocess.run(command, env=job_environment(), check=True)
        rows = json.loads(out.read_text())
    show(rows)
    if options.json:
        result = {"versions": {"torch": torch.__version__}, "ranks": RANKS, "model": "tiny", "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run(main) if "LOCAL_RANK" in os.environ else sys.exit(main())
