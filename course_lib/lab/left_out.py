"""What a job looks like that was resumed from a snapshot without one of the pieces that people forget.

A small network reads digits in this process. It keeps an average of its weights, lowers its rate when the held-out
loss has not fallen for some epochs, writes `best.pt` at each new best, and draws a seed for its order of samples.
"""

import random
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.engine.state import Best
from course_lib.workloads.digits import load_digits

SAMPLES, BATCH, EPOCHS, DEATH = 240, 48, 14, 47  # five steps an epoch; the death is two steps into the tenth
PIECES = ("average", "best value", "plateau counter", "order's seed", "nothing missing")
SHUFFLE = 3  # the seed of the order in which the runs are shown


@dataclass(frozen=True)
class Traces:
    """By step: the training loss, and the held-out loss of the averaged weights; and the steps that wrote `best.pt`."""

    train: list[float]
    average: list[float]
    best_written: list[int]


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, of which every fifth is wrong so that the network overfits; held-out ones."""
    train, test = load_digits()
    inputs, held_in = (pixels.images[:, 0, ::4, ::4].flatten(1).float() / 255 for pixels in (train, test))
    draw = torch.Generator().manual_seed(1)
    labels = train.labels[:SAMPLES].clone()
    spoiled = torch.randperm(SAMPLES, generator=draw)[: SAMPLES // 5]
    labels[spoiled] = (labels[spoiled] + torch.randint(1, 10, (len(spoiled),), generator=draw)) % 10
    return inputs[:SAMPLES], labels, held_in, test.labels


class _Job:
    """Everything that changes while it trains is one of its attributes."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.average = deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=3, threshold=0.0)
        self.best, self.seed, self.step = Best(larger_is_better=False), seed, 0

    def train(self, until: int) -> Traces:
        """Do the steps up to number `until`, counted from the job's beginning."""
        inputs, labels, _, _ = _digits()
        traces = Traces([], [], [])
        while self.step < until:
            epoch, number = divmod(self.step, SAMPLES // BATCH)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.seed + epoch))
            chosen = order[number * BATCH : (number + 1) * BATCH]
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(inputs[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.step += 1
            with torch.no_grad():
                for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)
            traces.train.append(float(loss.detach()))
            traces.average.append(_held_out(self.average))
            if self.step % (SAMPLES // BATCH) == 0:
                held_out = _held_out(self.model)
                self.plateau.step(held_out)
                if self.best.update(held_out):
                    traces.best_written.append(self.step)
        return traces

    def snapshot(self) -> dict[str, Any]:
        """All pieces, as copies."""
        pieces: dict[str, Any] = {"weights": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        pieces |= {"average": self.average.state_dict(), "best value": self.best.state_dict()}
        pieces |= {"plateau counter": self.plateau.state_dict(), "order's seed": self.seed, "step": self.step}
        return deepcopy(pieces)

    def load(self, snapshot: dict[str, Any]) -> None:
        """Restore the pieces that are there; the average begins at the weights where it is missing."""
        self.model.load_state_dict(snapshot["weights"])
        self.average.load_state_dict(snapshot.get("average", snapshot["weights"]))
        self.optimizer.load_state_dict(snapshot["optimizer"])
        if "plateau counter" in snapshot:
            self.plateau.load_state_dict(snapshot["plateau counter"])
        if "best value" in snapshot:
            self.best.load_state_dict(snapshot["best value"])
        self.seed, self.step = snapshot.get("order's seed", self.seed), snapshot["step"]


def _held_out(model: nn.Module) -> float:
    _, _, inputs, labels = _digits()
    with torch.no_grad():
        return float(cross_entropy(model(inputs), labels))


@cache
def _at_death() -> dict[str, Any]:
    dying = _Job(seed=8)
    dying.train(DEATH)
    return dying.snapshot()


def resume_without(piece: str) -> Traces:
    """The steps after the death, of a run that was resumed from a snapshot without `piece` of PIECES.

    torch's random state afterwards is as before.
    """
    with torch.random.fork_rng(devices=[]):
        snapshot = deepcopy(_at_death())
        snapshot.pop(piece, None)
        newborn = _Job(seed=1234)  # a new process draws another seed
        newborn.load(snapshot)
        return newborn.train(EPOCHS * SAMPLES // BATCH)


def uninterrupted() -> Traces:
    """The same steps of the run that nobody killed."""
    with torch.random.fork_rng(devices=[]):
        job = _Job(seed=8)
        job.train(DEATH)
        return job.train(EPOCHS * SAMPLES // BATCH)


def suspects() -> dict[str, str]:
    """Letter of a run -> the piece that its snapshot lacked, in an order that looks like none."""
    names = list(PIECES)
    random.Random(SHUFFLE).shuffle(names)
    return dict(zip("ABCDE", names, strict=True))
