"""An evaluation counts every sample once, on any number of ranks, and leaves the model as it was."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ranks import fine, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset
from toys import Points, Toy, alone, dropout_net, net

from course_lib.engine import UsageError, World, evaluate


def totals(module: nn.Module, batch: Any) -> Mapping[str, float | Tensor]:
    """How many there are, how many are guessed right by sign, and the sum of the errors."""
    x, y = batch
    scores = module(x)
    return {"count": len(x), "accuracy": ((scores > 0) == (y > 0)).sum(), "error": (scores - y).abs().double().sum()}


def judged(right: list[int]) -> Dataset[Any]:
    """Samples whose accuracy under `given` is what `right` says."""
    return TensorDataset(torch.tensor(right))


def given(module: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": batch[0].sum()}


def evaluated(world: World, size: int, batch_size: int = 4) -> dict[str, float]:
    return evaluate(dropout_net(), Points(size), world, totals, batch_size=batch_size)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_sample_counts_once_on_any_number_of_ranks(ranks: int) -> None:
    """Case D6: a sampler that pads counts samples twice, one that drops leaves some out."""
    alone_ = evaluated(alone(), 21)
    assert alone_["count"] == 1.0  # the mean of the counts: 21 of 21
    for metrics in fine(on_ranks(ranks, evaluated, 21)):
        assert metrics["count"] == 1.0
        assert metrics["accuracy"] == alone_["accuracy"]
        assert metrics["error"] == pytest.approx(alone_["error"], rel=1e-6)


def _judge_and_run_dry(world: World) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    module = net()
    uneven = evaluate(module, judged([1, 1, 1, 0, 0]), world, given)
    again = evaluate(module, judged([1, 1, 1, 0, 0]), world, given)
    return uneven, again, evaluate(module, judged([1]), world, given)


def test_a_mean_is_one_of_samples_and_not_of_ranks() -> None:
    """Case D7: rank 0 has 3 right of 3, rank 1 0 of 2. And a rank without a sample doesn't matter."""
    for uneven, again, single in fine(on_ranks(2, _judge_and_run_dry)):
        assert uneven == again == {"accuracy": 0.6}
        assert single == {"accuracy": 1.0}


def _evaluate_before_and_after_training(world: World) -> tuple[dict[str, float], str]:
    model = DistributedDataParallel(dropout_net())
    evaluate(model, Points(1), world, totals)  # rank 0 alone has a sample
    for _ in range(2):
        model(Points(8).inputs).sum().backward()
    metrics = evaluate(model, Points(21), world, totals)
    return metrics, str(model.training)


def test_a_model_with_buffers_does_not_hang_under_ddp() -> None:
    """Case D8: DDP's forward broadcasts them in eval mode too, so a rank that evaluates alone would wait."""
    (metrics, training), other = fine(on_ranks(2, _evaluate_before_and_after_training))
    assert other == (metrics, training) and training == "True"


@pytest.mark.parametrize("batch_size", [1, 4, 256])
def test_the_batch_size_does_not_matter(batch_size: int) -> None:
    metrics = evaluated(alone(), 21, batch_size)
    assert metrics["count"] == 1.0
    assert metrics["accuracy"] == evaluated(alone(), 21)["accuracy"]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = dropout_net().train(training)
    model[1].eval()  # type: ignore[index]  # a frozen batch norm stays frozen
    modes = [part.training for part in model.modules()]
    seen = []

    def looking(module: nn.Module, batch: Any) -> dict[str, float]:
        seen.append((module.training, torch.is_grad_enabled()))
        return {"x": 1.0}

    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, Points(5), alone(), looking, batch_size=4)
    assert seen == [(False, False)] * 2
    assert [part.training for part in model.modules()] == modes and torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_model_is_left_as_it_was_after_an_error_too() -> None:
    model = dropout_net()
    with pytest.raises(ZeroDivisionError):
        evaluate(model, Points(5), alone(), lambda module, batch: {"x": 1 / 0})
    assert model.training


def test_an_empty_test_set_is_refused() -> None:
    with pytest.raises(UsageError, match="the test set is empty"):
        evaluated(alone(), 0)


def test_an_evaluation_may_draw_random_numbers(tmp_path: Any) -> None:
    """It draws the same ones when it is done again after a death, though the process has another past."""

    def make(name: str) -> Toy:
        draw = lambda: {"noise": torch.rand(())}  # noqa: E731
        return Toy(tmp_path / name, evaluate=draw, snapshot_every=5)

    whole = make("whole").run()
    make("again").run(until=5)  # the snapshot of step 5 is older than the first evaluation
    again = make("again").run()
    history = again.trainer.progress.history
    assert history == whole.trainer.progress.history
    assert len({record["noise"] for record in history}) == 2 and type(history[0]["noise"]) is float
