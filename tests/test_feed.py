"""What each rank is fed: the plan's samples, in its order, augmented alike wherever and whenever they are read."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from toys import Points, Toy, crash_at, read_indices

from course_lib.engine import Plan, Position, World
from course_lib.engine.feed import feed, seed_everything
from course_lib.engine.order import share_indices


def world(rank: int, size: int) -> World:
    """A rank without a process group: feeding needs none."""
    return World(rank, 0, size, torch.device("cpu"))


def fed(
    dataset: Dataset[Any], plan: Plan, rank: int = 0, size: int = 1, at: Position | None = None, **options: Any
) -> list[Any]:
    """All that a rank gets in two epochs."""
    return list(feed(dataset, plan, at or Position(), 2, world(rank, size), **options))


def by_sample(plan: Plan, size: int, at: Position, dataset: Points, **options: Any) -> dict[tuple[int, int], Tensor]:
    """The input of each (epoch, index), as whichever rank got it saw it."""
    seen: dict[tuple[int, int], Tensor] = {}
    for rank in range(size):
        keys = share_indices(plan, at, 2, rank, size, options.get("max_local_batch"))
        for names, batch in zip(keys, fed(dataset, plan, rank, size, at, **options), strict=True):
            assert (batch is None) == (not names)
            if batch is not None:
                assert not seen.keys() & set(names)
                seen |= dict(zip(names, batch[0], strict=True))
    return seen


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {}), (3, {"max_local_batch": 2}), (1, {"num_workers": 2}), (2, {"num_workers": 1})],
    ids=["2 ranks", "3 ranks, split", "2 workers", "2 ranks with a worker each"],
)
def test_augmentation_depends_on_seed_epoch_and_sample_alone(size: int, options: dict[str, Any]) -> None:
    """It draws from torch's, numpy's and Python's global generators, which the workers and ranks all seed."""
    plan, data = Plan(21, 8, seed=3), Points(21, augment=True)
    whole = by_sample(plan, 1, Position(), data)
    assert whole.keys() == {(epoch, index) for epoch in range(2) for index in range(21)}
    assert not torch.equal(whole[0, 5], whole[1, 5])
    assert not torch.equal(whole[0, 5] - data.inputs[5], whole[0, 6] - data.inputs[6])

    torch.manual_seed(99)  # whatever happened before
    at = Position(epoch=0, next_sample=8, step=1)
    rest = by_sample(plan, size, at, data, **options)
    assert rest.keys() == whole.keys() - {(0, int(index)) for index in plan.permutation(0)[:8]}
    assert all(torch.equal(value, whole[key]) for key, value in rest.items())

    other = by_sample(Plan(21, 8, seed=4), 1, Position(), data)
    assert not any(torch.equal(value, other[key]) for key, value in whole.items())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_and_dropout_survive_a_death(tmp_path: Path, num_workers: int) -> None:
    def make(run_dir: Path) -> Toy:
        workers = num_workers if run_dir.name == "again" else 0
        return Toy(run_dir, dataset=Points(augment=True), num_workers=workers, max_local_batch=3)

    whole = make(tmp_path / "whole").run()
    assert crash_at(tmp_path / "again", [7], make).digests() == whole.digests()


def test_each_sample_is_read_once_and_not_before_its_turn(tmp_path: Path) -> None:
    record = tmp_path / "record"
    batches = feed(Points(10, record=record), Plan(10, 4), Position(), 1, world(0, 1))
    assert read_indices(record) == []
    order = Plan(10, 4).permutation(0).tolist()
    for stop in (4, 8, 10):
        next(batches)
        assert read_indices(record) == order[:stop]
    with pytest.raises(StopIteration):
        next(batches)


class Pids(Points):
    """Says which process read a sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(os.getpid()), torch.tensor(os.getppid())


def test_the_workers_live_through_all_epochs() -> None:
    batches = fed(Pids(12), Plan(12, 4), num_workers=2)
    assert len(batches) == 6
    assert len({int(pid) for pids, _ in batches for pid in pids}) == 2
    assert {int(parent) for _, parents in batches for parent in parents} == {os.getpid()}


def test_workers_ignore_the_signals_that_stop_training() -> None:
    """A signal to the whole process group would end them before the trainer has stopped in order."""
    batches = feed(Pids(64), Plan(64, 4), Position(), 1, world(0, 1), num_workers=2)
    pids = {int(pid) for _ in range(2) for pid in next(batches)[0]}
    for pid in pids:
        psutil.Process(pid).send_signal(signal.SIGTERM)
        psutil.Process(pid).send_signal(signal.SIGINT)
    rest = list(batches)
    assert len(rest) == 14
    assert {int(pid) for seen, _ in rest for pid in seen} == pids


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_empty_share_is_none(num_workers: int) -> None:
    batches = fed(Points(3), Plan(3, 2), rank=1, size=2, num_workers=num_workers)
    assert [None if batch is None else len(batch[0]) for batch in batches] == [1, None, 1, None]


def test_the_users_own_collation_is_used() -> None:
    batches = fed(Points(5), Plan(5, 3), collate=lambda samples: {"inputs": [x for x, _ in samples]})
    assert [len(batch["inputs"]) for batch in batches] == [3, 2, 3, 2]


def test_seeds_of_any_size_and_sign() -> None:
    """A seed of more than 32 bits must not be cut, as numpy's would be."""
    draws = set()
    for seed in (0, 1, -1, 2**32, 2**63):
        seed_everything(seed, 5)
        draws.add(float(torch.rand(())))
    assert len(draws) == 5


class Plain(Points):
    """Says that it draws nothing."""

    draws = False


def mixed_up(samples: list[Any]) -> Any:
    """A collation that draws: some weights beside the batch, as mixing pictures needs."""
    return torch.rand(2), torch.stack([inputs for inputs, _ in samples])


def test_what_draws_nothing_is_seeded_once_and_so_is_its_collation() -> None:
    plan = Plan(24, 8)
    first = fed(Plain(24), plan, collate=mixed_up)
    torch.manual_seed(99)  # whatever happened before
    at = Position(epoch=0, next_sample=8, step=1)
    again = fed(Plain(24), plan, at=at, collate=mixed_up, num_workers=1)
    assert len(again) == len(first) - 1 == 5
    for (drawn, inputs), (drawn_again, inputs_again) in zip(first[1:], again, strict=True):
        assert torch.equal(drawn, drawn_again) and torch.equal(inputs, inputs_again)
    assert len({float(drawn[0]) for drawn, _ in first}) == 6
