"""A small network that reads digits, its snapshot, and where in that file a weight lies."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from course_lib.workloads.digits import load_digits

BATCH, BEFORE, AFTER = 100, 25, 40  # samples in a step; steps before the snapshot, and after it
DARK = 478  # a pixel that is lit in 3 of the 1,500 digits, which come in step 35 for the next time


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, _ = load_digits()
    return pixels.images.flatten(1).float() / 255, pixels.labels


class _Job:
    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def train(self, first: int, steps: int) -> list[float]:
        """The loss of each of `steps` steps, of which the first has the number `first`."""
        inputs, labels = _digits()
        losses = []
        for step in range(first, first + steps):
            chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % len(inputs)
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(inputs[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def write_snapshot(path: Path) -> None:
    """Train for a while, and save model and optimizer."""
    job = _Job()
    job.train(0, BEFORE)
    torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, path)


def train_on(path: Path) -> list[float]:
    """Resume from a snapshot, without a question, and train on; returns the loss of each step."""
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    job = _Job()
    job.model.load_state_dict(snapshot["model"])
    job.optimizer.load_state_dict(snapshot["optimizer"])
    return job.train(BEFORE, AFTER)


def find(path: Path, layer: str) -> int:
    """The byte of the file at which the four bytes of one weight begin, the lowest first.

    In the "last" layer it is the largest weight, in the "first" the largest of those that look at a dark pixel.
    """
    snapshot = torch.load(path, map_location="cpu", weights_only=True)["model"]
    weights = snapshot["2.weight" if layer == "last" else "0.weight"]
    index = int(weights.abs().argmax()) if layer == "last" else int(weights[:, DARK].argmax()) * 1024 + DARK
    return path.read_bytes().index(weights.numpy().tobytes()) + 4 * index


def flipped(value: float, bit: int) -> float:
    """A float32 with one bit turned around; bit 0 is the lowest of the fraction, 31 the sign."""
    bits = np.array(value, dtype=np.float32).view(np.uint32) ^ np.uint32(1 << bit)
    return float(bits.view(np.float32))
