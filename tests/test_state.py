"""TrainState: what a snapshot holds, under which names, and how it comes back."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import fine, on_ranks
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from toys import Toy, dropout_net, momentum, net

from course_lib.engine import Best, SnapshotStore, TrainState, UsageError, World, open_world
from course_lib.engine.snapshots.store import open_payload
from course_lib.engine.tree import digest

lr = torch.optim.lr_scheduler


class Inner(nn.Module):
    """A net with a real submodule of the name that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.Linear(4, 8)
        self.rest = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.module(x))  # type: ignore[no-any-return]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "DataParallel": DataParallel,
    "DDP": DistributedDataParallel,
}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one, which DDP asks for."""
    with open_world("cpu"):
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("make", [dropout_net, Inner], ids=["net", "a submodule called module"])
@pytest.mark.parametrize("there", WRAPPERS)
@pytest.mark.parametrize("here", WRAPPERS)
def test_a_snapshot_fits_every_wrapper(tmp_path: Path, there: str, here: str, make: Callable[[], nn.Module]) -> None:
    """Case B6: a wrapper's prefix in the file, or a name that was cut because it looks like one."""
    whole = Toy(tmp_path / "whole", model=make()).run()
    Toy(tmp_path / "run", model=WRAPPERS[there](make())).run(until=8)
    store = SnapshotStore(tmp_path / "run")
    newest = max(store.listing().manifests, key=lambda manifest: manifest.step)
    assert list(open_payload(store.read(newest))["state"]["model"]) == list(make().state_dict())

    again = Toy(tmp_path / "run", model=WRAPPERS[here](make())).run()
    assert sorted(again.losses) == [6, 7, 8, 9]
    assert again.digests() == whole.digests()


def test_the_best_is_what_was_better() -> None:
    best = Best()
    assert [best.update(value) for value in (-5.0, -3.0, -4.0, 0.0, -1.0, math.nan, 0.0)] == [
        *[True, True, False, True],
        *[False] * 3,
    ]
    assert best.value == 0.0
    again = Best()
    again.load_state_dict(best.state_dict())
    assert not again.update(-0.5) and again.update(0.5)

    smallest = Best(larger_is_better=False)
    assert [smallest.update(value) for value in (math.nan, 1.0, 2.0, 0.0, -1.0)] == [False, True, False, True, True]
    assert smallest.update(np.float32(-2.0)) and type(smallest.value) is float  # type: ignore[arg-type]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, float], Any]] = {
    "none": lambda o, peak: None,
    "stairs": lambda o, peak: lr.StepLR(o, 4, 0.5),
    "cosine": lambda o, peak: lr.CosineAnnealingLR(o, 12),
    "lambda": lambda o, peak: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequence": lambda o, peak: lr.SequentialLR(o, [lr.ConstantLR(o, 0.5), lr.ExponentialLR(o, 0.9)], [5]),
    "chain": lambda o, peak: lr.ChainedScheduler([lr.LinearLR(o, 0.1), lr.ExponentialLR(o, 0.9)]),
    "one cycle": lambda o, peak: lr.OneCycleLR(o, peak, total_steps=13),
    "triangle": lambda o, peak: lr.CyclicLR(o, peak / 10, peak, step_size_up=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_changed_learning_rate_keeps_the_schedules_shape(name: str) -> None:
    """Whatever the schedule keeps, in itself or in the optimizer's groups: all of it is scaled."""

    def make(rate: float) -> TrainState:
        model = net()
        optimizer = torch.optim.SGD([{"params": model.parameters(), "lr": rate}], lr=9.0, momentum=0.9)
        return TrainState(model, optimizer, SCHEDULES[name](optimizer, rate))

    def rates(state: TrainState, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            seen.append(state.lr)
            state.update()
        return seen

    old = make(0.1)
    rates(old, 4)
    new = make(0.3)
    changes = new.load_state_dict(old.state_dict())
    assert len(changes) == 1 and changes[0].startswith("learning rate ")
    assert new.load_state_dict(new.state_dict()) == []  # what it saves, it loads without a change
    assert rates(new, 8) == pytest.approx([3 * rate for rate in rates(old, 8)])


def test_each_parameter_group_has_its_own_change() -> None:
    def make(*rates: float) -> TrainState:
        model = net()
        groups = [{"params": [p], "lr": rate} for p, rate in zip(model.parameters(), rates, strict=True)]
        optimizer = torch.optim.SGD(groups, lr=9.0)
        return TrainState(model, optimizer, lr.ExponentialLR(optimizer, 0.5))

    old = make(0.1, 0.2, 0.3, 0.4)
    old.update()
    new = make(0.1, 0.4, 0.3, 0.2)
    assert new.load_state_dict(old.state_dict()) == ["learning rate 0.2 -> 0.4", "learning rate 0.4 -> 0.2"]
    new.update()
    assert [group["lr"] for group in new.optimizer.param_groups] == pytest.approx([0.025, 0.1, 0.075, 0.05])


class Holder:
    """Something with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"value": self.value}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["inner"]["value"]


def test_an_object_that_a_snapshot_cannot_hold_is_refused_by_name() -> None:
    model = net()
    state = TrainState(model, momentum(model), extra={"mine": Holder(object())})
    with pytest.raises(TypeError, match=r"extra\.mine\.inner\.value is a builtins\.object"):
        state.state_dict()


def test_a_missing_weight_is_refused_by_name() -> None:
    model, other = net(), dropout_net()
    with pytest.raises(UsageError, match=r"it lacks model\.1\.bias"):
        TrainState(other, momentum(other)).load_state_dict(TrainState(model, momentum(model)).state_dict())
    with pytest.raises(UsageError, match=r"has model\.1\.bias"):
        TrainState(model, momentum(model)).load_state_dict(TrainState(other, momentum(other)).state_dict())


def test_finite_looks_at_weights_buffers_and_optimizer() -> None:
    model = dropout_net()
    state = TrainState(model, momentum(model))
    model(torch.ones(2, 4)).sum().backward()
    state.update()
    assert state.is_finite()
    buffers = dict(model.named_buffers())
    buffer = state.optimizer.state[next(model.parameters())]["momentum_buffer"]
    for tensor in (next(model.parameters()).data, buffers["1.running_var"], buffer):
        kept = tensor.clone()
        for bad in (math.nan, math.inf):
            tensor.view(-1)[0] = bad
            assert not state.is_finite()
        tensor.copy_(kept)
    assert state.is_finite()


def test_the_digest_sees_every_bit() -> None:
    model = dropout_net()
    state = TrainState(model, momentum(model))
    weights = state.weights_digest()
    dict(model.named_buffers())["1.running_mean"][0] += 1e-7
    assert state.weights_digest() != weights


def with_buffers_of_its_own(world: World) -> tuple[str, str, str]:
    """What a rank's buffers, of every kind, are before and after the broadcast, and its parameters after it."""
    model = dropout_net()
    torch.manual_seed(world.rank)
    buffers = {
        "strided": torch.rand(4, 6).t(),
        "last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "half": torch.rand(3).bfloat16(),
        "mask": torch.rand(5) > 0.5,
        "count": torch.tensor(world.rank),
        "complex": torch.rand(2, dtype=torch.complex64),
        "empty": torch.empty(0),
    }
    for name, buffer in buffers.items():
        model.register_buffer(f"own_{name}", buffer)
    with torch.no_grad():
        next(model.parameters()).fill_(world.rank)
    state = TrainState(model, momentum(model))
    before = digest(dict(model.named_buffers()))
    state.broadcast_buffers()
    after, parameters = digest(dict(model.named_buffers())), digest(dict(model.named_parameters()))
    state.broadcast_parameters()
    assert not next(model.parameters()).any()
    return before, after, parameters


def test_all_ranks_get_the_buffers_of_rank_0_whatever_they_are() -> None:
    first, other = fine(on_ranks(2, with_buffers_of_its_own))
    assert first[0] == first[1] == other[1] != other[0] and first[2] != other[2]
