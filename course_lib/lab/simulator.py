"""A cluster that fails, simulated: from failure to failure, with all that happens in between in closed form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from course_lib.engine import UsageError
from course_lib.lab.cluster import DAY_S, SimulatedCluster
from course_lib.lab.economics import refuse_fraction, refuse_negative, refuse_zero, spacing
from course_lib.lab.failures import Clocks, Failures, Times, Trace

MOST_FAILURES = 1e5  # in a run; more are a mistake, and would take very long


@dataclass(frozen=True)
class Outcome:
    """Where the time of each run went, in seconds; the five parts add up to `wall_s`, but for rounding (1e-9 of it).

    productive: training whose result is kept, what was not yet saved at the end included, as a job that is asked to
    stop saves it. replayed: training that a failure undid, so that it had to be done again. stalled: training stood
    still for a snapshot. recovering: from a failure to the first new step, but for waiting: until there were nodes.
    The failures are counted by what failed.
    """

    wall_s: float
    productive_s: Times
    replayed_s: Times
    stalled_s: Times
    recovering_s: Times
    waiting_s: Times
    node_failures: Times
    process_failures: Times
    rack_failures: Times

    @property
    def goodput(self) -> Times:
        """The productive share of each run, 0 to 1."""
        return self.productive_s / self.wall_s

    @property
    def mean(self) -> float:
        """The mean goodput over the runs."""
        return float(self.goodput.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean goodput; not a number for one run."""
        return float(self.goodput.std(ddof=1) / math.sqrt(len(self.goodput))) if len(self.goodput) > 1 else math.nan

    @property
    def failures(self) -> Times:
        """How many failures each run had."""
        return self.node_failures + self.process_failures + self.rack_failures

    @property
    def shares(self) -> dict[str, float]:
        """The mean share of each part of the wall time."""
        return {part: float(getattr(self, f"{part}_s").mean()) / self.wall_s for part in PARTS}


PARTS = ("productive", "replayed", "stalled", "recovering", "waiting")


def simulate(
    cluster: SimulatedCluster, interval_s: float, days: float = 30.0, runs: int = 100, seed: int = 0
) -> Outcome:
    """Run a job on the cluster `runs` times for `days`, each time with other failures.

    The same arguments give the same outcome. The time grows with nodes x runs x failures, the memory with nodes x runs.
    """
    refuse_zero(days=days)
    refuse_negative(days=days)
    refuse_fraction(1, runs=runs)
    refuse_fraction(0, seed=seed)
    if (expected := days * DAY_S / cluster.mtbf_s) > MOST_FAILURES:
        raise UsageError(f"{expected:.0f} failures in each run, one in {cluster.mtbf_s:.3g} s: give MTBFs in seconds")
    return _run(Clocks(cluster, runs, np.random.default_rng(seed)), cluster, interval_s, days * DAY_S, runs)


def replay(
    failures_s: Sequence[float],
    wall_s: float,
    interval_s: float,
    *,
    stall_s: float,
    recovery_s: float,
    write_s: float = 0.0,
) -> Outcome:
    """What the simulator makes of one job of `wall_s` seconds whose failures came at these times."""
    refuse_zero(wall_s=wall_s)
    refuse_negative(wall_s=wall_s, **{f"failure_{number}": time for number, time in enumerate(failures_s)})
    costs = SimulatedCluster(1, math.inf, recovery_s=recovery_s, stall_s=stall_s, write_s=write_s)
    return _run(Trace(failures_s), costs, interval_s, wall_s, 1)


def _run(failures: Failures, cluster: SimulatedCluster, interval_s: float, end_s: float, runs: int) -> Outcome:
    """One failure of each run at a time, until all runs have come to their end."""
    spent = {part: np.zeros(runs) for part in PARTS}
    counts = np.zeros((3, runs))
    recoveries = np.array(cluster.recoveries_s)
    # Each run: when it was struck, when that was noticed, when it had all nodes, when it trains again, and what it
    # needed for that. At the start all is well.
    struck = noticed = complete = back = recovery = np.zeros(runs)
    while True:
        at, kind = failures.next()
        over = at >= end_s
        at = np.minimum(at, end_s)
        spent["recovering"] += np.minimum(at, noticed) - struck + np.clip(at, complete, back) - complete
        spent["waiting"] += np.clip(at, noticed, complete) - noticed
        trained = np.maximum(at - back, 0.0)
        worked, saved = attempt(trained, interval_s, cluster.stall_s, cluster.write_s)
        kept = np.where(over, worked, saved)
        spent["productive"] += kept
        spent["replayed"] += worked - kept
        spent["stalled"] += trained - worked
        if over.all():
            seconds = {f"{part}_s": values for part, values in spent.items()}
            return Outcome(
                end_s, **seconds, node_failures=counts[0], process_failures=counts[1], rack_failures=counts[2]
            )
        going = np.flatnonzero(~over)
        counts[kind[going], going] += 1
        # A recovery that was cut short still has to do what it began for.
        needed = recoveries[kind]
        recovery = np.where(at < back, np.maximum(recovery, needed), needed)
        all_there = failures.strike(at, kind, ~over)
        # A run that is over stands at its end, so that nothing is added to it any more.
        struck = at
        noticed = np.where(over, at, at + cluster.detection_s)
        complete = np.where(over, at, np.maximum(noticed, all_there))
        back = np.where(over, at, complete + recovery)
        failures.processes_from(complete)


def attempt(trained: Times, interval_s: float, stall_s: float, write_s: float) -> tuple[Times, Times]:
    """Of the time `trained` since the job was up: the part without stalls, and the part of that which is saved."""
    work_s = spacing(interval_s, write_s)
    cycle_s = work_s + stall_s
    cycles = np.floor(trained / cycle_s)
    worked = np.minimum(cycles * work_s + np.clip(trained - cycles * cycle_s, 0.0, work_s), trained)
    saved = np.clip(np.floor((trained - write_s) / cycle_s), 0.0, cycles) * work_s
    return worked, saved
