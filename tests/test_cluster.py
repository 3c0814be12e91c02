"""The simulated cluster: against closed forms, against a cluster simulated one event after another, and at limits."""

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.engine import UsageError
from course_lib.lab.cluster import DAY_S, SimulatedCluster
from course_lib.lab.economics import goodput
from course_lib.lab.failures import Clocks
from course_lib.lab.simulator import PARTS, Outcome, replay, simulate

HOUR = 3600.0


def adds_up(outcome: Outcome) -> bool:
    """Whether each run's parts are its wall time, but for rounding, and none is below 0."""
    parts = [getattr(outcome, f"{part}_s") for part in PARTS]
    whole = abs(sum(parts) - outcome.wall_s).max() <= 1e-9 * outcome.wall_s
    return bool(whole and min(part.min() for part in parts) >= -1e-9 * outcome.wall_s)


# --- against closed forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(0, 72, 7))
def test_it_agrees_with_the_closed_form(bench: Callable[[str], Any], number: int) -> None:
    """Within 1 % with memoryless failures, for MTBFs of 15 minutes to a day; the bench goes through the whole grid."""
    module = bench("simulated_cluster")
    point = module.against_formula(module.places()[number], runs=200, failures=500, seed=number)
    assert 3 * point.standard_error < 0.01 * point.formula and abs(point.off) < 0.01, point


def test_two_kinds_of_failure_with_recoveries_of_their_own() -> None:
    """Exactly, where the formula takes the mean recovery: by the chance of each, first of the one cut short, then anew.

    A process dies p of the time; a recovery that is cut short goes on being needed, so after a lost node in it, it is a
    node's. With a = e^-(recovery/mtbf), what is down for a node takes M (1 - a)/a, and for a process x, where
    x = M (1 - b) + (1 - b) (p x + (1 - p) M (1 - a)/a).
    """
    mtbf, p, node, process, interval, stall = 1000.0, 0.7, 800.0, 200.0, 100.0, 5.0
    cluster = SimulatedCluster(
        1, mtbf / (1 - p), process_mtbf_s=mtbf / p, recovery_s=node, process_recovery_s=process, stall_s=stall
    )
    assert cluster.mtbf_s == pytest.approx(mtbf)
    a, b = math.exp(-node / mtbf), math.exp(-process / mtbf)
    down_node = mtbf * (1 - a) / a
    down_process = (mtbf * (1 - b) + (1 - b) * (1 - p) * down_node) / (1 - (1 - b) * p)
    kept = interval / math.expm1((interval + stall) / mtbf)  # between two failures
    expected = kept / (mtbf + p * down_process + (1 - p) * down_node)
    found = simulate(cluster, interval, 20, runs=400)
    assert abs(found.mean - expected) < 4 * found.standard_error and found.standard_error < 0.002 * expected
    assert 0.01 < cluster.formula(interval) / expected - 1 < 0.1  # an approximation, when recoveries are so long
    ratio = found.process_failures.sum() / found.failures.sum()
    assert abs(ratio - p) < 0.01


def test_one_node_without_a_spare_waits_for_its_repair() -> None:
    """Its clock stands still in the repair, so that is added to each mean time between failures."""
    mtbf, repair, recovery, interval, stall, write = 5000.0, 3000.0, 400.0, 200.0, 10.0, 30.0
    times = {"recovery_s": recovery, "stall_s": stall, "write_s": write}
    cluster = SimulatedCluster(1, mtbf, repair_s=repair, **times)
    kept = interval * math.exp(-(recovery + write) / mtbf) / math.expm1((interval + stall) / mtbf)
    found = simulate(cluster, interval, 60, runs=300)
    assert abs(found.mean - kept / (mtbf + repair)) < 4 * found.standard_error
    assert found.shares["waiting"] == pytest.approx(repair / (mtbf + repair), rel=0.02)
    spared = simulate(replace(cluster, spares=20), interval, 60, runs=300)
    assert spared.shares["waiting"] < 1e-3
    assert spared.mean == pytest.approx(goodput(interval, mtbf_s=mtbf, **times), rel=0.01)


# --- against a plain simulation -----------------------------------------------------------------------------------


def train(length: float, interval: float, stall: float, write: float) -> tuple[float, float, float]:
    """Snapshot after snapshot: what was worked in this time, what of it is saved, and how long it stood still."""
    now = worked = stalled = 0.0
    snapshots: list[tuple[float, float]] = []  # when it can be loaded, and the work in it
    while now < length:
        did = min(interval, length - now)
        now, worked = now + did, worked + did
        if did < interval:
            break
        paused = min(stall, length - now)
        now, stalled = now + paused, stalled + paused
        if paused == stall:
            snapshots.append((now + write, worked))
    return worked, max((work for ready, work in snapshots if ready <= length), default=0.0), stalled


@given(
    st.lists(st.integers(1, 400), max_size=8),
    st.integers(1, 500),
    st.integers(5, 60),
    st.integers(0, 20),
    st.integers(0, 150),
    st.integers(0, 80),
)
def test_each_attempt_is_what_it_is_snapshot_after_snapshot(
    gaps: list[int], rest: int, interval: int, stall: int, write: int, recovery: int
) -> None:
    failures = [float(time) for time in np.cumsum(gaps)]
    write = min(write, interval)
    wall = (failures[-1] if failures else 0.0) + rest
    spent = dict.fromkeys(PARTS, 0.0)
    back = 0.0
    for at in [*failures, wall]:
        worked, saved, stalled = train(max(at - back, 0.0), interval, stall, write)
        kept = worked if at == wall else saved
        spent["productive"] += kept
        spent["replayed"] += worked - kept
        spent["stalled"] += stalled
        spent["recovering"] += min(back, at) - max((f for f in failures if f < at), default=0.0) if back else 0.0
        back = at + recovery
    found = replay(failures, wall, interval, stall_s=stall, recovery_s=recovery, write_s=write)
    assert {part: getattr(found, f"{part}_s")[0] for part in PARTS} == pytest.approx(spent)
    assert adds_up(found) and found.process_failures[0] == len(failures)


def one_by_one(cluster: SimulatedCluster, interval: float, end: float, rng: np.random.Generator) -> dict[str, float]:
    """One run with a list of nodes, of spares and of repairs, event after event."""
    life = lambda: float(rng.exponential(cluster.node_mtbf_s))  # noqa: E731
    clocks = [life() for _ in range(cluster.nodes)]  # infinite for a place without a node
    rack_at = rng.exponential(cluster.rack_mtbf_s / cluster.racks)
    spares, repairs, now, phase_end, phase = cluster.spares, [], 0.0, 0.0, "train"
    spent, trained = dict.fromkeys(PARTS, 0.0), 0.0
    following = {"detect": ("wait", 0.0), "wait": ("recover", cluster.recovery_s), "recover": ("train", math.inf)}
    phase_end = math.inf
    while now < end:
        if phase == "wait" and math.inf not in clocks:
            phase, phase_end = "recover", now + cluster.recovery_s
        due = math.inf if phase == "wait" else phase_end
        then = min(end, min(clocks), rack_at, due, repairs[0] if repairs else math.inf)
        name = {"wait": "waiting", "detect": "recovering", "recover": "recovering"}.get(phase)
        if name is None:
            trained += then - now
        else:
            spent[name] += then - now
        now = then
        lost = [place for place, clock in enumerate(clocks) if clock == now]
        if now == rack_at:
            first = int(rng.integers(cluster.racks)) * cluster.rack_nodes
            lost = [p for p in range(first, first + cluster.rack_nodes) if p < cluster.nodes and clocks[p] < math.inf]
            rack_at = now + rng.exponential(cluster.rack_mtbf_s / cluster.racks)
        while repairs and repairs[0] <= now:
            heapq.heappop(repairs)
            spares += 1
        for place in lost:
            heapq.heappush(repairs, now + cluster.repair_s)
            clocks[place] = math.inf
        for place in [p for p, clock in enumerate(clocks) if clock == math.inf][:spares]:
            clocks[place] = now + life()
            spares -= 1
        if lost or now == end:
            worked, saved, stalled = train(trained, interval, cluster.stall_s, cluster.write_s)
            kept = saved if lost else worked
            spent["productive"] += kept
            spent["replayed"] += worked - kept
            spent["stalled"] += stalled
            trained, phase, phase_end = 0.0, "detect", now + cluster.detection_s
        elif phase != "wait" and now == phase_end:
            phase, takes = following[phase]
            phase_end = now + takes
    return spent


def test_a_cluster_with_spares_repairs_and_racks_is_what_it_is_event_after_event() -> None:
    cluster = SimulatedCluster(
        6,
        40 * HOUR,
        rack_nodes=2,
        rack_mtbf_s=90 * HOUR,
        detection_s=120.0,
        recovery_s=600.0,
        stall_s=30.0,
        write_s=200.0,
        spares=1,
        repair_s=6 * HOUR,
    )
    days, interval, runs = 20.0, 1500.0, 300
    rng = np.random.default_rng(1)
    slowly = [one_by_one(cluster, interval, days * DAY_S, rng) for _ in range(runs)]
    found = simulate(cluster, interval, days, runs=2000)
    assert adds_up(found) and found.shares["waiting"] > 0.1  # so there is something to compare
    for part in PARTS:
        shares = np.array([run[part] for run in slowly]) / (days * DAY_S)
        error = math.hypot(shares.std(ddof=1) / math.sqrt(runs), getattr(found, f"{part}_s").std() / DAY_S / days / 44)
        assert abs(found.shares[part] - shares.mean()) < 4 * error, part


# --- clocks -------------------------------------------------------------------------------------------------------


def counted(shape: float, nodes: int, mean: float, until: float, runs: int) -> float:
    """How many failures nodes that are new at the start have: each has its own, one after another."""
    rng = np.random.default_rng(3)
    lives = rng.weibull(shape, (runs, nodes, 30)) * mean / math.gamma(1 + 1 / shape)
    times = lives.cumsum(axis=2)
    assert times[:, :, -1].min() > until
    return float((times <= until).sum(axis=(1, 2)).mean())


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 2.0])
def test_each_node_has_its_own_clock(shape: float) -> None:
    """New nodes fail as often as renewal processes do, one for each node; burnt-in ones as often as their MTBF says."""
    nodes, mean, days, runs = 50, 10 * DAY_S, 5.0, 400
    new = SimulatedCluster(nodes, mean, shape=shape, burnt_in=False)
    fresh, old = (simulate(each, HOUR, days, runs).failures for each in (new, replace(new, burnt_in=True)))
    expected = counted(shape, nodes, mean, days * DAY_S, 2000)
    assert abs(fresh.mean() - expected) < 4 * fresh.std() / math.sqrt(runs)
    assert abs(old.mean() - nodes * days / 10) < 4 * old.std() / math.sqrt(runs)
    assert bool(expected > 1.3 * old.mean()) == (shape < 0.8) and bool(expected < 0.7 * old.mean()) == (shape > 1)


def test_many_nodes_together_are_nearly_memoryless_whatever_each_is() -> None:
    """A Weibull of the same shape for the job's own failures would spread sqrt(5) times as widely as its mean."""
    runs, nodes = 200, 500
    cluster = SimulatedCluster(nodes, 1.0, shape=0.5)
    clocks = Clocks(cluster, runs, np.random.default_rng(0))
    times = []
    for _ in range(100):
        at, kind = clocks.next()
        clocks.strike(at, kind, np.ones(runs, dtype=bool))
        times.append(at)
    between = np.diff(np.array(times), axis=0)
    assert between.mean() * nodes == pytest.approx(1.0, rel=0.05)
    assert between.std() / between.mean() == pytest.approx(1.0, rel=0.1)


def test_a_shape_of_1_is_memoryless() -> None:
    """Then the age of nodes does not matter, and the closed form holds."""
    costs = {"detection_s": 30.0, "recovery_s": 300.0, "stall_s": 10.0, "write_s": 60.0}
    for burnt_in in (True, False):
        cluster = SimulatedCluster(20, 20 * HOUR, shape=1.0, burnt_in=burnt_in, **costs)
        found = simulate(cluster, 600.0, 30, runs=200)
        assert abs(found.mean - cluster.formula(600.0)) < 4 * found.standard_error


# --- limits and properties ----------------------------------------------------------------------------------------


def test_without_failures_there_are_only_stalls() -> None:
    found = simulate(SimulatedCluster(4, math.inf, stall_s=5.0, write_s=60.0, recovery_s=1e6), 95.0, days=1, runs=3)
    assert found.shares == pytest.approx(
        {"productive": 0.95, "stalled": 0.05} | dict.fromkeys(PARTS[1:2] + PARTS[3:], 0)
    )
    assert found.failures.sum() == 0 and found.standard_error < 1e-12


def test_a_rack_takes_all_its_nodes_at_once() -> None:
    """With one spare less than a rack has nodes, each of its failures is waited for; with as many, none is."""
    cluster = SimulatedCluster(8, math.inf, rack_nodes=4, rack_mtbf_s=200 * HOUR, repair_s=HOUR, spares=3)
    short = simulate(cluster, HOUR, 30, runs=50)
    # An hour each, or less when the end or the other rack's failure comes first.
    assert short.waiting_s.sum() == pytest.approx(short.rack_failures.sum() * HOUR, rel=0.02)
    enough = simulate(replace(cluster, spares=8), HOUR, 30, runs=50)
    assert enough.waiting_s.sum() < 0.01 * short.waiting_s.sum() and enough.node_failures.sum() == 0


def test_a_rack_that_fails_again_loses_no_node_that_is_still_missing() -> None:
    """Else its repairs would begin anew each time, and the job would hardly ever be complete."""
    cluster = SimulatedCluster(2, math.inf, rack_nodes=2, rack_mtbf_s=HOUR, repair_s=10 * HOUR)
    found = simulate(cluster, 60.0, 60, runs=50)
    assert found.shares["waiting"] == pytest.approx(10 / 11, rel=0.01)
    assert found.rack_failures.mean() == pytest.approx(60 * 24, rel=0.02)  # the others strike an empty rack


def test_more_spares_more_time_between_failures_and_less_repair_never_hurt() -> None:
    plain = SimulatedCluster(64, 500 * HOUR, recovery_s=600.0, stall_s=20.0, repair_s=12 * HOUR, spares=1)

    def mean(**changes: Any) -> float:
        return simulate(replace(plain, **changes), 1800.0, 30, runs=200).mean

    assert mean(spares=0) < mean() < mean(spares=3) < mean(spares=8)
    assert mean(node_mtbf_s=200 * HOUR) < mean() < mean(node_mtbf_s=2000 * HOUR)
    assert mean(repair_s=24 * HOUR) < mean() < mean(repair_s=HOUR)


clusters = st.builds(
    SimulatedCluster,
    nodes=st.integers(1, 9),
    node_mtbf_s=st.floats(600, 1e7),
    shape=st.floats(0.4, 3),
    burnt_in=st.booleans(),
    process_mtbf_s=st.floats(600, 1e7) | st.just(math.inf),
    rack_nodes=st.integers(1, 4),
    rack_mtbf_s=st.floats(5000, 1e7) | st.just(math.inf),
    detection_s=st.floats(0, 300),
    recovery_s=st.floats(0, 3000),
    process_recovery_s=st.none() | st.floats(0, 300),
    stall_s=st.floats(0, 100),
    write_s=st.floats(0, 1000),
    spares=st.integers(0, 4),
    repair_s=st.floats(0, 1e5),
)


@given(clusters, st.floats(1, 1e5), st.floats(0.01, 3), st.integers(0, 9))
def test_the_parts_add_up_to_the_wall_time(cluster: SimulatedCluster, interval: float, days: float, seed: int) -> None:
    found = simulate(cluster, interval, days, runs=4, seed=seed)
    assert adds_up(found)
    assert bool(((found.goodput >= 0) & (found.goodput <= 1 + 1e-12)).all())


def test_a_number_of_numpys_is_a_number() -> None:
    cluster = SimulatedCluster(np.int64(4), np.float64(1e6))  # type: ignore[arg-type]
    assert simulate(cluster, np.float32(60.0), 1, np.int32(2)).failures.shape == (2,)  # type: ignore[arg-type]


def test_a_seed_gives_the_same_outcome_again() -> None:
    cluster = SimulatedCluster(8, 50 * HOUR, shape=0.7, process_mtbf_s=90 * HOUR, rack_nodes=2, rack_mtbf_s=300 * HOUR)
    one, same, other = (simulate(cluster, 900.0, 10, runs=5, seed=seed) for seed in (4, 4, 5))
    assert (one.goodput == same.goodput).all() and (one.failures == same.failures).all()
    assert (one.goodput != other.goodput).all() and len(set(one.goodput)) == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": 2.5}, "nodes"),
        ({"nodes": True}, "nodes"),
        ({"node_mtbf_s": 0.0}, "node_mtbf_s"),
        ({"shape": math.nan}, "shape"),
        ({"shape": 1e-5}, "shape"),
        ({"shape": 1e9}, "shape"),
        ({"repair_s": -1.0}, "repair_s"),
        ({"process_recovery_s": -1.0}, "process_recovery_s"),
        ({"spares": -1}, "spares"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SimulatedCluster(**({"nodes": 4, "node_mtbf_s": 1e6} | change))
    with pytest.raises(UsageError, match="in seconds"):
        simulate(SimulatedCluster(2048, 264.0), 60.0, days=54)  # days, where seconds were meant
    with pytest.raises(UsageError, match="days"):
        simulate(SimulatedCluster(4, 1e6), 60.0, days=0)
    with pytest.raises(UsageError, match="runs"):
        simulate(SimulatedCluster(4, 1e6), 60.0, runs=0)
    with pytest.raises(UsageError, match="runs"):
        simulate(SimulatedCluster(4, 1e6), 60.0, runs=2.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="seed"):
        simulate(SimulatedCluster(4, 1e6), 60.0, seed=-1)
