"""What can only be seen on a GPU; `scripts/bench/gpu_check.py` runs these and measures beside them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPO, launch, torchrun_env
from jobs import SHORT, assert_same_result, job, losses, report

from course_lib.engine import UsageError
from course_lib.engine.place import choose_device
from course_lib.engine.tree import HostCopy, digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")

MODES = {
    "float32": (),
    "bf16": ("--amp", "bf16"),
    "fp16": ("--amp", "fp16"),
    "augmented, two loader workers": ("--augment", "--num-workers", 2),
    "virtual shards": ("--virtual-shards", 4, "--norm", "group"),
    "compiled": ("--compile",),
    "ResNet-18": ("--model", "resnet18", "--amp", "bf16"),
}


@pytest.mark.parametrize("mode", list(MODES))
def test_a_killed_job_ends_with_the_bits_of_an_undisturbed_one(mode: str, tmp_path: Path) -> None:
    options = ("--device", "cuda", *MODES[mode])
    calm = job(tmp_path / "calm", *options, ranks=1)
    assert calm.returncode == 0, calm.tail()
    killed = job(tmp_path / "killed", *options, "--fault", "kill:step=3", ranks=1, max_restarts=1)
    assert killed.returncode == 0, killed.tail()
    reference = report(tmp_path / "calm") | {"losses": losses(tmp_path / "calm")}
    assert assert_same_result(tmp_path / "killed", reference)["generations"] == 2


def test_a_rank_that_is_stopped_is_found_and_replaced(tmp_path: Path) -> None:
    """The guard's process was forked from one that had met the GPU; it must be able to end it all the same."""
    options = ("--device", "cuda", "--collective-timeout", 5, "--fault", "hang:how=stop,rank=0,step=3")
    done = job(tmp_path, *options, ranks=1, max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert report(tmp_path)["generations"] == 2


def test_a_gpu_that_is_out_of_memory_costs_one_restart(tmp_path: Path) -> None:
    done = job(tmp_path, "--device", "cuda", "--fault", "oom:step=3", ranks=1, max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert "OutOfMemoryError" in done.output
    assert report(tmp_path)["generations"] == 2


def test_preemption_publishes_a_snapshot(tmp_path: Path) -> None:
    done = job(tmp_path, "--device", "cuda", "--fault", "sigterm:step=3", ranks=1)
    assert done.returncode == 1, done.tail()
    assert "stopped as asked after 4 steps, with a snapshot" in done.output
    again = job(tmp_path, "--device", "cuda", ranks=1)
    assert again.returncode == 0, again.tail()
    assert report(tmp_path)["steps_replayed"] == 0


def test_a_run_moves_between_gpu_and_cpu(tmp_path: Path) -> None:
    """A snapshot knows no device: stopped on the GPU, the job goes on with two ranks on the CPU, and back."""
    assert job(tmp_path, "--device", "cuda", "--fault", "sigterm:step=1", ranks=1).returncode == 1
    on_cpu = job(tmp_path, "--device", "cpu", "--fault", "sigterm:rank=1,step=3", ranks=2)
    assert "ranks 1 -> 2" in on_cpu.output
    assert f"gpu {torch.cuda.get_device_name()} -> none" in on_cpu.output
    done = job(tmp_path, "--device", "cuda", ranks=1)
    assert done.returncode == 0, done.tail()
    assert report(tmp_path)["world_sizes"] == [1, 2, 1]


@pytest.mark.parametrize("script", ["single_gpu", "data_parallel"])
def test_the_first_scripts_use_the_gpu_and_agree(script: str, tmp_path: Path) -> None:
    options = (*map(str, SHORT[:4]), "--device", "cuda", "--norm", "group")
    command = [sys.executable, str(REPO / f"scripts/{script}.py"), *options, "--run-dir", str(tmp_path)]
    done = launch(command, 240, torchrun_env())
    assert done.returncode == 0, done.tail()
    assert "running on cuda" in done.output
    torchrun_dir = tmp_path / "torchrun"
    assert job(torchrun_dir, "--device", "cuda", "--norm", "group", ranks=1).returncode == 0
    pairs = zip(losses(tmp_path), losses(torchrun_dir), strict=True)
    assert max(abs(one - other) for one, other in pairs) < 1e-4


def test_more_ranks_than_gpus_is_refused_or_goes_to_the_cpu() -> None:
    too_many = torch.cuda.device_count() + 1
    device, why = choose_device("auto", 0, too_many)
    assert device.type == "cpu" and f"for {too_many} processes" in why
    with pytest.raises(UsageError, match="needs a GPU for each process"):
        choose_device("cuda", 0, too_many)


def test_a_snapshot_is_copied_into_pinned_memory_and_the_memory_is_used_again() -> None:
    state = {"weights": torch.randn(1000, 100, device="cuda"), "half": torch.ones(7, device="cuda").bfloat16()}
    copy = HostCopy()
    first = copy(state)
    assert all(tensor.is_pinned() and tensor.device.type == "cpu" for tensor in first.values())
    assert digest(first) == digest(state)
    places = [tensor.data_ptr() for tensor in first.values()]
    state["weights"] += 1
    second = copy(state)
    assert [tensor.data_ptr() for tensor in second.values()] == places
    assert digest(second) == digest(state)


def test_a_snapshot_records_the_gpu(tmp_path: Path) -> None:
    done = job(tmp_path, "--device", "auto", ranks=1)
    assert "running on cuda: " in done.output
    manifest = json.loads(sorted((tmp_path / "snapshots").glob("*-step-*.json"))[-1].read_text())
    assert manifest["machine"]["gpu"] == torch.cuda.get_device_name()
