"""Virtual shards: the same bits on any number of ranks, and the sum that makes them so."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fine, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toys import Points, Toy, alone, events, net

from course_lib.engine import UsageError, World, evaluate
from course_lib.engine.order import Plan, Position, cuts, share_indices
from course_lib.engine.runlog import read_events
from course_lib.engine.shards import ShardSum, exact_totals
from course_lib.engine.step import Step

SIZES = (1, 2, 3, 4, 5)


class Clipped(Toy):
    """Dropout, augmentation, an unused parameter, clipping by the norm of all gradients, and a short last step."""

    def __init__(self, run_dir: Path, world: World, shards: int, **options: Any) -> None:
        model = net(nn.Dropout(0.3), nn.GroupNorm(2, 8))
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        given = {"dataset": Points(43, augment=True), "global_batch_size": 16, "virtual_shards": shards} | options
        super().__init__(run_dir, world=world, model=model, **given)

    def body(self, step: Step) -> None:
        self.optimizer.zero_grad()
        for batch in step:
            batch.backward(self.loss(step, batch))
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()


def weights_and_losses(world: World, run_dir: Path, shards: int, **options: Any) -> tuple[Any, list[float]]:
    toy = Clipped(run_dir, world, shards, **options).run()
    assert torch.equal(toy.model.get_parameter("unused"), torch.ones(3))
    log = read_events(run_dir)
    return toy.digests(), [e["loss"] for e in log.named("step") if e["rank"] == 0]


@pytest.mark.parametrize("shards", [4, 5, 6, 7])
def test_weights_and_losses_are_the_same_bits_on_one_to_five_ranks(tmp_path: Path, shards: int) -> None:
    """43 samples in steps of 16: the last step has 11, and more ranks than 4 have no shard of 4."""
    (expected,) = fine(on_ranks(1, weights_and_losses, tmp_path / "1", shards))
    for size in SIZES[1:]:
        outcomes = fine(on_ranks(size, weights_and_losses, tmp_path / str(size), shards))
        assert outcomes == [expected] * size


def test_a_tail_smaller_than_the_shards_and_the_ranks(tmp_path: Path) -> None:
    (expected,) = fine(on_ranks(1, small_tail, tmp_path / "1"))
    assert fine(on_ranks(5, small_tail, tmp_path / "5")) == [expected] * 5


def small_tail(world: World, run_dir: Path) -> Any:
    """A last step of 2 samples for 6 shards."""
    return weights_and_losses(world, run_dir, 6, dataset=Points(18, augment=True))


def part_of_a_run(world: World, run_dir: Path, until: int | None) -> Any:
    return Clipped(run_dir, world, 6, snapshot_every=2).run(until).digests()


def test_a_job_that_changes_its_size_at_each_death_ends_with_the_same_bits(tmp_path: Path) -> None:
    """3 → 2 → 3 → 1 → 4 ranks; each dies in the middle of the interval between two snapshots."""
    (expected,) = fine(on_ranks(1, part_of_a_run, tmp_path / "whole", None))
    for size, until in ((3, 1), (2, 3), (3, 4), (1, 5)):
        fine(on_ranks(size, part_of_a_run, tmp_path / "run", until))
    assert fine(on_ranks(4, part_of_a_run, tmp_path / "run", None)) == [expected] * 4
    sizes = {e["generation"]: e["world_size"] for e in events(tmp_path / "run", "snapshot_loaded")}
    assert list(sizes.values()) == [3, 2, 3, 1, 4]


def test_each_sample_is_in_one_shard_and_the_shards_do_not_depend_on_the_ranks() -> None:
    chance = random.Random(0)
    for _ in range(300):
        low, shards = chance.randrange(50), chance.randrange(1, 9)
        high = low + chance.randrange(1, 40)
        whole = cuts(low, high, 0, 1, shards=shards)
        assert whole[0][0] == low and whole[-1][1] == high and all(a[1] == b[0] for a, b in pairwise(whole))
        assert all(stop > start for start, stop in whole) and len(whole) == min(shards, high - low)
        for size in SIZES:
            assert [cut for rank in range(size) for cut in cuts(low, high, rank, size, shards=shards)] == whole


def test_every_sample_of_an_epoch_once_at_every_size() -> None:
    plan = Plan(43, 16)
    for size in SIZES:
        lists = [i for r in range(size) for i in share_indices(plan, Position(), 2, r, size, shards=6)]
        assert Counter(pair for indices in lists for pair in indices) == Counter(
            (epoch, index) for epoch in range(2) for index in range(43)
        )


def summed_in_turn(values: list[Tensor]) -> Tensor:
    """The tree of the module's docstring, written down once more: split after the largest power of two."""
    if len(values) == 1:
        return values[0].clone()
    half = 1 << (len(values) - 1).bit_length() - 1
    return summed_in_turn(values[:half]) + summed_in_turn(values[half:])


@pytest.mark.parametrize("shards", range(1, 18))
def test_the_sum_of_one_rank_is_that_of_the_tree(shards: int) -> None:
    torch.manual_seed(shards)
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))]
    )
    model.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    total = ShardSum(model, alone(), shards)
    grads = [[torch.randn_like(p) * 10 ** random.Random(s).uniform(-6, 6) for p in model] for s in range(shards)]
    for shard, given in enumerate(grads):
        for i, (parameter, grad) in enumerate(zip(model, given, strict=True)):
            parameter.grad = grad.clone() if i != 1 or shard % 2 else None  # every other shard leaves one out
        total.take(shard)
        assert all(p.grad is None for p in model)
    total.finish()
    for i, parameter in enumerate(model):
        given = [g[i] if i != 1 or s % 2 else torch.zeros_like(g[i]) for s, g in enumerate(grads)]
        if i == 1 and shards == 1:
            assert parameter.grad is None  # no shard used it
        else:
            assert parameter.grad is not None and torch.equal(parameter.grad, summed_in_turn(given))


def test_the_gradient_is_that_of_the_global_batch(tmp_path: Path) -> None:
    def make(name: str, **options: Any) -> Toy:
        model = net(dtype=torch.float64)
        return Toy(tmp_path / name, model=model, dataset=Points(43, dtype=torch.float64), epochs=1, **options).run()

    plain, sharded = make("plain", global_batch_size=16), make("sharded", global_batch_size=16, virtual_shards=7)
    for a, b in zip(plain.model.parameters(), sharded.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert plain.losses.keys() == sharded.losses.keys()
    assert max(abs(plain.losses[k] - sharded.losses[k]) for k in plain.losses) < 1e-12


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (lambda: net(nn.BatchNorm1d(8)), {}, "needs a norm without batch statistics: use --norm group"),
        (lambda: nn.DataParallel(net()), {}, "do not wrap the model"),
        (net, {"max_local_batch": 4}, "leave out --max-local-batch"),
    ],
)
def test_what_cannot_have_the_same_bits_is_refused(
    tmp_path: Path, model: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Toy(tmp_path, model=model(), virtual_shards=4, **options)


def wrapped(world: World, run_dir: Path) -> None:
    Toy(run_dir, world=world, model=DistributedDataParallel(net()), virtual_shards=4)


def test_ddp_is_refused(tmp_path: Path) -> None:
    for outcome in on_ranks(2, wrapped, tmp_path):
        assert isinstance(outcome, UsageError) and "DistributedDataParallel" in str(outcome)


@pytest.mark.parametrize("other", [None, 5])
def test_a_snapshot_of_another_number_of_shards_is_refused(tmp_path: Path, other: int | None) -> None:
    Toy(tmp_path, model=net(), virtual_shards=4).run(until=4)
    with pytest.raises(UsageError, match="virtual shards 4 there"):
        Toy(tmp_path, model=net(), virtual_shards=other).run()


def unseeded(world: World, run_dir: Path) -> str:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(world.rank)  # as if each rank had drawn its own
    return Toy(run_dir, world=world, model=model, virtual_shards=4).run().state.weights_digest()


def test_ranks_that_begin_with_other_weights_take_those_of_rank_0(tmp_path: Path) -> None:
    one, other = fine(on_ranks(2, unseeded, tmp_path / "2"))
    assert one == other == Toy(tmp_path / "1", model=net(), virtual_shards=4).run().state.weights_digest()


def test_totals_do_not_depend_on_the_order_of_their_parts() -> None:
    chance = random.Random(0)
    parts = [{"loss": chance.uniform(-1, 1) * 10 ** chance.uniform(-9, 9), "n": 1.0} for _ in range(50)]
    expected = exact_totals(parts)
    for _ in range(20):
        chance.shuffle(parts)
        assert exact_totals(parts) == expected
    assert exact_totals([{"a": 1.0}, {}, {"a": 2.0, "b": 0.5}]) == {"a": 3.0, "b": 0.5}


def mean_loss(world: World) -> dict[str, float]:
    model = net()
    return evaluate(
        model,
        Points(200),
        world,
        lambda module, batch: {"loss": (module(batch[0]) - batch[1]).square().sum()},
        batch_size=16,
    )


def test_an_evaluation_has_the_same_bits_on_one_to_four_ranks() -> None:
    (expected,) = fine(on_ranks(1, mean_loss))
    for size in (2, 3, 4):
        assert fine(on_ranks(size, mean_loss)) == [expected] * size


def steps_done(world: World, run_dir: Path) -> tuple[int, list[int]]:
    toy = Clipped(run_dir, world, 2, dataset=Points(40), global_batch_size=8).run()
    return toy.trainer.progress.position.step, sorted({len(step.parts) for step in toy.yielded})


def test_a_rank_beyond_the_shards_has_no_micro_batch_and_takes_every_step(tmp_path: Path) -> None:
    assert fine(on_ranks(4, steps_done, tmp_path)) == [(10, [1]), (10, [1]), (10, [0]), (10, [0])]
