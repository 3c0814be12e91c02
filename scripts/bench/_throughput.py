"""What a snapshot every ten steps costs a job of two ranks in all: the stall, and the work of the writing threads.

Blocks of ten steps with a snapshot and without take turns in one job, in the order without, with, with, without, so
that a machine that slowly becomes busier or calmer favours neither. What changes faster than that shows in the second
figure: how much longer a block's first steps take than its last ones. Run under torchrun, this file is the job.
"""

import argparse
import json
import resource
import statistics
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from _stall_jobs import BATCH, Job

from course_lib.engine import open_world, run
from course_lib.lab.launch import job_environment, torchrun_command

RANKS, EVERY, LEAD = 2, 10, 2
FIRST = 4  # steps of a block in which its snapshot may still be written
GLOBAL_BATCH = {"tiny": 64, "resnet34": 256, "gpt": 64}


def throughput(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of each state: a job of two ranks each."""
    results: dict[str, Any] = {}
    for name in options.state or ["resnet34"]:
        run_dir = folder / name
        run_dir.mkdir()
        command = torchrun_command(Path(__file__).resolve(), name, options.blocks, run_dir, ranks=RANKS, max_restarts=0)
        subprocess.run(command, env=job_environment(), check=True)
        blocks = json.loads((run_dir / "blocks.json").read_text())
        results[name] = {"global_batch": GLOBAL_BATCH[name], **figures(blocks)}
        show(name, results[name])
    return {"ranks": RANKS, "steps_a_block": EVERY, "throughput": results}


def figures(measured: dict[str, Any]) -> dict[str, Any]:
    """Throughput with snapshots as a share of that without, and what a snapshot adds to the steps that follow it.

    Each four blocks that follow one another give a ratio; the median of these counts.
    """
    blocks = measured["blocks"]
    wall, cpu, longer = (
        [(block["snapshot"], how_much(block)) for block in blocks]
        for how_much in (lambda block: sum(block["step_s"]), lambda block: block["cpu_s"], excess)
    )
    without, added = middle(wall)["without"], middle(longer)
    return {
        "ratio": ratio(wall),
        "ratio_by_cpu": ratio(cpu),
        "ratio_by_first_steps": round(without / (without + added["with"] - added["without"]), 4),
        "block_s": middle(wall),
        "block_cpu_s": middle(cpu),
        "excess_s": added,
        **measured,
    }


def middle(values: list[tuple[bool, float]]) -> dict[str, float]:
    """The medians of the blocks without a snapshot and of those with one."""
    names = {False: "without", True: "with"}
    return {name: round(statistics.median(v for k, v in values if k is kind), 3) for kind, name in names.items()}


def ratio(values: list[tuple[bool, float]]) -> float:
    """What blocks without a snapshot took, as a share of what their neighbours with one took."""
    fours = [values[first : first + 4] for first in range(0, len(values), 4)]
    sums = [[sum(v for k, v in four if k is kind) for kind in (False, True)] for four in fours]
    return round(statistics.median(without / with_one for without, with_one in sums), 4)


def excess(block: dict[str, Any]) -> float:
    """How many seconds longer the first steps of a block took than as many of the others."""
    steps = block["step_s"]
    return sum(steps[:FIRST]) - FIRST * statistics.median(steps[FIRST:])


def show(name: str, result: dict[str, Any]) -> None:
    """Print the ratios, and what they are made of; medians of the blocks."""
    print(
        f"\n{name}, {RANKS} ranks, global batch {GLOBAL_BATCH[name]}, {len(result['blocks'])} blocks of {EVERY} steps"
    )
    print(f"{'':44} {'without':>8} {'with one':>8} {'throughput':>11}, median of the fours")
    lines = {"block_s": "seconds a block", "block_cpu_s": "CPU seconds a block, all ranks and threads"}
    lines |= {"excess_s": f"seconds that the first {FIRST} steps take longer"}
    for (key, what), ratio in zip(lines.items(), ("ratio", "ratio_by_cpu", "ratio_by_first_steps"), strict=True):
        print(f"{what:44} {result[key]['without']:8.2f} {result[key]['with']:8.2f} {result[ratio]:11.1%}")
    stall, write = (statistics.median(result[key]) for key in ("stall_ms", "written_ms"))
    print(f"stall {stall:.0f} ms, written after {write:.0f} ms")


def job(name: str, blocks: int, run_dir: Path) -> None:
    """Train through all blocks; rank 0 writes down what each took."""
    kinds = [False, True, True, False] * (blocks // 4)
    marks: list[tuple[float, float]] = []
    with open_world("cpu") as world:
        training = Job(name, world, run_dir, LEAD + EVERY * blocks, GLOBAL_BATCH[name])
        for number in range(LEAD + EVERY * blocks):
            block, place = divmod(number - LEAD, EVERY)
            training.step(save=block >= 0 and place == 0 and kinds[block])
            usage = resource.getrusage(resource.RUSAGE_SELF)  # of this process's threads, the writer among them
            marks.append((time.monotonic(), usage.ru_utime + usage.ru_stime))
        training.finish()
        ranks = world.gather(marks[LEAD - 1 :])
    if world.rank == 0:
        *saved, _last = training.saved
        expected = [LEAD + EVERY * number for number, kind in enumerate(kinds) if kind]
        if [event["step"] for event in saved] != expected:
            raise RuntimeError(f"snapshots after the steps {[event['step'] for event in saved]}, not {expected}")
        taken = [_block(ranks, EVERY * number) | {"snapshot": kind} for number, kind in enumerate(kinds)]
        times = {"stall_ms": "stall_s", "written_ms": "write_s"}
        logged = {name: [round(1000 * event[key], 1) for event in saved] for name, key in times.items()}
        (run_dir / "blocks.json").write_text(json.dumps({**logged, "blocks": taken}))


def _block(ranks: list[list[tuple[float, float]]], first: int) -> dict[str, Any]:
    """What the block took whose first step ended at mark `first` + 1: rank 0's clock, and all ranks' CPU time."""
    times = [t for t, _ in ranks[0][first : first + EVERY + 1]]
    cpu = sum(marks[first + EVERY][1] - marks[first][1] for marks in ranks)
    return {"step_s": [round(end - begin, 3) for begin, end in pairwise(times)], "cpu_s": round(cpu, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", choices=sorted(BATCH))
    parser.add_argument("blocks", type=int)
    parser.add_argument("run_dir", type=Path)
    options = parser.parse_args()
    job(options.state, options.blocks, options.run_dir)


if __name__ == "__main__":
    run(main)
