"""Exercises of notebook 01."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib.engine import Plan, Position
from course_lib.lab.checks import case, choose, match, predict, write
from course_lib.workloads.data import DataSpec, load

# --- momentum: what the optimizer remembers -----------------------------------------------------------------------

momentum = predict(
    0.42,
    wrong=[0.6, 0.8, 0.62],
    hints={
        0.6: "that is plain SGD, 2 × 0.1 × 2: momentum 0.9 adds nine tenths of the step before",
        0.8: "that is the weight after one step; there is a second one",
        0.62: "the second step uses the new gradient as well as 0.9 times the old one",
    },
    hint="the velocity is 2 after the first step, and 0.9 × 2 + 2 after the second",
    close=1e-6,
    why="1 - 0.1 × 2 - 0.1 × 3.8: the second step depends on the first, so the optimizer has a memory",
)


# --- the true mean ------------------------------------------------------------------------------------------------


def _true_mean(means: Sequence[float], counts: Sequence[int]) -> float:
    return sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)


def _forgets_nan(means: Sequence[float], counts: Sequence[int]) -> float:
    return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


true_mean = write(
    case([1.0, 3.0], [32, 32], hint="equal parts: half of each"),
    case([1.0, 4.0], [40, 24], hint="a part of 40 samples speaks for 40"),
    case([1.0, 2.0, 6.0], [1, 2, 3], hint="divide by the number of samples, not of parts"),
    case([2.0, math.nan], [64, 0], hint="the mean over no samples is NaN, and 0 × NaN is NaN"),
    solution=_true_mean,
    wrong=[
        lambda means, counts: sum(means) / len(means),
        _forgets_nan,
        lambda means, counts: sum(m * c for m, c in zip(means, counts, strict=True)) / len(counts),
    ],
    close=1e-12,
    why="each part weighs what it has of the samples, and one without samples weighs nothing",
)

# --- the order ----------------------------------------------------------------------------------------------------

SAMPLES, BATCH, USED = 1500, 64, 768
LR = 0.02  # for the linear classifier of the five curves


def seen_after_restart() -> np.ndarray:
    """How often epoch 1 uses each sample, when it dies after 768 and a generator begins again at its seed."""
    lives = [np.random.RandomState(0), np.random.RandomState(0)]
    lives[0].permutation(SAMPLES)  # epoch 0
    used, rest = lives[0].permutation(SAMPLES)[:USED], lives[1].permutation(SAMPLES)[USED:]
    return np.bincount(np.concatenate([used, rest]), minlength=SAMPLES)


never_seen = predict(
    int((seen_after_restart() == 0).sum()),
    wrong=[0, 732, 768],
    hints={
        0: "then the rest of the one order would be just what is missing of the other: two independent shuffles?",
        732: "as many as were still to come; but some of those are in the other order's rest, too",
        768: "as many as were used before the death; these were seen at least once",
    },
    hint="732 of 1,500 were not used before the death; which part of them is not in the other order's rest, either?",
    close=0.06,
    why="about 1500 × (732/1500) × (768/1500): missed by the first life, and missed by the second",
)


def _where(step: int, samples: int, batch: int) -> tuple[int, int, int]:
    plan = Plan(samples, batch)
    epoch, number = divmod(step, plan.steps_per_epoch)
    low, high = plan.batch(Position(epoch, number * batch, step))
    return epoch, low, high


def _no_tail(step: int, samples: int, batch: int) -> tuple[int, int, int]:
    epoch, low = divmod(step * batch, samples)
    return epoch, low, low + batch


def _drops_tail(step: int, samples: int, batch: int) -> tuple[int, int, int]:
    epoch, number = divmod(step, samples // batch)
    return epoch, number * batch, (number + 1) * batch


def _too_long(step: int, samples: int, batch: int) -> tuple[int, int, int]:
    epoch, number = divmod(step, -(-samples // batch))
    return epoch, number * batch, (number + 1) * batch


where = write(
    case(0, 1500, 64),
    case(12, 1500, 64, hint="twelve steps of 64 came before"),
    case(23, 1500, 64, hint="the epoch's last step gets the 28 samples that are left"),
    case(24, 1500, 64, hint="a new epoch begins at sample 0: no batch reaches from one epoch into the next"),
    case(95, 1500, 64, hint="how many steps has an epoch of 1,500 samples?"),
    case(14, 1500, 100, hint="a batch size that divides the samples leaves no tail"),
    case(3, 10, 64, hint="a batch can be larger than the data set"),
    solution=_where,
    wrong=[_no_tail, _drops_tail, _too_long],
    why="with the seed, one number says which samples a step uses: nothing else must be remembered",
)

# --- a clock without synchronising --------------------------------------------------------------------------------

slow_line = choose(
    "c",
    hints={
        "a": "a few bytes are copied: that takes microseconds",
        "b": "then backward's own line would show it on any machine; why would it be 0.4 ms?",
        "d": "the total would not change: whatever is next to need a result would wait instead",
    },
    why="launches return at once; the first line that needs a number waits for all of them",
)

# --- five curves --------------------------------------------------------------------------------------------------

_CAUSES = {
    "1": "labels of other samples",
    "2": "zero_grad missing",
    "3": "the same batch in each step",
    "4": "zero_grad between backward and step",
    "5": "nothing wrong",
}

bugs = match(
    _CAUSES,
    wrong=[
        _CAUSES | {"3": "nothing wrong", "5": "the same batch in each step"},
        _CAUSES | {"1": "zero_grad between backward and step", "4": "labels of other samples"},
        _CAUSES | {"1": "zero_grad missing", "2": "labels of other samples"},
    ],
    hint="ask of each bug: does the weight move at all, is it moved further each time, is there anything to learn?",
    why="a wrong loop raises no error; the shape of its curve is all the message there is",
)


def five_curves() -> dict[str, list[float]]:
    """The losses of 48 steps of a linear classifier, one run for each cause; the keys say nothing."""
    train = load(DataSpec("digits", None)).train
    samples: list[Any] = [train[i] for i in range(SAMPLES)]
    images = torch.stack([image.flatten() for image, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    return {name: _losses(cause, images, labels) for name, cause in _CAUSES.items()}


def _losses(cause: str, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
    plan, losses = Plan(SAMPLES, BATCH), []
    model = nn.Linear(images.shape[1], 10)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(2 * plan.steps_per_epoch):
        epoch, low, high = _where(0 if cause == "the same batch in each step" else step, SAMPLES, BATCH)
        chosen = torch.from_numpy(plan.permutation(epoch)[low:high])
        shown = labels[chosen.flip(0)] if cause == "labels of other samples" else labels[chosen]
        loss = cross_entropy(model(images[chosen]), shown)
        if cause != "zero_grad missing":
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if cause == "zero_grad between backward and step":
            optimizer.zero_grad()
        optimizer.step()
        losses.append(loss.item())
    return losses
