"""The four progressive scripts: the same training, step for step, and diffs that hold the lesson."""

import difflib
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers import REPO, launch, torchrun, torchrun_env
from jobs import BATCH, EPOCHS, SAMPLES, assert_samples_once, job, losses, report

SCRIPTS = ("single_gpu", "data_parallel", "ddp_spawn", "ddp_torchrun")
# A tail of 220 samples, and 3 ranks don't divide the batch.
COMMON = ("--norm", "group", "--epochs", 1, "--global-batch-size", 256)


@cache
def curve(script: str, dtype: str) -> list[float]:
    """The losses of an epoch of a script."""
    with TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options = [*map(str, COMMON), "--dtype", dtype, "--run-dir", str(run_dir)]
        if script == "ddp_torchrun":
            done = torchrun(*options, script=f"scripts/{script}.py")
        else:
            done = launch([sys.executable, REPO / f"scripts/{script}.py", *options], env=torchrun_env())
        assert done.returncode == 0, done.tail()
        assert_samples_once(run_dir, SAMPLES, 1)
        return losses(run_dir)


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_the_first_two_losses_agree_in_float32(script: str) -> None:
    assert curve(script, "float32")[:2] == pytest.approx(curve("single_gpu", "float32")[:2], abs=1e-5)


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_a_whole_epoch_agrees_in_float64(script: str) -> None:
    assert len(curve(script, "float64")) == 6
    assert curve(script, "float64") == pytest.approx(curve("single_gpu", "float64"), abs=1e-8)


def changed(first: str, second: str) -> int:
    """Lines removed or added between two scripts, indentation and blank lines apart."""
    texts = [
        [line.strip() for line in (REPO / f"scripts/{name}.py").read_text().splitlines() if line.strip()]
        for name in (first, second)
    ]
    return sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in difflib.unified_diff(*texts, n=0))


@pytest.mark.parametrize(
    ("first", "second", "most"),
    [(*SCRIPTS[:2], 25), (*SCRIPTS[1:3], 70), (*SCRIPTS[2:], 60)],
)
def test_the_difference_between_two_scripts_is_the_lesson(first: str, second: str, most: int) -> None:
    assert 0 < changed(first, second) <= most


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_explains_its_options(script: str) -> None:
    assert len((REPO / f"scripts/{script}.py").read_text().splitlines()) < 120
    done = launch([sys.executable, REPO / f"scripts/{script}.py", "--help"], env=torchrun_env())
    assert done.returncode == 0
    for option in ("--data", "--data-root", "--model", "--norm", "--epochs", "--global-batch-size", "--lr", "--fault"):
        assert option in done.output


def test_data_parallel_says_that_a_cpu_has_nothing_parallel(tmp_path: Path) -> None:
    options = ("--epochs", "1", "--global-batch-size", "500", "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    done = launch([sys.executable, REPO / "scripts/data_parallel.py", *options], env=torchrun_env())
    assert done.returncode == 0, done.tail()
    assert "nothing is parallel here" in done.output


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on_where_two_stopped(tmp_path: Path, ranks: int) -> None:
    """No sample is lost or seen twice, and with group norm in float64 the curve stays within 1e-8."""
    exact = ("--dtype", "float64", "--norm", "group")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert job(whole, *exact).returncode == 0
    assert job(parts, *exact, "--fault", "kill:rank=1,step=3").returncode == 1
    done = job(parts, *exact, ranks=ranks)
    assert done.returncode == 0, done.tail()
    assert f"ranks 2 -> {ranks}, the global batch stays {BATCH}" in done.output
    assert_samples_once(parts, SAMPLES, EPOCHS)
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-8)
    assert report(parts)["world_sizes"] == [2, ranks]


def test_loader_workers_change_nothing(tmp_path: Path) -> None:
    options = ("--augment", "--fault", "kill:rank=1,step=4")
    for name, workers in (("none", 0), ("two", 2)):
        done = job(tmp_path / name, *options, "--num-workers", workers, max_restarts=1)
        assert done.returncode == 0, done.tail()
    assert report(tmp_path / "none")["weights_sha256"] == report(tmp_path / "two")["weights_sha256"]
