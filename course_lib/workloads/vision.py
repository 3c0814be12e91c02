"""Residual networks for 32x32 images: a tiny one for laptops, and torchvision's ResNet-18 and -34."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from course_lib.engine.errors import UsageError
from course_lib.workloads.optional import require

MODELS = ("tiny", "resnet18", "resnet34")
NORMS = ("batch", "group")
SCHEDULES = ("cosine", "steps")

# SGD with these takes ``tiny`` to 98 % on the digits with either norm in eight epochs: 3 s on one thread of a 2024
# server.
DEFAULT_LR = 0.05
DEFAULT_BATCH = 64
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
WARMUP_STEPS = 40

MakeNorm = Callable[[int], nn.Module]


def build_model(
    name: str, norm: str, in_channels: int, num_classes: int, seed: int, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A network from images (N, in_channels, 32, 32) to scores (N, num_classes).

    The weights are a function of the arguments alone: they are drawn on the CPU and then converted, so that
    float64 starts from the same numbers; the caller's random state stays as it was.

    Errors: ``UsageError`` for an unknown name or norm, or when torchvision is needed and missing.
    """
    if name not in MODELS:
        raise UsageError(f"--model {name}: no such model; choose one of {', '.join(MODELS)}")
    if norm not in NORMS:
        raise UsageError(f"--norm {norm}: no such normalisation; choose one of {', '.join(NORMS)}")
    make_norm = nn.BatchNorm2d if norm == "batch" else group_norm
    # Only the CPU's generator is touched: torch.manual_seed would reseed every GPU's as well.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if name == "tiny":
            return TinyResNet(in_channels, num_classes, make_norm).to(dtype)
        return _resnet(name, in_channels, num_classes, make_norm).to(dtype)


def group_norm(channels: int) -> nn.GroupNorm:
    """Group normalisation with 32 groups (Y. Wu and K. He, Group Normalization, 2018), or of 4 channels each.

    Small groups matter in a narrow network: with 8 channels each, ``tiny`` learns the digits less well.
    """
    return nn.GroupNorm(min(32, channels // 4), channels)


class TinyResNet(nn.Module):
    """Three residual blocks, 0.19 M parameters.

    The sides go 32 → 16 → 8 → 4 at once, since a convolution costs in proportion to its pixels: a step of 64
    images takes 17 ms on one thread.
    """

    def __init__(self, in_channels: int, num_classes: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False)
        self.norm = make_norm(32)
        self.blocks = nn.Sequential(
            Block(32, 32, 2, make_norm), Block(32, 64, 2, make_norm), Block(64, 80, 1, make_norm)
        )
        self.head = nn.Linear(80, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(functional.relu(self.norm(self.stem(images))))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (K. He et al., Deep Residual Learning, 2016, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = make_norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make_norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, make_norm(outputs))

    def forward(self, images: Tensor) -> Tensor:
        features = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(features)) + self.shortcut(images))


def _resnet(name: str, in_channels: int, num_classes: int, make_norm: MakeNorm) -> nn.Module:
    """torchvision's network with a smaller stem: its own leaves one pixel of 32x32 for the last stage."""
    cure = "pip install torchvision (of the same build as torch), or use --model tiny"
    models = require("torchvision.models", f"--model {name}", cure)
    model: nn.Module = getattr(models, name)(num_classes=num_classes, norm_layer=make_norm)
    stem = nn.Conv2d(in_channels, 64, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1 = stem
    model.maxpool = nn.Identity()
    return model


def schedule(optimizer: Optimizer, total_steps: int, warmup: int = WARMUP_STEPS) -> LambdaLR:
    """Learning rate: linear up over ``warmup`` steps, then half a cosine down to 0 at ``total_steps``.

    A short run warms up for at most a quarter of its steps. Step it once after each optimizer step.
    Source of the cosine: I. Loshchilov and F. Hutter, SGDR, 2017.
    """
    rise = min(warmup, total_steps // 4)
    fall = max(1, total_steps - rise)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / (rise + 1)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / fall)))

    return LambdaLR(optimizer, factor)


def step_schedule(optimizer: Optimizer, steps_per_epoch: int, every: int = 5) -> LambdaLR:
    """Learning rate: a tenth of what it was after each ``every`` epochs. Step it once after each optimizer step."""
    return LambdaLR(optimizer, lambda step: 0.1 ** (step // (every * steps_per_epoch)))
