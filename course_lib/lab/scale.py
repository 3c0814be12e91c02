"""What each measure against failures buys, from one node to thousands, with failures as often as Llama 3's."""

import math
from dataclasses import replace

from course_lib.lab import llama3
from course_lib.lab.cluster import SimulatedCluster
from course_lib.lab.economics import best_interval

SIZES = (8, 1_024, 16_384, 131_072)  # GPUs

# The Llama 3 paper gives none of these times: they are assumptions, of a size that such a job might have. A snapshot
# takes a minute to write, a failure is noticed after one, a restart takes ten, a repair half a day.
PLAIN = {"stall_s": 60.0, "detection_s": 60.0, "recovery_s": 600.0, "repair_s": 12 * 3600.0}
# Each measure comes on top of those before it.
MEASURES: dict[str, dict[str, float]] = {
    "nothing": {},
    "hot spares": {},  # as many as `spares_for` says
    "asynchronous snapshots": {"stall_s": 2.0, "write_s": 60.0},
    "warm restart of processes": {"process_recovery_s": 30.0},
    "warm spares": {"recovery_s": 120.0},
}


def ladder(gpus: int) -> dict[str, SimulatedCluster]:
    """The cluster with each measure of MEASURES, and with all those before it."""
    costs, found = dict(PLAIN), {}
    for name, changes in MEASURES.items():
        costs |= changes
        plain = llama3.cluster(gpus, **costs)
        found[name] = plain if name == "nothing" else replace(plain, spares=spares_for(plain))
    return found


def interval_for(cluster: SimulatedCluster) -> float:
    """The best snapshot interval for this cluster by the formula, in seconds."""
    return best_interval(cluster.stall_s, cluster.mtbf_s, cluster.write_s)


def spares_for(cluster: SimulatedCluster, risk: float = 0.001) -> int:
    """The fewest spares of which more are needed at once for no more than `risk` of the time.

    The number of nodes in repair is Poisson distributed with the mean (losses per second) x (seconds of a repair), how
    long single repairs take does not matter, as long as failures are memoryless: it is an M/G/infinity queue. Racks
    are counted apart, since each takes several nodes at once.
    """
    together = cluster.rack_nodes if math.isfinite(cluster.rack_mtbf_s) else 1
    racks = cluster.racks / cluster.rack_mtbf_s * cluster.repair_s
    mean = cluster.nodes / cluster.node_mtbf_s * cluster.repair_s
    return _quantile(mean, risk / 2) + together * _quantile(racks, risk / 2)


def _quantile(mean: float, risk: float) -> int:
    """The smallest n for which a Poisson number is above n with no more than this probability."""
    n, below = 0, math.exp(-mean)
    while 1 - below > risk:
        n += 1
        below += math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))
    return n
