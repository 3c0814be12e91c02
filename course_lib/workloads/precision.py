"""Arithmetic in a shorter floating-point type, and the same bits each time on a GPU."""

import os
import threading
from typing import Any

import torch
from torch import nn

AMP = ("off", "bf16", "fp16")
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(model: nn.Module, amp: str, device_type: str) -> None:
    """Let `model`'s forward pass compute in bf16 or fp16 where that is safe, and give its result back in float32.

    It does so by hooks and not by a wrapper, so that the keys of the state stay as they are and the training loop need
    not know; the weights stay float32. `amp` is off, bf16 or fp16.
    """
    if amp == "off":
        return
    model.to(memory_format=torch.channels_last)  # what convolutions of short types want; only they have 4-d weights
    entered = threading.local()  # DataParallel calls the replicas of a model in threads

    def enter(*_: Any) -> None:
        entered.context = torch.autocast(device_type, _TYPES[amp])
        entered.context.__enter__()

    def leave(_model: nn.Module, _inputs: Any, scores: torch.Tensor | None) -> torch.Tensor | None:
        entered.context.__exit__(None, None, None)
        return scores.float() if scores is not None else None

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def settle(model: nn.Module, device: torch.device, amp: str, deterministic: bool, compiled: bool) -> nn.Module:
    """Put `model` on its device and let it compute there as the options say."""
    if device.type == "cuda" and deterministic:
        be_deterministic()
    model = model.to(device)
    autocast(model, amp, device.type)
    if compiled:
        model.compile()
    return model


def grad_scaler(amp: str, device_type: str) -> torch.amp.GradScaler | None:
    """What keeps small gradients from vanishing in fp16; bf16 has float32's range and needs none."""
    return torch.amp.GradScaler(device_type) if amp == "fp16" else None


def be_deterministic() -> None:
    """Make a GPU give the same bits for the same input each time; an operation that cannot raises RuntimeError.

    Call it before the first product of matrices: that is when cuBLAS reads its variable. (Source: PyTorch's notes on
    reproducibility.)
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
