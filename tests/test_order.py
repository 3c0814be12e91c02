"""The order of samples: every one once, whatever the number of ranks, and however often the run dies."""

import hashlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.engine.errors import UsageError
from course_lib.engine.order import Plan, Position, mix, pieces, share, share_indices

Pairs = list[tuple[int, int]]

small = st.integers(1, 40)
worlds = st.integers(1, 9)
local_limits = st.none() | st.integers(1, 7)
seeds = st.integers(-(2**63), 2**63 - 1)
plans = st.builds(Plan, samples=small, global_batch_size=small, seed=seeds)


def ranks(plan: Plan, at: Position, epochs: int, world_size: int, limit: int | None = None) -> list[Iterator[Pairs]]:
    """What each rank's loader is given."""
    return [share_indices(plan, at, epochs, rank, world_size, limit) for rank in range(world_size)]


def one_step(plan: Plan, at: Position, feeds: list[Iterator[Pairs]], limit: int | None) -> list[Pairs]:
    """Each rank's samples of the step at `at`, taken from its feed in as many micro-batches as the step has there."""
    cuts = [pieces(*share(*plan.batch(at), rank, len(feeds)), limit) for rank in range(len(feeds))]
    return [[pair for _ in cut for pair in next(feed)] for cut, feed in zip(cuts, feeds, strict=True)]


def walk(plan: Plan, epochs: int) -> list[Position]:
    """Every position of an uninterrupted run at which a step begins, and the last one."""
    at, found = Position(), []
    while at.epoch < epochs:
        while not plan.epoch_done(at):
            found.append(at)
            at = plan.after_step(at)
        at = plan.next_epoch(at)
    return [*found, at]


def every_sample_once(plan: Plan, epochs: int) -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for epoch in range(epochs) for index in range(plan.samples))


@given(plans, worlds, local_limits)
def test_every_sample_of_every_epoch_counts_once(plan: Plan, world_size: int, limit: int | None) -> None:
    shares = [[pair for batch in feed for pair in batch] for feed in ranks(plan, Position(), 2, world_size, limit)]
    assert Counter(pair for pairs in shares for pair in pairs) == every_sample_once(plan, 2)


@given(plans, worlds, local_limits)
def test_a_step_is_the_next_b_samples_of_the_permutation_on_any_number_of_ranks(
    plan: Plan, world_size: int, limit: int | None
) -> None:
    feeds = ranks(plan, Position(), 2, world_size, limit)
    for at in walk(plan, 2)[:-1]:
        low, high = plan.batch(at)
        expected = [(at.epoch, int(index)) for index in plan.permutation(at.epoch)[low:high]]
        assert [pair for pairs in one_step(plan, at, feeds, limit) for pair in pairs] == expected
        assert len(expected) == plan.global_batch_size or high == plan.samples
    assert [list(feed) for feed in feeds] == [[]] * world_size


@given(st.integers(0, 1000), st.integers(1, 1000), worlds)
def test_shares_differ_by_at_most_one_and_rank_0_has_one_of_the_largest(start: int, size: int, world_size: int) -> None:
    cuts = [share(start, start + size, rank, world_size) for rank in range(world_size)]
    lengths = [high - low for low, high in cuts]
    assert [low for low, _ in cuts] == [start, *(high for _, high in cuts[:-1])] and cuts[-1][1] == start + size
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths) > 0


@given(st.integers(0, 50), st.integers(0, 50), local_limits)
def test_micro_batches_are_the_fewest_that_fit_and_even(start: int, size: int, limit: int | None) -> None:
    cuts = pieces(start, start + size, limit)
    lengths = [high - low for low, high in cuts]
    assert cuts[0][0] == start and cuts[-1][1] == start + size
    assert all(before[1] == after[0] for before, after in zip(cuts, cuts[1:], strict=False))
    assert max(lengths) <= (limit or size) and max(lengths) - min(lengths) <= 1
    assert len(cuts) == (1 if limit is None else max(1, -(-size // limit)))


@given(plans, st.data())
def test_a_resume_reads_what_the_uninterrupted_run_would_have_read(plan: Plan, data: st.DataObject) -> None:
    positions = walk(plan, 3)
    at = data.draw(st.sampled_from(positions))
    world_size = data.draw(worlds)
    for resumed, whole in zip(ranks(plan, at, 3, world_size), ranks(plan, Position(), 3, world_size), strict=True):
        assert list(resumed) == list(whole)[positions.index(at) :]


@given(plans, st.data())
def test_each_sample_counts_once_after_any_crashes_on_any_world_sizes(plan: Plan, data: st.DataObject) -> None:
    """A run that dies at random steps, goes back to a snapshot, and goes on with another number of ranks."""
    epochs = data.draw(st.integers(1, 3), "epochs")
    snapshots = [Position()]  # a position each, oldest first
    trained: dict[int, Pairs] = {}  # the surviving history, by step
    for life in range(20):
        at = data.draw(st.sampled_from(snapshots[-3:]), "resumes at")
        snapshots = snapshots[: snapshots.index(at) + 1]
        trained = {step: pairs for step, pairs in trained.items() if step < at.step}
        # The last life is a long one, or the run would never end.
        left = data.draw(st.integers(0, 12), "steps before the crash") if life < 19 else 10**6
        limit = data.draw(local_limits, "max_local_batch")
        feeds = ranks(plan, at, epochs, data.draw(worlds, "ranks"), limit)
        while at.epoch < epochs and left > 0:
            trained[at.step] = [pair for pairs in one_step(plan, at, feeds, limit) for pair in pairs]
            at, left = plan.after_step(at), left - 1
            at = plan.next_epoch(at) if plan.epoch_done(at) else at
            snapshots += [at] * data.draw(st.booleans(), "snapshot")
        if at.epoch == epochs:
            break
    assert Counter(pair for pairs in trained.values() for pair in pairs) == every_sample_once(plan, epochs)
    assert sorted(trained) == list(range(epochs * plan.steps_per_epoch))


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2, 3, 64])
def test_a_tiny_data_set_is_trained_on_whole(samples: int, world_size: int, batch: int) -> None:
    plan = Plan(samples, batch)
    feeds = [list(feed) for feed in ranks(plan, Position(), 1, world_size)]
    # Every rank takes part in every step, with an empty share where there is nothing for it.
    assert [len(feed) for feed in feeds] == [plan.steps_per_epoch] * world_size
    assert sorted(pair for feed in feeds for part in feed for pair in part) == [(0, i) for i in range(samples)]


@pytest.mark.parametrize(
    ("samples", "batch", "named"), [(0, 4, "training set is empty"), (4, 0, "--global-batch-size")]
)
def test_nothing_to_train_on_is_refused_before_the_first_epoch(samples: int, batch: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Plan(samples, batch)
    with pytest.raises(UsageError, match=named):
        Plan(samples - 1, batch - 1)


@given(st.integers(20, 200), seeds)
def test_epochs_and_seeds_have_orders_of_their_own(samples: int, seed: int) -> None:
    # Two of the 20! orders or more agree by chance once in 2e18.
    plan = Plan(samples, 4, seed)
    orders = [plan.permutation(epoch) for epoch in range(4)] + [Plan(samples, 4, seed ^ 1).permutation(0)]
    assert all(np.array_equal(np.sort(order), np.arange(samples)) for order in orders)
    assert len({order.tobytes() for order in orders}) == len(orders)
    assert np.array_equal(plan.permutation(2), orders[2])


def test_the_order_is_frozen() -> None:
    """A snapshot's position means nothing under another order, so that a change here loses every run under way."""
    assert Plan(8, 4, 0).permutation(0).tolist() == [4, 7, 6, 1, 5, 3, 2, 0]
    assert Plan(8, 4, 0).permutation(1).tolist() == [2, 7, 3, 6, 5, 4, 1, 0]
    assert Plan(10, 4, 42).permutation(7).tolist() == [0, 3, 5, 8, 2, 1, 7, 4, 6, 9]
    assert Plan(5, 4, -1).permutation(3).tolist() == [3, 2, 0, 4, 1]
    whole = Plan(60000, 128, 1234).permutation(29)
    assert whole.dtype == np.int64
    assert (
        hashlib.sha256(whole.astype("<i8").tobytes()).hexdigest()
        == "87399b654f97941825ad606594e00d248e1e0db980c7dd4997730ba092b1e13f"
    )


def test_the_keys_of_the_counter_based_randomness_are_frozen() -> None:
    assert [mix(), mix(0), mix(1), mix(-1), mix(1, 2), mix(2, 1)] == [
        11400714819323198485,
        7960286522194355700,
        13757245211066428519,
        16834447057089888969,
        6028567270101772503,
        3379748236207159976,
    ]


@given(st.lists(seeds, max_size=4), st.lists(seeds, max_size=4))
def test_keys_are_64_bits_and_differ(one: list[int], other: list[int]) -> None:
    assert 0 <= mix(*one) < 2**64
    assert (mix(*one) == mix(*other)) == (one == other)
