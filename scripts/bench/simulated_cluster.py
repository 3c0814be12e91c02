"""Check the formulas and the simulator against each other, and show what they say of large clusters.

Daly's intervals against the figures of his paper; the simulator against his closed form, over a grid of MTBF, stall,
recovery and interval, within 1 % (asynchronous writes too, by our own formula); the time that 16,384 GPUs over 54 days
take; Llama 3's interruptions as a worked example; and what each measure buys from 8 to 131,072 GPUs. A claim that fails
gives exit code 1.
"""

import argparse
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.engine import UsageError, run
from course_lib.lab import llama3, scale
from course_lib.lab.cluster import DAY_S, SimulatedCluster
from course_lib.lab.economics import best_interval, daly, longest_recovery, young
from course_lib.lab.simulator import simulate

# Daly 2006, captions of figures 3 to 5: (MTBF, stall, his interval), all in minutes.
PUBLISHED = ((24 * 60.0, 5.0, 117.0), (6 * 60.0, 5.0, 57.0), (15.0, 5.0, 9.1))
MTBFS_S, STALLS_S, RECOVERIES_S, WRITES_S = (900.0, 3600.0, 86400.0), (5.0, 120.0), (60.0, 900.0), (0.0, 60.0)
STRETCHES = (0.3, 1.0, 3.0)  # of the best interval
FAILURES, RUNS = 1000, 200  # so many failures in each run, and more where the goodput is low
CLOSE, LIMIT_S = 0.01, 10.0


@dataclass(frozen=True)
class Point:
    """The goodput at one point of the grid: by the formula, by the simulator, and the latter's standard error."""

    mtbf_s: float
    stall_s: float
    recovery_s: float
    write_s: float
    interval_s: float
    formula: float
    simulated: float
    standard_error: float

    @property
    def off(self) -> float:
        """How far the simulator is from the formula, relatively."""
        return self.simulated / self.formula - 1


def places() -> list[tuple[float, float, float, float, float]]:
    """The grid: MTBF, stall, recovery, write and interval, in seconds."""
    costs = itertools.product(MTBFS_S, STALLS_S, RECOVERIES_S, WRITES_S)
    return [(*cost, best_interval(cost[1], cost[0]) * stretch) for cost in costs for stretch in STRETCHES]


def against_formula(place: tuple[float, float, float, float, float], runs: int, failures: int, seed: int) -> Point:
    """The simulator against the closed form: a few nodes, whose failures are memoryless and at once repaired."""
    mtbf, stall, recovery, write, interval = place
    detection, nodes = recovery / 3, 3
    times = {"detection_s": detection, "recovery_s": recovery - detection, "stall_s": stall, "write_s": write}
    cluster = SimulatedCluster(nodes, nodes * mtbf, **times)
    formula = cluster.formula(interval)
    # The less gets done between failures, the more of them the same precision needs.
    found = simulate(cluster, interval, failures / formula * mtbf / DAY_S, runs, seed)
    return Point(*place, formula, found.mean, found.standard_error)


def speed(runs: int) -> dict[str, float]:
    """The seconds that 16,384 GPUs over 54 days take, all measures taken, for so many runs."""
    cluster = scale.ladder(llama3.GPUS)["warm spares"]
    started = time.perf_counter()
    found = simulate(cluster, scale.interval_for(cluster), llama3.DAYS, runs)
    return {"runs": runs, "failures": float(found.failures.sum()), "seconds": time.perf_counter() - started}


def worked_example() -> dict[str, Any]:
    """What 466 interruptions in 54 days leave to a recovery when 90 % of the time is to be effective.

    Both for all interruptions and for the unexpected ones; snapshots that cost nothing are the most favourable case.
    """
    rows = {}
    for name, count in (("all interruptions", llama3.INTERRUPTIONS), ("unexpected ones", llama3.UNEXPECTED)):
        mtbf = llama3.DAYS * DAY_S / count
        for minutes in (2, 5, 10, 20, 30, 40):
            free = longest_recovery(llama3.EFFECTIVE_SHARE, 60 * minutes, mtbf_s=mtbf, stall_s=0.0)
            paid = longest_recovery(llama3.EFFECTIVE_SHARE, 60 * minutes, mtbf_s=mtbf, stall_s=5.0, write_s=60.0)
            rows[f"{name}, snapshot each {minutes} min"] = {"free": free / 60, "5 s stall, 60 s write": paid / 60}
    return rows


def scaled(runs: int, days: float, seed: int) -> list[dict[str, Any]]:
    """The goodput with each measure on top of those before, for each size; and where the rest of the time goes."""
    rows = []
    for gpus in scale.SIZES:
        for name, cluster in scale.ladder(gpus).items():
            interval = scale.interval_for(cluster)
            found = simulate(cluster, interval, days, runs, seed)
            row = {"gpus": gpus, "measure": name, "spares": cluster.spares, "interval_s": interval}
            row |= {"mtbf_s": cluster.mtbf_s, "goodput": found.mean, "standard_error": found.standard_error}
            rows.append(row | {"failures": float(found.failures.mean()), "shares": found.shares})
    return rows


def show(result: dict[str, Any], points: list[Point]) -> None:
    print("interval in minutes     Young    Daly  published   exact")
    for mtbf, stall, published in PUBLISHED:
        intervals = young(stall, mtbf), daly(stall, mtbf), published, best_interval(stall, mtbf)
        print(f"  MTBF {mtbf:5.0f}  stall {stall:2.0f}" + "".join(f"{value:9.2f}" for value in intervals))
    print("\n  MTBF  stall  recovery  write  interval   formula  simulated  standard error     off")
    for p in points:
        place = f"{p.mtbf_s:6.0f} {p.stall_s:6.0f} {p.recovery_s:9.0f} {p.write_s:6.0f} {p.interval_s:9.0f}"
        print(f"{place} {p.formula:9.4f} {p.simulated:10.4f} {p.standard_error:15.4f} {100 * p.off:+6.2f} %")
    print(
        f"\nLlama 3: MTBF of the job {llama3.MTBF_S / 3600:.2f} h, of a node {llama3.NODE_MTBF_S / DAY_S:.0f} days, ",
        end="",
    )
    print(f"of a GPU {llama3.GPU_MTBF_S / DAY_S / 365.25:.1f} years")
    print(f"the longest recovery, detection included, for {100 * llama3.EFFECTIVE_SHARE:.0f} % (minutes)")
    for name, row in result["worked example"].items():
        print(f"  {name:40}" + "".join(f"  {kind}: {minutes:5.1f}" for kind, minutes in row.items()))
    print(
        "\n   GPUs  measure, on top of those before  spares  interval s  goodput   replayed stalled recovering waiting"
    )
    for row in result["scale"]:
        parts = "".join(f"{share:10.3f}" for part, share in row["shares"].items() if part != "productive")
        size = f"{row['gpus']:7} {row['measure']:34} {row['spares']:6} {row['interval_s']:10.0f}"
        print(f"{size} {row['goodput']:9.4f} {parts}")
    took = result["speed"]
    print(f"\n16,384 GPUs over {llama3.DAYS} days, {took['runs']} runs: {took['seconds']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="simulated runs for each point")
    parser.add_argument("--failures", type=int, default=FAILURES, help="failures in each run of the grid, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the failures")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if options.runs < 2 or options.failures < 1:
        raise UsageError("--runs must be at least 2, --failures at least 1")
    points = [
        against_formula(place, options.runs, options.failures, options.seed + number)
        for number, place in enumerate(places())
    ]
    result: dict[str, Any] = {
        "grid": [vars(point) | {"off": point.off} for point in points],
        "worked example": worked_example(),
        "scale": scaled(min(options.runs, 40), llama3.DAYS, options.seed),
        "speed": speed(100),
    }
    claims = {
        "Daly's intervals are those of his paper": all(
            round(daly(stall, mtbf), 1 if published < 10 else 0) == published for mtbf, stall, published in PUBLISHED
        ),
        "the simulator is within 1 % of the formula": all(abs(point.off) < CLOSE for point in points),
        "the statistics support 1 %": all(3 * point.standard_error < CLOSE * point.formula for point in points),
        "16,384 GPUs over 54 days take less than 10 s": result["speed"]["seconds"] < LIMIT_S,
    }
    show(result, points)
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'FAILS':6} {claim}")
    if options.json is not None:
        options.json.write_text(
            json.dumps(result | {"claims": claims, "passed": all(claims.values())}, indent=1) + "\n"
        )
    sys.exit(0 if all(claims.values()) else 1)


if __name__ == "__main__":
    run(main)
