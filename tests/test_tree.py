"""Nests of tensors: digests that notice everything, and values that the safe loader opens again."""

import argparse
import datetime
import enum
import io
import math
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.engine.tree import all_finite, digest, leaves, map_tensors, portable

Pair = namedtuple("Pair", "left right")


@dataclass
class Config:
    width: int
    folder: Path
    inner: Any = field(default_factory=dict)


class Colour(enum.IntEnum):
    RED = 1


def reopened(value: Any) -> Any:
    """`value` through a file, as a snapshot goes: made portable, saved, and opened by the safe loader."""
    buffer = io.BytesIO()
    torch.save({"value": portable(value, "value")}, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=True)["value"]


def same(one: Any, other: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


STATE: dict[str, Any] = {"weight": torch.arange(6.0).reshape(2, 3), "nested": {"steps": [1, torch.tensor(2)]}}

OTHERS = {
    "name": {"weights": STATE["weight"], "nested": STATE["nested"]},
    "dtype": STATE | {"weight": STATE["weight"].double()},
    "dtype of the same bytes": STATE | {"weight": STATE["weight"].view(torch.int32)},
    "shape": STATE | {"weight": STATE["weight"].reshape(3, 2)},
    "order of the values": STATE | {"weight": STATE["weight"].flip(0)},
    "plain value": STATE | {"nested": {"steps": [2, torch.tensor(2)]}},
    "type of a plain value": STATE | {"nested": {"steps": [1.0, torch.tensor(2)]}},
    "another entry": STATE | {"bias": torch.zeros(0)},
    "a missing entry": {"weight": STATE["weight"]},
}


@pytest.mark.parametrize("difference", OTHERS)
def test_a_digest_notices(difference: str) -> None:
    assert digest(OTHERS[difference]) != digest(STATE)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.data())
def test_a_digest_notices_a_single_bit_of_any_dtype(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = torch.arange(size).to(dtype)
    flipped = tensor.clone()
    raw = flipped.view(torch.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest({"x": tensor}) != digest({"x": flipped})
    assert digest({"x": tensor}) == digest({"x": tensor.clone()})


def test_a_digest_does_not_depend_on_order_memory_layout_or_gradients() -> None:
    turned = dict(reversed(list(STATE.items())))
    assert digest(turned) == digest(STATE)
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest({"x": matrix.t().contiguous().t()}) == digest({"x": matrix})
    assert digest({"x": torch.arange(12.0)[::2]}) == digest({"x": torch.arange(0, 12.0, 2)})
    assert digest({"x": torch.nn.Parameter(matrix)}) == digest({"x": matrix})


def test_a_digest_tells_zeros_and_nans_apart_by_their_bits() -> None:
    assert digest({"x": torch.tensor([0.0])}) != digest({"x": torch.tensor([-0.0])})
    assert digest({"x": torch.tensor([float("nan")])}) == digest({"x": torch.tensor([float("nan")])})


def test_buffers_are_in_the_digest_of_a_model() -> None:
    norm = torch.nn.BatchNorm1d(2)
    before = digest(norm.state_dict())
    norm.get_buffer("running_mean")[0] += 1
    assert digest(norm.state_dict()) != before


def test_the_digest_is_frozen() -> None:
    """Digests of reports and snapshots are compared across versions of this code."""
    tree = {"b": torch.tensor([1, 2], dtype=torch.bfloat16), "a": [1, {"c": torch.zeros((), dtype=torch.bool)}]}
    assert digest(tree) == "38a3bfff2e63ec19fe699a7437265e5af82a1a321a985a177d6ab4b0e2aeb7ef"


def test_leaves_have_names_and_map_keeps_the_structure() -> None:
    tree: dict[str, Any] = {"b": (1, torch.ones(1)), "a": Pair(torch.ones(2), [None])}
    assert [name for name, _ in leaves(tree)] == ["a.0", "a.1.0", "b.0", "b.1"]
    doubled = map_tensors(tree, lambda tensor: tensor * 2)
    assert same(doubled, {"b": (1, torch.full((1,), 2.0)), "a": Pair(torch.full((2,), 2.0), [None])})
    assert torch.equal(tree["b"][1], torch.ones(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_all_finite_looks_at_every_tensor(bad: float, dtype: torch.dtype) -> None:
    tree: dict[str, Any] = {
        "steps": torch.tensor([2**62]),
        "mask": torch.tensor([True]),
        "x": [torch.ones(3, dtype=dtype)],
    }
    assert all_finite(tree)
    tree["x"][0][1] = bad
    assert not all_finite(tree)


PLAIN = [None, True, 3, 2**200, 0.1, float("inf"), 1 + 2j, "text", b"bytes", torch.float16, torch.device("cuda", 1)]

CONFIG_AS_DICT = {"width": 3, "folder": "a", "inner": {"width": 4, "folder": "b", "inner": {}}}
TORCH_STATE = torch.Generator().manual_seed(1).get_state()

CONVERTED = {
    "numpy float": (np.float32(0.5), 0.5),
    "numpy integer": (np.int64(7), 7),
    "numpy bool": (np.bool_(True), True),
    "numpy text": (np.str_("text"), "text"),
    "numpy array": (np.arange(3), torch.arange(3)),
    "numpy array backwards": (np.arange(3)[::-1], torch.tensor([2, 1, 0])),
    "numpy array of another byte order": (np.arange(3, dtype=">i8"), torch.arange(3)),
    "path": (Path("a") / "b", "a/b"),
    "data class": (Config(3, Path("a"), Config(4, Path("b"))), CONFIG_AS_DICT),
    "defaultdict": (defaultdict(list, {"a": [1]}), {"a": [1]}),
    "ordered dict": (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    "counter": (Counter(a=2), Counter(a=2)),
    "set": ({1, 2}, {1, 2}),
    "frozenset": (frozenset([1]), {1}),
    "named tuple": (Pair(1, [2]), (1, [2])),
    "python's random state": (random.Random(1).getstate(), random.Random(1).getstate()),
    "torch's random state": (TORCH_STATE, TORCH_STATE),
    "parameter": (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
    "key of numpy": ({np.int64(3): 1}, {3: 1}),
}


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_as_they_are(value: object) -> None:
    assert same(reopened(value), value)


@pytest.mark.parametrize("kind", CONVERTED)
def test_what_has_a_plain_equal_is_converted(kind: str) -> None:
    value, expected = CONVERTED[kind]
    assert same(reopened(value), expected)
    assert same(reopened({"deep": [value]}), {"deep": [expected]})


def test_the_random_states_of_all_three_libraries_can_be_restored() -> None:
    python, numpy, torch_one = random.Random(5), np.random.RandomState(5), torch.Generator().manual_seed(5)
    saved = reopened({"python": python.getstate(), "numpy": numpy.get_state(), "torch": torch_one.get_state()})
    drawn = python.random(), numpy.random_sample(), torch.rand(1, generator=torch_one)
    python.setstate(saved["python"])
    numpy.set_state(saved["numpy"])
    torch_one.set_state(saved["torch"])
    assert (python.random(), numpy.random_sample(), torch.rand(1, generator=torch_one)) == drawn


REFUSED = {
    "deque": deque([1]),
    "datetime": datetime.datetime(2020, 1, 1),
    "namespace": argparse.Namespace(a=1),
    "function": lambda: None,
    "class": Config,
    "enum": Colour.RED,
    "lock": threading.Lock(),
    "numpy array of objects": np.array([object()]),
    "numpy array of text": np.array(["text"]),
    "numpy date": np.datetime64("2020-01-01T00:00:00"),
    "numpy long double": np.longdouble(1),
    "numpy generator": np.random.default_rng(0),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_at_the_save_with_its_name(kind: str) -> None:
    value = REFUSED[kind]
    with pytest.raises(TypeError, match=r"^extra\.best\.history\.1 is a "):
        portable({"best": {"history": [0, value]}}, "extra")
    with pytest.raises(TypeError, match=r"^extra\.inner is a "):
        portable(Config(1, Path(), value), "extra")


def test_a_portable_copy_of_an_array_is_its_own() -> None:
    array = np.zeros(2)
    copy = portable(array, "x")
    array[0] = 1
    assert copy.tolist() == [0, 0]


def test_states_of_optimizers_schedulers_and_scalers_survive_the_file() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    scaler = torch.amp.GradScaler("cpu")
    for part in (model, optimizer, schedule, scaler):
        before, file = digest(part.state_dict()), reopened(part.state_dict())
        assert digest(file) == before
        part.load_state_dict(file)
        assert digest(part.state_dict()) == before
    assert isinstance(schedule.state_dict()["milestones"], Counter)


def test_finite_numbers_whose_sum_is_not_are_finite() -> None:
    assert all_finite([torch.full((4,), 3e38), torch.full((9,), 60000.0, dtype=torch.float16)])
    assert not all_finite(torch.tensor([math.inf, -math.inf]))
