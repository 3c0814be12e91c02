"""What notebook 05 is made of: flipped bits, forgotten pieces, and stalls."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import test_snapshot_claims
import torch
from torch import nn

from course_lib.engine import TrainState
from course_lib.lab import left_out, one_bit, snapshot_claims, stalls
from course_lib.lab.fallback import flip

one_thread = test_snapshot_claims.one_thread

# --- one bit ------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_loads_silently_and_each_has_its_own_curve(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    one_bit.write_snapshot(good)
    whole = one_bit.train_on(good)
    assert whole == one_bit.train_on(good) and max(whole[-10:]) < min(whole[:1]) and len(whole) == one_bit.AFTER

    def resumed(layer: str, bit: int) -> list[float]:
        bad = tmp_path / "bad.pt"
        shutil.copyfile(good, bad)
        flip(bad, one_bit.find(bad, layer) + bit // 8, bit % 8)
        assert ZipFile(bad).testzip() is not None  # the checksum that torch.load does not look at
        return one_bit.train_on(bad)

    lowest, sign, bomb = resumed("last", 0), resumed("last", 31), resumed("first", 30)
    assert 0 < max(abs(a - b) for a, b in zip(lowest, whole, strict=True)) < 1e-4
    assert sign[0] > 1.2 * whole[0] and abs(sign[-1] - whole[-1]) < 0.1
    assert bomb[:10] == whole[:10] and bomb[10] > 1e30 and math.isnan(bomb[-1])


def test_the_numbers_that_one_bit_makes() -> None:
    made = [one_bit.flipped(0.5, bit) for bit in range(32)]
    assert made[31] == -0.5 and made[23] == 1.0 and made[22] == 0.75 and made[30] > 1e38
    assert sum(abs(value - 0.5) < 0.5 and value > 0.25 for value in made) == 23  # the fraction
    assert sum(0 < value <= 0.125 for value in made) == 6
    assert all(one_bit.flipped(value, bit) == 0.5 for bit, value in enumerate(made))


# --- forgotten pieces ---------------------------------------------------------------------------------------------


def first(mine: list[float], twin: list[float]) -> int | None:
    """The first step after the resume at which two curves are not exactly the same."""
    return next((step for step, (a, b) in enumerate(zip(mine, twin, strict=True)) if a != b), None)


def test_every_forgotten_piece_has_its_fingerprint() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = left_out.uninterrupted()
    found = {piece: left_out.resume_without(piece) for piece in left_out.PIECES}
    prints = {
        piece: (first(run.train, whole.train), first(run.average, whole.average), bool(run.best_written))
        for piece, run in found.items()
    }
    assert prints == {
        "average": (None, 0, False),
        "best value": (None, None, True),
        "plateau counter": (9, 8, False),
        "order's seed": (0, 0, False),
        "nothing missing": (None, None, False),
    }
    assert whole.best_written == []
    assert torch.equal(before, torch.get_rng_state())
    assert sorted(left_out.suspects().values()) == sorted(left_out.PIECES)


# --- stalls -------------------------------------------------------------------------------------------------------


def small_job() -> tuple[TrainState, Callable[[], None]]:
    """A layer that becomes one larger in each step."""
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)

    def step() -> None:
        with torch.no_grad():
            model.weight += 1

    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1)), step


@pytest.mark.parametrize("way", stalls.WAYS)
def test_each_way_writes_the_state_of_the_moment_at_which_it_was_asked(way: str, tmp_path: Path) -> None:
    measured = stalls.measure(way, tmp_path, small_job)
    assert measured.way == way and 0 <= measured.stall_s <= measured.written_s
    assert len(measured.steps) >= 2 * stalls.AROUND
    assert all(end <= begin for (_, end), (begin, _) in zip(measured.steps, measured.steps[1:], strict=False))
    before = sum(end <= 0 for _, end in measured.steps)
    assert before == stalls.AROUND  # those of the save that is shown
    if way != "dcp.async_save":
        saved = tmp_path / "snapshot.pt"
        if way == "torch.save":
            state = torch.load(saved, map_location="cpu", weights_only=True)
        else:
            state = snapshot_claims.restore(tmp_path).content["state"]
        assert state["model"]["weight"].min() == state["model"]["weight"].max() >= 3 * stalls.AROUND


def test_a_recorded_table_says_that_it_is_one(tmp_path: Path) -> None:
    rows = {
        "memcpy": {"stall_ms": {"median": 20.04}, "times_memcpy": 1.0},
        "torch.save": {"stall_ms": {"median": 1234.5}, "times_memcpy": 61.6, "written_ms": {"median": 1234.5}},
    }
    record: dict[str, object] = {"recorded": "today", "command": "python bench.py", "versions": {"torch": "2"}}
    record |= {"stalls": {"resnet34": {"bytes": 170_400_000, "ways": rows}}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    lines = stalls.recorded_table(tmp_path / "record.json").splitlines()
    assert lines[:2] == ["RECORDED today, torch 2", "python bench.py"]
    assert lines[3].split() == ["resnet34,", "170", "MB", "held", "up", "in", "memcpys", "written", "after"]
    assert lines[4].split() == ["memcpy", "20", "ms", "1.0", "-"]
    assert lines[5].split() == ["torch.save", "1,234", "ms", "61.6", "1,234", "ms"]
