"""What a simulated cluster is: its nodes, how they fail, and what failures and snapshots take."""

import math
from dataclasses import dataclass

from course_lib.engine import UsageError
from course_lib.lab.economics import goodput, refuse_fraction, refuse_negative, refuse_zero

DAY_S = 86400.0


@dataclass(frozen=True)
class SimulatedCluster:
    """A job that needs all of its `nodes`, and the nodes that stand by. All times are in seconds.

    A node is lost once in `node_mtbf_s` on average, each by a clock of its own: the times between its failures are
    exponential (`shape` 1), or Weibull with that shape (below 1: new nodes fail more often, above 1: old ones). Clocks
    run in calendar time, also while the job stands still. A node that comes as a replacement is new. At the start all
    nodes are new, or (`burnt_in`) of the mixed ages of a cluster that has long been in use.

    Per node, a process dies once in `process_mtbf_s` while processes are there; this takes no node. Per rack of
    `rack_nodes` nodes, a switch takes all nodes of its rack once in `rack_mtbf_s`. Both are memoryless.

    After a failure, `detection_s` pass until it is noticed; when nodes are lost, the job then waits until it has all
    its nodes again, and needs `recovery_s` more for its first new step (`process_recovery_s` when only processes died;
    None is the same). A failure before that step starts all of it anew. One of the `spares` takes a lost node's place
    at once, and the lost node is a spare again after `repair_s`; idle spares do not fail. The repair takes the same
    time each time: how many nodes are in repair depends on little else than the mean.

    A snapshot stops training for `stall_s` and can be loaded `write_s` later; see economics.
    """

    nodes: int
    node_mtbf_s: float
    gpus_per_node: int = 8
    shape: float = 1.0
    burnt_in: bool = True
    process_mtbf_s: float = math.inf
    rack_nodes: int = 1
    rack_mtbf_s: float = math.inf
    detection_s: float = 0.0
    recovery_s: float = 0.0
    process_recovery_s: float | None = None
    stall_s: float = 0.0
    write_s: float = 0.0
    spares: int = 0
    repair_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus_per_node", 1), ("rack_nodes", 1), ("spares", 0)):
            refuse_fraction(least, **{name: getattr(self, name)})
        refuse_zero(**{name: getattr(self, name) for name in ("shape", *_MTBFS)})
        refuse_negative(**{name: getattr(self, name) for name in _TIMES})
        refuse_negative(process_recovery_s=0.0 if self.process_recovery_s is None else self.process_recovery_s)
        if not 0.1 <= self.shape <= 100:  # beyond, a Weibull's numbers leave those of a computer
            raise UsageError(f"shape must be from 0.1 to 100, not {self.shape}")

    @property
    def gpus(self) -> int:
        """The GPUs that train; those of spares do not count."""
        return self.nodes * self.gpus_per_node

    @property
    def racks(self) -> int:
        """The racks that the nodes fill; the last one may be part full."""
        return -(-self.nodes // self.rack_nodes)

    @property
    def recoveries_s(self) -> tuple[float, float, float]:
        """The recovery after a lost node, a dead process and a lost rack, without the detection."""
        process = self.recovery_s if self.process_recovery_s is None else self.process_recovery_s
        return self.recovery_s, process, self.recovery_s

    @property
    def mtbf_s(self) -> float:
        """The job's MTBF: the rates of all that can fail add up (with nodes that are burnt in)."""
        rate = sum(self._rates)
        return 1 / rate if rate > 0 else math.inf

    @property
    def mean_recovery_s(self) -> float:
        """From a failure to the first new step when nothing has to be waited for, on average over all failures."""
        rates = self._rates
        if (total := sum(rates)) == 0:
            return 0.0
        shares = (rate / total * recovery for rate, recovery in zip(rates, self.recoveries_s, strict=True))
        return self.detection_s + sum(shares)

    def formula(self, interval_s: float) -> float:
        """The goodput by economics.goodput: right while spares are always at hand and failures are memoryless.

        Where processes have a recovery of their own, both recoveries must be much shorter than the job's MTBF, too.
        """
        times = {"mtbf_s": self.mtbf_s, "stall_s": self.stall_s, "write_s": self.write_s}
        return goodput(interval_s, recovery_s=self.mean_recovery_s, **times)

    @property
    def _rates(self) -> tuple[float, float, float]:
        return self.nodes / self.node_mtbf_s, self.nodes / self.process_mtbf_s, self.racks / self.rack_mtbf_s


_MTBFS = ("node_mtbf_s", "process_mtbf_s", "rack_mtbf_s")
_TIMES = ("detection_s", "recovery_s", "stall_s", "write_s", "repair_s")
