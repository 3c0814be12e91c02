"""One step of training through the lanes, with a clock in every phase."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.workloads.lanes import gather, parallel_apply, replicate, scatter

T = TypeVar("T")
PHASES = ("scatter", "replicate", "parallel_apply", "gather", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Span:
    """A piece of a step: the row to draw it in ("process", "lane 1"), what it did, and from when to when (seconds)."""

    row: str
    name: str
    start: float
    end: float


def timed_step(
    model: nn.Module, lanes: int, images: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer
) -> list[Span]:
    """Train one step on the (N, ...) images and (N,) labels as DataParallel does, and return when each phase ran."""
    spans: list[Span] = []

    def clock(row: str, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        spans.append(Span(row, name, start, time.perf_counter()))
        return result

    def phase(name: str, work: Callable[[], T]) -> T:
        return clock("process", name, work)

    optimizer.zero_grad()
    parts = phase("scatter", lambda: scatter(images, lanes))
    replicas = phase("replicate", lambda: replicate(model, len(parts)))
    clocked: list[nn.Module] = [_Clocked(replica, lane, clock) for lane, replica in enumerate(replicas)]
    outputs = phase("parallel_apply", lambda: parallel_apply(clocked, parts, _Clocked(model, 0, clock)))
    scores = phase("gather", lambda: gather(outputs))
    loss = phase("loss", lambda: cross_entropy(scores, labels))
    phase("backward", loss.backward)
    phase("optimizer", optimizer.step)
    return spans


class _Clocked(nn.Module):
    """A replica with a clock around its forward pass."""

    def __init__(self, replica: nn.Module, lane: int, clock: Callable[..., Any]) -> None:
        super().__init__()
        self.replica, self.lane, self.clock = replica, lane, clock

    def forward(self, part: Tensor) -> Tensor:
        output: Tensor = self.clock(f"lane {self.lane}", "forward", lambda: self.replica(part))
        return output


def fastest(steps: list[list[Span]]) -> list[Span]:
    """The shortest step, which other programs disturbed least."""
    return min(steps, key=_length)


def share(steps: list[list[Span]], name: str) -> float:
    """The part of a step's time, between 0 and 1, that the process spends in this phase.

    Each phase counts with its shortest time over all steps: other programs make a phase longer, never shorter.
    """
    shortest = {
        phase: min(s.end - s.start for step in steps for s in step if (s.row, s.name) == ("process", phase))
        for phase in PHASES
    }
    return shortest[name] / sum(shortest.values())


def _length(step: list[Span]) -> float:
    return max(span.end for span in step) - min(span.start for span in step)
