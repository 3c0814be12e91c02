"""A slow rank is named, whatever it is slow in, and nobody else is."""

import time
from pathlib import Path
from typing import Any

import pytest
from ranks import fine, on_ranks
from torch.nn.parallel import DistributedDataParallel
from toys import Points, Toy, events, momentum, net

from course_lib.engine import World
from course_lib.engine.runlog import RunLog
from course_lib.engine.step import Step
from course_lib.engine.stragglers import WINDOW, Stragglers

SLOW_S = 0.16


class Slow(Points):
    """Each sample takes its time, on the rank that is slow in loading."""

    seconds = 0.0

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Tired(Toy):
    """Rank 1 sleeps in one part of each step."""

    part = ""

    def body(self, step: Step) -> None:
        slow = self.world.rank == 1
        self.optimizer.zero_grad()
        for batch in step:
            inputs, targets = batch.data
            if slow and self.part == "forward":
                time.sleep(SLOW_S)
            loss = (self.model(inputs) - targets).square().mean()
            if slow and self.part == "backward":
                loss.register_hook(lambda grad: time.sleep(SLOW_S))
            batch.backward(loss)
        if slow and self.part == "after":
            time.sleep(SLOW_S)
        self.optimizer.step()


def tired(world: World, run_dir: Path, part: str, shards: int | None) -> list[str]:
    model = net() if shards else DistributedDataParallel(net())
    data = Slow()
    data.seconds = SLOW_S / 4 if part == "loading" and world.rank == 1 else 0.0
    toy = Tired(run_dir, world=world, model=model, dataset=data, epochs=4, virtual_shards=shards, optimizer=momentum)
    toy.part = part
    return toy.run().lines


@pytest.mark.parametrize("shards", [None, 4], ids=["ddp", "shards"])
@pytest.mark.parametrize("part", ["loading", "forward", "backward", "after"])
def test_the_rank_that_all_wait_for_is_named_once(tmp_path: Path, part: str, shards: int | None) -> None:
    lines = fine(on_ranks(2, tired, tmp_path, part, shards))[0]
    told = events(tmp_path, "straggler")
    assert [event["slow_rank"] for event in told] == [1]
    assert told[0]["own_seconds"] > 2 * told[0]["others_seconds"]
    assert [line.split(":")[0] for line in lines if "slow" in line] == ["rank 1 is slow"]


def test_each_rank_logs_its_own_time_and_nobody_is_blamed_for_nothing(tmp_path: Path) -> None:
    fine(on_ranks(2, tired, tmp_path, "", None))
    steps = events(tmp_path, "step")
    assert {event["rank"] for event in steps} == {0, 1}
    assert all(0 < event["own_seconds"] <= event["seconds"] for event in steps)
    assert events(tmp_path, "straggler") == []


def fed(rows: list[list[float]]) -> list[str]:
    """What is said when these own seconds come in, step by step."""
    said: list[str] = []
    here = World(0, 0, len(rows[0]), None)  # type: ignore[arg-type]  # nothing is on a device
    judge = Stragglers(net(), here, RunLog(None), said.append)
    for number, row in enumerate(rows):
        judge.note(number, row)
    return [line.split(":")[0] for line in said]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0.1, 0.1, 0.3]] * WINDOW, ["rank 2 is slow"]),
        ([[0.1, 0.1, 0.3]] * (WINDOW - 1), []),  # not yet
        ([[0.1, 0.1, 0.15]] * WINDOW, []),  # a little slower is no news
        ([[0.001, 0.003]] * WINDOW, []),  # nor are two milliseconds
        ([[0.1, 9.0], [0.1, 0.1], [0.1, 0.1]] * WINDOW, []),  # hiccups
        ([[0.1, 0.1, 0.3]] * 4 * WINDOW, ["rank 2 is slow"]),  # said once
        (([[0.1, 0.1, 0.3]] * WINDOW + [[0.1] * 3] * WINDOW) * 2, ["rank 2 is slow"] * 2),  # and again when it is new
        ([[0.3, 0.1, 0.1, 0.3]] * WINDOW, ["rank 0 is slow", "rank 3 is slow"]),
        ([[0.1]] * WINDOW, []),  # alone
        ([[0.1, 0.0, 0.1, 0.0]] * WINDOW, []),  # two hold no shard
        ([[0.1, 0.0]] * WINDOW, []),
    ],
)
def test_who_is_slow(rows: list[list[float]], said: list[str]) -> None:
    assert fed(rows) == said
