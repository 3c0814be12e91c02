"""The trainer on several ranks: one result whatever their number, one snapshot, one decision."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import fine, on_ranks
from test_refused_snapshots import Turned, Turning
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toys import Points, Toy, crash_at, dropout_net, events, net

from course_lib.engine import NonFiniteError, SnapshotError, SnapshotStore, UsageError, World, evaluate
from course_lib.engine.keeper import Keeper
from course_lib.engine.step import MicroBatch, Step
from course_lib.engine.watchdog import StopWatch


def make(world: World, run_dir: Path, model: nn.Module | None = None, kind: type[Toy] = Toy, **given: Any) -> Toy:
    """A process's part of a run: like a new process it has a new DDP, and nobody has asked it to stop."""
    fresh = replace(world, stop=StopWatch())
    return kind(run_dir, world=fresh, model=DistributedDataParallel(model or net()), **given)


def intervals(run_dir: Path) -> list[tuple[int, int, int]]:
    """(epoch, first, end) of each step, in order; every rank must have logged the same ones."""
    by_rank: dict[int, list[tuple[int, int, int]]] = {}
    for event in events(run_dir, "step"):
        by_rank.setdefault(event["rank"], []).append((event["epoch"], *event["samples"]))
    assert all(steps == by_rank[0] for steps in by_rank.values())
    return by_rank[0]


def _whole_and_again(world: World, run_dir: Path, warm_up: bool, deaths: list[int]) -> list[Any]:
    def start(where: Path) -> Toy:
        return make(world, where, dropout_net(), max_local_batch=2)

    without = mock.patch.object(Keeper, "warm_up", lambda keeper, step: iter(()))
    with nullcontext() if warm_up else without:
        whole = start(run_dir / "whole").run()
        again = crash_at(run_dir / "again", deaths, start)
    return [whole.digests(), again.digests(), whole.trainer.progress, again.trainer.progress]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_death_changes_no_bit_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    outcomes = fine(on_ranks(ranks, _whole_and_again, tmp_path, True, [4, 3, 5, 8]))
    for whole, again, progress, progress_again in outcomes:
        assert whole == again == outcomes[0][0]
        assert progress == progress_again == outcomes[0][2]


def test_without_the_throw_away_step_it_would(tmp_path: Path) -> None:
    """The trap: DDP rebuilds its buckets after the first backward, so a fresh process sums in another order.

    If this fails, torch has changed that, and the throw-away step may go.
    """
    outcomes = fine(on_ranks(3, _whole_and_again, tmp_path, False, [5]))
    assert all(whole != again for whole, again, *_ in outcomes)


def _train(world: World, run_dir: Path, size: int, batch: int, split: int | None, dtype: torch.dtype) -> Any:
    data = Points(size, dtype=dtype)
    toy = make(world, run_dir, net(dtype=dtype), dataset=data, global_batch_size=batch, max_local_batch=split).run()
    return toy.state.module.state_dict(), toy.lines


@pytest.mark.parametrize(
    ("ranks", "batch", "split"), [(2, 8, None), (2, 7, None), (3, 7, 2), (4, 5, 1)], ids=["even", "uneven", "3", "4"]
)
def test_the_number_of_ranks_does_not_matter(tmp_path: Path, ranks: int, batch: int, split: int | None) -> None:
    """Case D5: DDP's mean of the ranks' means is not the mean of the samples when their shares differ."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        where = tmp_path / str(dtype)
        single = Toy(
            where / "1",
            model=net(dtype=dtype),
            dataset=Points(40, dtype=dtype),
            global_batch_size=batch,
        ).run()
        outcomes = fine(on_ranks(ranks, _train, where / "n", 40, batch, split, dtype))
        for weights, lines in outcomes:
            for name, expected in single.model.state_dict().items():
                torch.testing.assert_close(weights[name], expected, rtol=0, atol=tolerance)
            assert (lines == []) == (weights is not outcomes[0][0])  # rank 0 alone speaks
        assert f"| global batch {batch} |" in outcomes[0][1][0]
        assert intervals(where / "n") == intervals(where / "1")


@pytest.mark.parametrize("ranks", [2, 4])
def test_tiny_data_on_more_ranks_than_samples(tmp_path: Path, ranks: int) -> None:
    """Case H4."""
    for size in (1, 2, 3):
        where = tmp_path / f"{size}"
        single = Toy(where / "1", model=net(), dataset=Points(size), global_batch_size=4).run()
        for weights, _ in fine(on_ranks(ranks, _train, where / "n", size, 4, None, torch.float32)):
            for name, expected in single.model.state_dict().items():
                torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)
        assert intervals(where / "n") == [(0, 0, size), (1, 0, size)]


class Failing(Toy):
    """Something goes wrong after step 4, on rank 1 alone (`bad` names it)."""

    bad = ""

    def loss(self, step: Step, batch: MicroBatch) -> torch.Tensor:
        loss = super().loss(step, batch)
        broken = step.number == 4 and not step.warmup
        if self.bad == "overflow" and broken:  # on all ranks, as the gradients are shared
            loss = loss * math.inf
        return loss * math.nan if self.bad == "loss" and broken and self.world.rank == 1 else loss

    def body(self, step: Step) -> None:
        super().body(step)
        if step.number == 4 and not step.warmup and self.world.rank == 1:
            with torch.no_grad():
                if self.bad == "drift":
                    next(self.model.parameters()).view(-1)[3] += 1e-7
                if self.bad == "overflow":
                    dict(self.state.module.named_buffers())["1.running_var"][0] = math.inf


def _fail(world: World, run_dir: Path, bad: str) -> None:
    scaler = torch.amp.GradScaler("cpu") if bad == "overflow" else None
    toy = make(world, run_dir, dropout_net(), Failing, scaler=scaler)
    assert isinstance(toy, Failing)
    toy.bad = bad
    toy.run()


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ("loss", NonFiniteError, "the loss of step 4 is nan"),
        ("overflow", NonFiniteError, "the loss of step 4 is inf"),
        ("drift", SnapshotError, "the weights of rank 1 differ from rank 0's after step 5"),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_all_and_is_not_saved(
    tmp_path: Path, bad: str, error: type[Exception], text: str
) -> None:
    outcomes = on_ranks(2, _fail, tmp_path, bad)
    assert [type(outcome) for outcome in outcomes] == [error, error]
    assert all(text in str(outcome) for outcome in outcomes)
    assert [manifest.step for manifest in SnapshotStore(tmp_path).listing().manifests] == [3]


def _turn(world: World, run_dir: Path) -> None:
    make(world, run_dir, kind=Turned, extra={"mine": Turning()}).run()


def test_what_no_snapshot_can_hold_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 alone writes, and the others must not wait for it."""
    outcomes = on_ranks(2, _turn, tmp_path)
    assert [type(outcome) for outcome in outcomes] == [TypeError, TypeError]
    assert all("extra.mine.inner" in str(outcome) for outcome in outcomes)


def _another_batch(world: World, run_dir: Path) -> None:
    make(world, run_dir).run(until=4)
    make(world, run_dir, global_batch_size=16).run()


def test_a_refusal_reaches_all_ranks(tmp_path: Path) -> None:
    outcomes = on_ranks(2, _another_batch, tmp_path)
    assert [type(outcome) for outcome in outcomes] == [UsageError, UsageError]
    assert all("global batch size 8 there, 16 here" in str(outcome) for outcome in outcomes)


def _part(world: World, run_dir: Path, until: int | None) -> tuple[dict[int, float], list[str]]:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    given: dict[str, Any] = {"global_batch_size": 12, "snapshot_every": 1, "schedule": schedule}
    toy = make(world, run_dir, dataset=Points(40), **given).run(until)
    return toy.lrs, toy.lines


def test_another_number_of_ranks_goes_on_where_the_old_one_was(tmp_path: Path) -> None:
    """Case G6: steps, learning rate and samples are the run's, and not a rank's."""
    fine(on_ranks(4, _part, tmp_path, 2))
    (lrs, lines), _ = fine(on_ranks(2, _part, tmp_path, None))
    assert lrs == pytest.approx({step: 0.05 * 0.9**step for step in range(2, 8)})
    assert "changed at this resume: ranks 4 -> 2, the global batch stays 12" in lines
    expected = [(epoch, low, min(low + 12, 40)) for epoch in range(2) for low in range(0, 40, 12)]
    ranks_0 = [event for event in events(tmp_path, "step") if event["rank"] == 0]
    assert [(event["epoch"], *event["samples"]) for event in ranks_0] == expected
    assert [event["world_size"] for event in ranks_0] == [4] * 2 + [2] * 6


def _count(module: nn.Module, batch: Any) -> dict[str, float]:
    module(batch[0])
    return {"count": len(batch[0])}


def _norm_and_tail(world: World, run_dir: Path) -> list[dict[str, Any]]:
    def check() -> dict[str, float]:
        return evaluate(toy.model, Points(9), world, _count)

    toy = make(world, run_dir, dropout_net(), dataset=Points(9), global_batch_size=4, evaluate=check)
    return toy.run().trainer.progress.history


def test_a_tail_of_one_sample_with_batch_norm(tmp_path: Path) -> None:
    """Case H5: nine samples in batches of four leave one, which rank 1 has no part of."""
    first, second = fine(on_ranks(2, _norm_and_tail, tmp_path))
    assert first == second and [record["count"] for record in first] == [1.0, 1.0]
    assert intervals(tmp_path) == [(epoch, low, min(low + 4, 9)) for epoch in range(2) for low in (0, 4, 8)]
