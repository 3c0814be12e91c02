"""The benchmark of the input pipeline: that its verdict can be a bad one, and a short run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers import BENCH

Launch = Callable[..., helpers.Completed]
SCRIPT = BENCH / "input_pipeline.py"


@pytest.mark.parametrize(("rate", "good"), [(1281.0, True), (1279.0, False)])
def test_the_pipeline_is_compared_with_the_fastest_step(bench: Callable[[str], Any], rate: float, good: bool) -> None:
    steps = {"float32": [9.0, 2.0, 1.0], "bf16": [1.0, 1.0, 1.0]}  # 128 and 256 samples a second
    read = {0: [(rate, 5.0)] * 3, 2: [(1e6, 40.0), (5000.0, 10.0), (1.0, 10.0)]}
    result = bench("input_pipeline").figures(steps, read)
    assert result["consumed_a_second"] == {"float32": 128.0, "bf16": 256.0}
    assert result["at least 5 x"] is good
    assert [row["cpu"]["bf16"] for row in result["rows"]] == [0.005, 0.01]
    assert result["rows"][1]["samples_a_second"] == 5000


def test_a_number_that_makes_no_sense_is_refused(launch: Launch) -> None:
    done = launch([sys.executable, SCRIPT, "--rounds", "0"], env=helpers.torchrun_env())
    assert (done.returncode, done.output.count("\n")) == (2, 1) and "--rounds" in done.output


@pytest.mark.slow
def test_a_short_run(launch: Launch, tmp_path: Path) -> None:
    few = ("--pictures", "300", "--rounds", "1", "--batches", "5", "--json", tmp_path / "out.json")
    done = launch([sys.executable, SCRIPT, *few], env=helpers.torchrun_env({"TMPDIR": str(tmp_path)}))
    assert done.returncode == 0, done.tail()
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["pictures"] == 300 and [row["workers"] for row in result["rows"]] == [0, 1, 2]
    assert set(result["start_s"]) == {"decode into memory", "make the file", "prepare and load with the file"}
    assert not list(tmp_path.glob("input-pipeline-*"))
