"""Exercises of notebook 08."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from course_lib.lab import checks, llama3
from course_lib.lab.answers import as_number
from course_lib.lab.checks import Exercise, case, match, predict, write
from course_lib.lab.cluster import SimulatedCluster
from course_lib.lab.economics import young as right_interval
from course_lib.lab.simulator import Outcome, simulate

# --- the goodput of a ledger --------------------------------------------------------------------------------------

Seconds = Mapping[str, float]
_DAY = {"productive": 60.0, "stalled": 4.0, "replayed": 10.0, "starting": 2.0, "recovering": 20.0, "idle": 4.0}
_ALL = {**_DAY, "evaluating": 9.0, "lost": 7.0, "unattributed": 1.0}


def _share(seconds: Seconds) -> float:
    return seconds["productive"] / sum(seconds.values())


def _counts_also(kind: str) -> Callable[[Seconds], float]:
    """Such as what was done again, which looks like training."""
    return lambda seconds: (seconds["productive"] + seconds.get(kind, 0.0)) / sum(seconds.values())


def _without(*kinds: str) -> Callable[[Seconds], float]:
    """Such as the time of a job that is not running, as if nobody paid for it."""
    return lambda seconds: _share({kind: value for kind, value in seconds.items() if kind not in kinds})


def _of_failures_alone(seconds: Seconds) -> float:
    return 1 - (seconds["replayed"] + seconds["recovering"]) / sum(seconds.values())


def _seconds(seconds: Seconds) -> float:
    return seconds["productive"]


def _rounded(seconds: Seconds) -> float:
    return round(_share(seconds), 1)


goodput = write(
    case(dict.fromkeys(_ALL, 0.0) | {"productive": 90.0, "starting": 10.0}, hint="give a share, from 0 to 1"),
    case(_DAY, hint="what was done again does not count twice, and idle machines are paid for, too"),
    case({"productive": 0.0, "recovering": 30.0}, hint="a job that only recovers has a goodput of 0"),
    case({"productive": 50.0, "unattributed": 50.0}, hint="what nobody can explain is still time"),
    case(_ALL, hint="only productive time counts, and all the time is what it is a share of; don't round"),
    solution=_share,
    wrong=[
        _counts_also("replayed"),
        _without("idle", "starting"),
        _of_failures_alone,
        _seconds,
        _counts_also("evaluating"),
        _counts_also("lost"),
        _without("evaluating", "lost"),
        _rounded,
    ],
    why="the time in steps that count, as a share of all the time",
    close=1e-9,
)


# --- the best interval --------------------------------------------------------------------------------------------


def _no_two(stall: float, mtbf: float) -> float:
    """Each failure takes a whole interval, not half of one."""
    return math.sqrt(stall * mtbf)


def _half(stall: float, mtbf: float) -> float:
    return math.sqrt(stall * mtbf / 2)


def _no_root(stall: float, mtbf: float) -> float:
    return 2 * stall * mtbf


def _turned(stall: float, mtbf: float) -> float:
    return math.sqrt(2 * mtbf / stall)


young = write(
    case(60.0, 10_800.0, hint="where does an interval cost as much in stalls as in work done again?"),
    case(2.0, 10_800.0, hint="a shorter stall lets you save more often"),
    case(60.0, 2_700.0, hint="four times as many failures: half the interval"),
    case(0.0, 100.0, hint="what costs nothing can be done all the time"),
    solution=right_interval,
    wrong=[_no_two, _half, _no_root, _turned],
    why="Young's formula of 1974: the square root of 2 x stall x MTBF",
    close=1e-6,
)


# --- to predict ---------------------------------------------------------------------------------------------------

minutes_lost = predict(
    14,
    wrong=[10, 12, 20, 24, 4],
    hints={
        10: "that is half an interval; but where is the newest snapshot that is whole, when the failure comes?",
        12: "the write doesn't come on average at half its length: until it is done, the snapshot can't be loaded",
        20: "that is the worst case of a snapshot without a write",
        24: "that is the worst case",
    },
    hint="half an interval on average, and until when can the newest snapshot not be loaded?",
    why="half an interval, and the whole write: until it is done, the snapshot before it is the newest",
)
sixteen_times = predict(
    5,
    wrong=[1.25, 20, 80, 10],
    hints={
        1.25: "sixteen times as many failures don't want sixteen times as many snapshots: each has its price",
        20: "the failures come sixteen times as often",
        80: "more failures want more snapshots, not fewer",
        10: "that is for four times as many GPUs",
    },
    hint="start from the 20 minutes: how does the square root of the MTBF change?",
    why="a sixteenth of the MTBF, and its square root is a quarter",
)


# --- a plan for a cluster -----------------------------------------------------------------------------------------

TARGET, MOST_SPARES, GPUS = 0.95, 8, 4_096
COSTS = {"stall_s": 20.0, "write_s": 120.0, "detection_s": 60.0, "recovery_s": 300.0, "repair_s": 86_400.0}
_RUNS = 100
_BLAME = {
    "stalled_s": "saving",
    "replayed_s": "doing work again",
    "recovering_s": "recovering",
    "waiting_s": "waiting for nodes that are in repair",
}


def planned(plan: Mapping[str, float]) -> Outcome:
    """The cluster of the exercise with so many spares, simulated with this interval for 54 days."""
    cluster: SimulatedCluster = llama3.cluster(GPUS, spares=int(plan["spares"]), **COSTS)
    return simulate(cluster, 60 * float(plan["minutes"]), llama3.DAYS, runs=_RUNS)


def _judge_plan(plan: Any) -> str | None:
    if not isinstance(plan, Mapping) or set(plan) != {"minutes", "spares"}:
        return "give a dict with the keys minutes, spares"
    minutes, spares = as_number(plan["minutes"]), as_number(plan["spares"])
    if minutes is None or not 0.1 <= minutes <= 10_000:
        return "minutes: give the training between two snapshots, from 0.1 to 10,000"
    if spares is None or not math.isfinite(spares) or spares != int(spares) or spares < 0:
        return "spares: give a whole number of nodes, 0 or more"
    if spares > MOST_SPARES:
        return f"{spares:g} nodes that stand by are {8 * spares:g} GPUs; you have been given {MOST_SPARES} nodes"
    outcome = planned({"minutes": minutes, "spares": spares})
    if outcome.mean >= TARGET:
        return None
    most = max(_BLAME, key=lambda part: float(getattr(outcome, part).mean()))
    return f"the simulator gives {outcome.mean:.1%}, and most of the rest is {_BLAME[most]}"


plan = Exercise(
    "write",
    _judge_plan,
    solution={"minutes": 22, "spares": 8},
    wrong=[
        {"minutes": 22, "spares": 2},
        {"minutes": 22, "spares": 13},
        {"minutes": 60, "spares": 8},
        {"minutes": 5, "spares": 8},
        {"minutes": 240, "spares": 8},
        {"minutes": 22, "spares": 7.5},
        {"minutes": 22},
    ],
    why=f"at least {TARGET:.0%} in the mean of {_RUNS} simulated jobs of 54 days",
)


# --- evidence -----------------------------------------------------------------------------------------------------

_JOBS = {
    "A": "a failure is noticed late",
    "B": "snapshots too seldom",
    "C": "nobody starts it again",
    "D": "the first batch comes late",
}
causes = match(
    _JOBS,
    wrong=[
        {letter: _JOBS[other] for letter, other in zip("ABCD", "DCBA", strict=True)},
        _JOBS | {"A": "the first batch comes late", "D": "a failure is noticed late"},
        _JOBS | {"A": "nobody starts it again", "C": "a failure is noticed late"},
        {"A": "a failure is noticed late"},
    ],
    hint="which kind of time is the largest after the productive one; and if it is the recovery, which phase of it?",
    why="each has its cure: a shorter timeout, a shorter interval, --max-restarts, a loader that starts at once",
)

# --- bets ---------------------------------------------------------------------------------------------------------

_BETS = {"A": False, "B": True, "C": False, "D": True, "E": False}
_PARTS = {
    "A": "part 6 (419 times in 54 days), its exercise",
    "B": "part 4 (how often)",
    "C": "part 4 (how often)",
    "D": "part 4 (how often), its last line on intervals",
    "E": "part 7 (from 8 to 131,072)",
}

bets = checks.bets(
    _BETS,
    _PARTS,
    wrong=[dict.fromkeys(_BETS, True), dict.fromkeys(_BETS, False), _BETS | {"E": True}, _BETS | {"B": 1}],
    why="B and D are true, and the other three are not",
)
