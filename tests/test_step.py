"""A step: its micro-batches, their weights, and the few samples of a tail."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from toys import Points, Toy, alone, crash_at, dropout_net, events, net

from course_lib.engine import Plan, Position, UsageError, World
from course_lib.engine.step import Step, _few_samples, steps_from


def gradients(split: int | None, size: int = 21) -> list[Tensor]:
    """Of each step in one epoch of batches of 8, in float64."""
    model = net(dtype=torch.float64)
    found: list[Tensor] = []
    data, plan = Points(size, dtype=torch.float64), Plan(size, 8)
    for step in steps_from(Position(), 1, data, plan, alone(), model, max_local_batch=split):
        model.zero_grad()
        for batch in step:
            x, y = batch.data
            assert len(x) == batch.count <= (split or 8)
            batch.backward(mse_loss(model(x), y))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return found


def draws(rank: int, past: int) -> list[float]:
    """What the loop's body draws in each micro-batch of four, in two epochs of two steps, on one of two ranks."""
    world = World(rank, 0, 2, torch.device("cpu"))
    torch.manual_seed(past)
    steps = steps_from(Position(), 2, Points(16), Plan(16, 8), world, net(), max_local_batch=2)
    return [float(torch.rand(())) for step in steps for _ in step]


def test_randomness_depends_on_step_rank_and_micro_batch_alone() -> None:
    first, second = draws(0, past=1), draws(1, past=1)
    assert len(set(first + second)) == 16
    assert first == draws(0, past=2) and second == draws(1, past=2)


@pytest.mark.parametrize("split", [1, 3, 5, 7, 8, 100])
def test_splitting_a_share_does_not_change_the_gradient(split: int) -> None:
    for one, other in zip(gradients(None), gradients(split), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_split_run_resumes_exactly(tmp_path: Path) -> None:
    def make(run_dir: Path) -> Toy:
        return Toy(run_dir, max_local_batch=3)

    assert crash_at(tmp_path / "again", [4, 8], make).digests() == make(tmp_path / "whole").run().digests()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_tiny_data_is_trained_to_the_last_sample(tmp_path: Path, size: int, batch: int) -> None:
    """Case H4: with a dropped tail there would be no step at all, and no error."""
    toy = Toy(tmp_path, dataset=Points(size), global_batch_size=batch).run()
    seen = [sample for event in events(tmp_path, "step") for sample in range(*event["samples"])]
    assert seen == [*range(size)] * 2
    assert len(toy.losses) == 2 * math.ceil(size / batch)


def test_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the training set is empty"):
        Toy(tmp_path, dataset=Points(0))


def test_a_last_batch_of_one_sample_passes_batch_norm(tmp_path: Path) -> None:
    """Case H5: it uses the running statistics, leaves them alone, and counts like any other sample."""
    model = dropout_net()
    seen: list[tuple[int, bool, Tensor]] = []
    norm: nn.Module = model[1]  # type: ignore[index]
    norm.register_forward_hook(lambda m, args, out: seen.append((len(args[0]), m.training, m.running_mean.clone())))
    toy = Toy(tmp_path, model=model, dataset=Points(9), global_batch_size=4, epochs=1).run()
    assert [(count, training) for count, training, _ in seen] == [(4, True)] * 3 + [(1, False)]
    assert torch.equal(seen[2][2], seen[3][2])
    assert norm.training
    assert [tuple(event["samples"]) for event in events(tmp_path, "step")] == [(0, 4), (4, 8), (8, 9)]
    assert toy.trainer.progress.history[0]["train_loss"] == pytest.approx(sum(toy.losses.values()) / 9)


def test_a_frozen_or_synchronized_norm_is_left_alone() -> None:
    """The statistics of a SyncBatchNorm are taken by all ranks together: one that leaves out blocks the others."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval(), nn.SyncBatchNorm(2))
    two = World(0, 0, 2, torch.device("cpu"))
    for world, count, training in (
        (alone(), 2, [True, False, True]),
        (alone(), 1, [False, False, False]),
        (two, 1, [False, False, True]),
        (two, 0, [False, False, True]),
    ):
        with pytest.raises(ZeroDivisionError), _few_samples(model, count, world):
            assert [norm.training for norm in model] == training
            raise ZeroDivisionError
        assert [norm.training for norm in model] == [True, False, True]


def test_a_loop_of_ones_own_may_do_its_own_backward(tmp_path: Path) -> None:
    class Own(Toy):
        def body(self, step: Step) -> None:
            self.optimizer.zero_grad()
            for batch in step:
                loss = self.loss(step, batch)
                (loss * batch.weight).backward()  # type: ignore[no-untyped-call]
                batch.add(loss=loss.detach() * batch.count, seen=batch.count)
            self.optimizer.step()

    own = Own(tmp_path / "own", max_local_batch=5).run()
    assert own.digests() == Toy(tmp_path / "toy", max_local_batch=5).run().digests()
    assert all(event["seen"] == 1.0 for event in events(tmp_path / "own", "step"))
