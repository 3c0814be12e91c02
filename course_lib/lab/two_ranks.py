"""Two ranks of a data-parallel job in one process and in plain arithmetic, each with a bug that can be switched on."""

from dataclasses import dataclass

import numpy as np

from course_lib.engine.order import Plan, Position, share

BUGS = ("nothing wrong", "called model.module", "tail not weighted", "set_epoch forgotten", "loss not divided")
SAMPLES, BATCH, EPOCHS, RANKS = 19, 8, 3, 2
RATE = 0.05


@dataclass(frozen=True)
class Trace:
    """After each step: how far rank 0 is from the one-process run, and how far the two ranks are from each other."""

    from_single: list[float]
    between_ranks: list[float]


def trace(bug: str) -> Trace:
    """Linear regression on 19 samples, 8 a step: each epoch ends with a step of 3, two for rank 0 and one for rank 1.

    The loss's mean is taken in two micro-batches a rank; `bug` is one of `BUGS`.
    """
    single, buggy = _weights(None), _weights(bug)
    distances = [float(np.abs(w[0] - s[0]).max()) for w, s in zip(buggy, single, strict=True)]
    apart = [float(np.abs(w[0] - w[1]).max()) for w in buggy]
    return Trace([_exact(d) for d in distances], apart)


def _exact(distance: float) -> float:
    """Another order of summation is not a bug."""
    return distance if distance > 1e-12 else 0.0


def _weights(bug: str | None) -> list[np.ndarray]:
    """The weights (ranks, features) after each step; without a `bug` at all, of one process that sees everything."""
    draw = np.random.Generator(np.random.Philox(key=3))
    inputs, noise = draw.standard_normal((SAMPLES, 4)), draw.standard_normal(SAMPLES)
    targets = inputs @ np.array([1.0, -2.0, 0.5, 3.0]) + 0.3 * noise
    plan, at, weights, history = Plan(SAMPLES, BATCH), Position(), np.zeros((RANKS, 4)), []
    while at.epoch < EPOCHS:
        order = plan.permutation(0 if bug == "set_epoch forgotten" else at.epoch)
        low, high = plan.batch(at)
        gradients = []
        for rank in range(RANKS):
            mine = share(low, high, rank, RANKS) if bug is not None else (low, high)
            rows = order[slice(*mine)]
            errors = inputs[rows] @ weights[rank] - targets[rows]
            gradient = 2 * errors @ inputs[rows] / len(rows)
            weight = 1.0 if bug in (None, "tail not weighted") else len(rows) * RANKS / (high - low)
            gradients.append(gradient * weight * (2 if bug == "loss not divided" else 1))
        mean = sum(gradients) / RANKS
        weights = weights - RATE * (np.array(gradients) if bug == "called model.module" else mean)
        history.append(weights)
        at = plan.after_step(at)
        at = plan.next_epoch(at) if plan.epoch_done(at) else at
    return history
