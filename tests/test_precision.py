"""Shorter floating-point types: what they compute in, what stays float32, and that a resume is exact under them."""

from pathlib import Path

import pytest
import torch
from jobs import assert_same_result, job, undisturbed
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from course_lib.engine.state import unwrap
from course_lib.workloads.precision import autocast, grad_scaler


class Spy(nn.Module):
    """Notes the type that its product of matrices comes out in, and fails when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Tensor, fail: bool = False) -> Tensor:
        outputs: Tensor = self.product(inputs)
        self.seen.append(outputs.dtype)
        if fail:
            raise RuntimeError("as asked")
        return outputs


@pytest.mark.parametrize(("amp", "dtype"), [("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_are_short_and_all_that_stays_is_float32(amp: str, dtype: torch.dtype) -> None:
    model = Spy()
    keys = list(model.state_dict())
    autocast(model, amp, "cpu")
    scores = model(torch.ones(2, 4))
    scores.sum().backward()
    assert model.seen == [dtype]
    assert scores.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert list(unwrap(DataParallel(model)).state_dict()) == keys


def test_a_forward_pass_that_fails_leaves_no_autocast_behind() -> None:
    model = Spy()
    autocast(model, "bf16", "cpu")
    with pytest.raises(RuntimeError, match="as asked"):
        model(torch.ones(2, 4), fail=True)
    assert not torch.is_autocast_enabled("cpu")
    assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.float32


def test_only_fp16_has_a_scaler() -> None:
    assert [grad_scaler(amp, "cpu") is not None for amp in ("off", "bf16", "fp16")] == [False, False, True]


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_a_killed_job_ends_with_the_bits_of_an_undisturbed_one(amp: str, tmp_path: Path) -> None:
    """fp16: the scale and the steps until it grows come back with the snapshot."""
    done = job(tmp_path, "--amp", amp, "--fault", "kill:rank=1,step=3", max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert assert_same_result(tmp_path, undisturbed("--amp", amp))["generations"] == 2
    assert undisturbed("--amp", amp)["weights_sha256"] != undisturbed()["weights_sha256"]
    (newest,) = sorted((tmp_path / "snapshots").glob("*-step-00000006.pt"))
    state = torch.load(newest, weights_only=True)["state"]
    assert ("scaler" in state) == (amp == "fp16")
    if amp == "fp16":
        assert state["scaler"]["_growth_tracker"] == 6
    refused = job(tmp_path, "--epochs", 3)
    assert refused.returncode == 1
    assert f"amp {amp} there, off here" in refused.output
