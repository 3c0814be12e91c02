"""The line-up: what a resumed run looks like when one piece of its state was left out of the snapshot.

A small network trains in this process, twice: once without a break, once with a death after 30 steps and a new
start from a snapshot that lacks a piece. The difference of the two runs' losses is the piece's fingerprint.
"""

import random
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, BATCH, EPOCHS, DEATH = 240, 20, 5, 30  # 12 steps an epoch; the snapshot is taken in the third epoch
PIECES = ("optimizer", "scheduler", "position", "epoch off by one", "buffers", "random state", "nothing missing")
SHUFFLE = 4  # the seed of the order in which the curves are shown


@dataclass(frozen=True)
class Curves:
    """Losses by step: of the training batch in train mode (before the update), and of held-out data in eval mode."""

    train: list[float]
    held_out: list[float]


class _Job:
    """Everything that changes while it trains is one of its attributes, or torch's random state."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES + 100, 12, generator=draw) * 2 + 1
        hidden = torch.tanh(self.inputs @ torch.randn(12, 6, generator=draw) * 0.4)
        noise = torch.randn(SAMPLES + 100, 1, generator=draw)
        self.targets = hidden @ torch.randn(6, 1, generator=draw) + 0.1 * noise
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        total = EPOCHS * SAMPLES // BATCH
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: max(0.02, 1 - step / total))
        self.epoch, self.next_sample = 0, 0

    def train(self, steps: int | None = None) -> Curves:
        """Do `steps` steps, or all that are left."""
        curves = Curves([], [])
        while self.epoch < EPOCHS and (steps is None or len(curves.train) < steps):
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
            chosen = order[self.next_sample : self.next_sample + BATCH]
            curves.train.append(self._step(self.inputs[chosen], self.targets[chosen]))
            curves.held_out.append(self._held_out())
            self.next_sample += BATCH
            if self.next_sample == SAMPLES:
                self.epoch, self.next_sample = self.epoch + 1, 0
        return curves

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        self.model.train()
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def _held_out(self) -> float:
        self.model.eval()
        with torch.no_grad():
            return float(functional.mse_loss(self.model(self.inputs[SAMPLES:]), self.targets[SAMPLES:]))

    def snapshot(self) -> dict[str, Any]:
        """All the pieces, as copies."""
        weights = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        return {
            "weights": weights,
            "buffers": {name: value.clone() for name, value in self.model.named_buffers()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "position": self.next_sample,
            "epoch": self.epoch,
            "random state": torch.get_rng_state(),
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Restore the pieces that are there."""
        self.model.load_state_dict(snapshot["weights"] | snapshot.get("buffers", {}), strict=False)
        if "optimizer" in snapshot:
            self.optimizer.load_state_dict(snapshot["optimizer"])
        if "scheduler" in snapshot:
            self.scheduler.load_state_dict(snapshot["scheduler"])
        self.next_sample = snapshot.get("position", 0)
        self.epoch = snapshot["epoch"]
        if "random state" in snapshot:
            torch.set_rng_state(snapshot["random state"])


def uninterrupted() -> Curves:
    """The run that nobody disturbs; torch's random state afterwards is as before."""
    with torch.random.fork_rng(devices=[]):
        return _Job().train()


@cache
def _at_death() -> dict[str, Any]:
    dying = _Job()
    dying.train(DEATH)
    return dying.snapshot()


def resume_without(piece: str) -> Curves:
    """The same run, killed after 30 steps and resumed from a snapshot without `piece`; the steps from 30 on.

    "epoch off by one" counts as the tutorials do: the number of the last finished epoch stands for the one to do.
    Raises ValueError for a piece that is none of PIECES.
    """
    if piece not in PIECES:
        raise ValueError(f"{piece!r} is none of {', '.join(PIECES)}")
    with torch.random.fork_rng(devices=[]):
        snapshot = deepcopy(_at_death())
        snapshot.pop(piece, None)
        if piece == "epoch off by one":
            snapshot["epoch"] -= 1
        newborn = _Job()
        newborn.load(snapshot)
        return newborn.train()


def suspects() -> dict[str, str]:
    """Curve number -> the piece that it lacks, in an order that looks like none."""
    names = list(PIECES)
    random.Random(SHUFFLE).shuffle(names)
    return {str(number): name for number, name in enumerate(names, 1)}
