"""The soak and the table of what virtual shards cost: that their verdicts can be bad ones, and a short run of each."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers import BENCH

Launch = Callable[..., helpers.Completed]


@pytest.fixture
def chaos(bench: Callable[[str], Any]) -> Any:
    return bench("chaos")


def history(steps: int) -> list[dict[str, Any]]:
    """Two generations, the second of which repeats the last step of the first; 15 steps of 100 samples an epoch."""

    def step(number: int, generation: int) -> dict[str, Any]:
        low = number % 15 * 100
        where = {"step": number, "epoch": number // 15, "samples": [low, low + 100]}
        return {"t": 1.0, "event": "step", "rank": 0, "generation": generation, **where}

    return [step(n, 1) for n in range(10)] + [step(n, 2) for n in range(9, steps)]


def test_every_sample_once(chaos: Any) -> None:
    assert chaos.exactly_once(history(40), 40)
    assert chaos.exactly_once(history(40), 33)  # what came after the newest snapshot does not count


@pytest.mark.parametrize(
    "spoil",
    [
        lambda h: h.pop(3),
        lambda h: h.pop(),
        lambda h: h[20].update(samples=[0, 99]),
        lambda h: h[20].update(epoch=5),
    ],
    ids=["a step is missing", "the end is missing", "a sample is missing", "another epoch"],
)
def test_not_every_sample_once(chaos: Any, spoil: Callable[[list[Any]], Any]) -> None:
    events = history(40)
    spoil(events)
    assert not chaos.exactly_once(events, 40)


@pytest.mark.parametrize("command", ["chaos.py --minutes 0", "shards_cost.py --shards 0", "shards_cost.py --fours 0"])
def test_a_number_that_makes_no_sense_is_refused(launch: Launch, command: str) -> None:
    name, *options = command.split()
    done = launch([sys.executable, str(BENCH / name), *options])
    assert done.returncode == 2 and "error: --" in done.output and "Traceback" not in done.output


def test_the_cost_of_shards_is_a_ratio_for_each_size(launch: Launch, tmp_path: Path) -> None:
    options = ["--shards", "2", "3", "--samples", "2", "--fours", "1", "--json", str(tmp_path / "cost.json")]
    done = launch([sys.executable, str(BENCH / "shards_cost.py"), *options])
    assert done.returncode == 0, done.tail()
    rows = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert [(row["shards"], row["global_batch"], row["floor"]) for row in rows] == [(2, 4, 1.0), (3, 6, 1.333)]
    assert all(0 < row["ratio_spread"][0] <= row["ratio"] <= row["ratio_spread"][1] for row in rows)


@pytest.mark.slow
def test_a_short_soak_loses_nothing(launch: Launch, tmp_path: Path) -> None:
    options = ["--minutes", "0.5", "--seed", "3", "--json", str(tmp_path / "soak.json")]
    done = launch([sys.executable, str(BENCH / "chaos.py"), *options], timeout=600)
    assert done.returncode == 0, done.tail()
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["bit_identical"] and result["every_sample_once"] and sum(result["faults"].values()) > 0
