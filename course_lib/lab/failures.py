"""When the parts of a simulated cluster fail, for many independent runs at once, and when lost nodes are replaced."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from course_lib.lab.cluster import SimulatedCluster

Times = NDArray[np.float64]  # one time for each run, in seconds from its start
Kinds = NDArray[np.intp]
NODE, PROCESS, RACK = 0, 1, 2  # what failed


class Failures(Protocol):
    """What the simulator asks of a source of failures."""

    def next(self) -> tuple[Times, Kinds]:
        """When each run's next failure comes, and what kind it is of; infinite when none comes."""

    def strike(self, at: Times, kind: Kinds, struck: NDArray[np.bool_]) -> Times:
        """The failure has come where `struck`; returns when each run has all its nodes again, which can be past."""

    def processes_from(self, at: Times) -> None:
        """From then on each run has processes, which can die."""


class Clocks:
    """Random failures: a clock for each node, which starts again when the node is replaced, and not when another is.

    So the job's failures are a superposition of renewal processes. That is no renewal process itself unless the
    failures are memoryless, and a Weibull time between the job's own failures would be wrong.
    """

    def __init__(self, cluster: SimulatedCluster, runs: int, rng: np.random.Generator) -> None:
        self._cluster, self._rng = cluster, rng
        size = (runs, cluster.nodes)
        self._nodes = self._remaining(size) if cluster.burnt_in else self._lifetimes(size)
        self._first = np.zeros(runs, dtype=np.intp)  # the node that fails next
        self._rack_mean_s = cluster.rack_mtbf_s / cluster.racks
        self._process_mean_s = cluster.process_mtbf_s / cluster.nodes
        self._rack = self._memoryless(self._rack_mean_s, runs)
        self._process = self._memoryless(self._process_mean_s, runs)
        # The last spares + 1 losses of each run, in a ring; with as many in repair, there is one too few.
        self._losses = np.full((runs, cluster.spares + 1), -math.inf)
        self._count = np.zeros(runs, dtype=np.intp)
        self._complete = np.zeros(runs)
        self._since = np.zeros(size)  # since when each node has been there; yet to come where one is waited for

    def next(self) -> tuple[Times, Kinds]:
        self._first = self._nodes.argmin(axis=1)
        node = self._nodes[np.arange(len(self._first)), self._first]
        candidates = np.stack([node, self._process, self._rack])  # in the order of NODE, PROCESS, RACK
        return candidates.min(axis=0), candidates.argmin(axis=0)

    def strike(self, at: Times, kind: Kinds, struck: NDArray[np.bool_]) -> Times:
        alone = np.flatnonzero(struck & (kind == NODE))
        self._lose(alone, self._first[alone], at[alone])
        together = np.flatnonzero(struck & (kind == RACK))
        if len(together):
            size = self._cluster.rack_nodes
            first = self._rng.integers(self._cluster.racks, size=len(together)) * size
            for place in range(size):
                node = np.minimum(first + place, self._cluster.nodes - 1)
                there = (node == first + place) & (self._since[together, node] <= at[together])
                self._lose(together[there], node[there], at[together[there]])
            self._rack[together] = at[together] + self._memoryless(self._rack_mean_s, len(together))
        return self._complete

    def processes_from(self, at: Times) -> None:
        # Memoryless: what a process has lived through before does not matter, so a new draw will do.
        self._process = at + self._memoryless(self._process_mean_s, len(at))

    def _lose(self, runs: Kinds, node: Kinds, at: Times) -> None:
        """One node is lost in each of these runs."""
        width = self._losses.shape[1]
        self._losses[runs, self._count[runs] % width] = at
        self._count[runs] += 1
        # Repairs take equally long, so the first lost is the first back: the job is complete again as soon as the
        # oldest of the last spares + 1 losses is repaired.
        complete = self._losses[runs, self._count[runs] % width] + self._cluster.repair_s
        self._complete[runs] = np.maximum(complete, self._complete[runs])
        self._since[runs, node] = np.maximum(at, complete)
        self._nodes[runs, node] = self._since[runs, node] + self._lifetimes(len(runs))

    def _memoryless(self, mean_s: float, size: int) -> Times:
        return self._rng.exponential(mean_s, size) if math.isfinite(mean_s) else np.full(size, math.inf)

    def _lifetimes(self, size: int | tuple[int, ...]) -> NDArray[np.float64]:
        """How long new nodes last."""
        if math.isinf(self._cluster.node_mtbf_s):
            return np.full(size, math.inf)
        return self._scale_s * self._rng.weibull(self._cluster.shape, size)

    def _remaining(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """How long the nodes of an old cluster still last.

        A node that is found at a random instant has a lifetime x with density x f(x) / mean (long lives are found more
        often; for a Weibull's f, (x / scale)^shape is then Gamma with 1 + 1 / shape), and is at a uniform place in it.
        """
        if math.isinf(self._cluster.node_mtbf_s):
            return np.full(size, math.inf)
        power = self._rng.gamma(1 + 1 / self._cluster.shape, size=size)
        return self._scale_s * power ** (1 / self._cluster.shape) * self._rng.random(size)

    @property
    def _scale_s(self) -> float:
        """A Weibull's mean is its scale times Gamma(1 + 1 / shape)."""
        return self._cluster.node_mtbf_s / math.gamma(1 + 1 / self._cluster.shape)


class Trace:
    """Failures at known times, in one run, of processes alone: those of a real job that was killed on purpose."""

    def __init__(self, at_s: Sequence[float]) -> None:
        self._left = sorted(at_s, reverse=True)

    def next(self) -> tuple[Times, Kinds]:
        return np.array([self._left[-1] if self._left else math.inf]), np.array([PROCESS])

    def strike(self, at: Times, kind: Kinds, struck: NDArray[np.bool_]) -> Times:
        self._left.pop()
        return np.zeros(1)

    def processes_from(self, at: Times) -> None:
        pass
