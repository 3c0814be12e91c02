"""The figures of notebook 08 that are drawn from runs: recoveries, where the time went, the curve over intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from course_lib.lab.anatomy import Recovery
from course_lib.lab.claims import events_used_once
from course_lib.lab.cluster import DAY_S, SimulatedCluster
from course_lib.lab.constants import Constants, window
from course_lib.lab.economics import best_interval, daly, goodput, young
from course_lib.lab.fig05 import ORANGE, PURPLE, SKY, figure_of
from course_lib.lab.goodput_claims import (
    goodput_of,
    measured_parts,
    mtbf_of,
    predicted_parts,
    report_of,
)
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure
from course_lib.lab.report_figures import KIND_COLORS, recovery_figure
from course_lib.lab.simulator import simulate

PART_COLORS = {"steps that count": GREEN, "between steps": SKY, "stalled": PURPLE, "done again": ORANGE}
PART_COLORS |= {"recovering": VERMILION}
# What a recovery consists of, in four parts that can be read from afar.
STAGES = {
    "notice, kill, meet again": ("failed starts", "detection", "kill", "idle", "launch", "rendezvous"),
    "start Python, import": ("process start", "import"),
    "join, load": ("process group", "data", "snapshot load"),
    "first batch, first step": ("evaluation", "first batch", "warm-up", "first step"),
}
THREE = "△ Young's   □ Daly's   ● the best"
STAGE_COLORS = dict(zip(STAGES, (VERMILION, ORANGE, SKY, GREEN), strict=True))


def recovery(run: Path | str) -> NotebookFigure:
    """The first recovery of a run, phase by phase and rank by rank."""
    return recovery_figure(report_of(run).recoveries[0])


def stages(found: Recovery) -> dict[str, float]:
    """The seconds of each stage; phases that could not be told apart count where the first of them does."""
    seconds = dict.fromkeys(STAGES, 0.0)
    for phase in found.phases:
        first = phase.name.split(" + ")[0]
        seconds[next(stage for stage, names in STAGES.items() if first in names)] += (phase.end - phase.begin) / 1e6
    return seconds


def restarts(runs: Mapping[str, Path | str]) -> NotebookFigure:
    """The first recovery of each run as a bar in stages, over the seconds since the death."""
    bars = {name: stages(report_of(run).recoveries[0]) for name, run in runs.items()}
    figure, (ax,) = figure_of(1.15 + 0.55 * len(bars))
    longest = max(sum(seconds.values()) for seconds in bars.values())
    for row, seconds in enumerate(bars.values()):
        _stack(ax, row, seconds, STAGE_COLORS, longest, "s")
        whole = sum(seconds.values())
        ax.text(whole + 0.01 * longest, row, f"{whole:.1f} s", va="center", weight="bold")
    _words_above(ax, STAGE_COLORS)
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(ylim=(len(bars) - 0.45, -0.55), xlim=(0, 1.1 * longest), xlabel="seconds since the death")
    ax.tick_params(left=False)
    return figure


def parts(run: Path | str, found: Constants, every: int) -> NotebookFigure:
    """Where a run's time went from its first step to its last, and where the simulator says that it goes."""
    bars = {"measured": measured_parts(run), "predicted": predicted_parts(run, found, every)}
    figure, (ax,) = figure_of(2.2)
    for row, shares in enumerate(bars.values()):
        _stack(ax, row, {part: 100 * share for part, share in shares.items()}, PART_COLORS, 100, "%")
    _words_above(ax, PART_COLORS)
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(ylim=(len(bars) - 0.45, -0.55), xlim=(0, 100), xlabel="% of the time from the first step to the last")
    ax.tick_params(left=False)
    return figure


def curve(run: Path | str, found: Constants, every: int) -> NotebookFigure:
    """Goodput over the snapshot interval for the run's constants and its failures, and the run itself as a point.

    The upper curve is for snapshots that are written while training goes on, the lower one for the same snapshots if
    training waited for the disk. The bar is where eight of ten jobs end that are as short as this one.
    """
    mtbf_s = mtbf_of(run)
    recovery_s, share = found.recovery_s, 100 * found.step_share
    interval_s = every * found.pace_s
    ways = {
        "written while it trains": (BLUE, found.stall_s, found.write_s),
        "training waits for the write": (ORANGE, found.stall_s + found.write_s, 0.0),
    }
    figure, (ax,) = figure_of(4.0)
    at = np.geomspace(found.pace_s, 30 * interval_s, 300).tolist()
    ax.set_xscale("log")
    for line, (words, (color, stall_s, write_s)) in enumerate(ways.items()):
        costs = {"mtbf_s": mtbf_s, "stall_s": stall_s, "recovery_s": recovery_s, "write_s": write_s}
        ax.plot(at, [share * goodput(x, **costs) for x in at], color=color, lw=2, zorder=3)
        ax.text(0.02, 0.19 - 0.07 * line, f"— {words}", transform=ax.transAxes, color=color, size=9, weight="bold")
        three = young(stall_s, mtbf_s), daly(stall_s, mtbf_s), best_interval(stall_s, mtbf_s, write_s)
        mark_three(ax, [(x, share * goodput(x, **costs)) for x in three], color)
    begin, end = window(events_used_once(run))
    job = SimulatedCluster(1, mtbf_s, recovery_s=recovery_s, stall_s=found.stall_s, write_s=found.write_s)
    chance = simulate(job, interval_s, (end - begin) / DAY_S, runs=500).goodput
    low, high = share * np.quantile(chance, [0.1, 0.9])
    ax.plot([interval_s] * 2, [low, high], color=GREY, lw=7, solid_capstyle="butt", zorder=2)
    ax.text(interval_s * 1.12, max(low, 12), "eight of ten\njobs so short", color=DARK, size=9, va="top")
    mine = 100 * goodput_of(run)
    ax.plot(interval_s, mine, "*", color=VERMILION, ms=17, mec="white", zorder=6)
    y, va = (mine - 4, "top") if mine < low else (max(high, mine + 3) + 1, "bottom")
    ax.text(interval_s, y, "your run", color=VERMILION, weight="bold", ha="center", va=va)
    ax.text(0.02, 0.05, THREE, transform=ax.transAxes, color=DARK)
    ax.set(xlabel="seconds of training between two snapshots", ylabel="goodput in %", ylim=(0, 100))
    ax.set_xlim(at[0] / 1.7, at[-1])
    ax.xaxis.set_major_formatter(lambda x, place: f"{x:g}")
    return figure


def mark_three(ax: Axes, points: Sequence[tuple[float, float]], color: str) -> None:
    """Young's and Daly's intervals and the best one on a curve, all to be seen where they are the same."""
    for (x, y), marker, size in zip(points, "^so", (17, 10, 5), strict=True):
        filled = color if marker == "o" else "none"
        ax.plot(x, y, marker, color=color, mfc=filled, mec=color, ms=size, mew=1.5, zorder=5)


def _stack(ax: Axes, row: int, values: Mapping[str, float], colors: Mapping[str, str], whole: float, unit: str) -> None:
    """A bar in parts, each with its number where there is room."""
    left = 0.0
    for name, value in values.items():
        ax.barh(row, value, left=left, height=0.66, color=colors[name], ec="white", lw=0.8)
        if value > 0.075 * whole:
            digits = 0 if unit == "%" else 1
            ink = "black" if colors[name] in (ORANGE, SKY) else "white"
            ax.text(left + value / 2, row, f"{value:.{digits}f} {unit}", ha="center", va="center", color=ink, size=9,
                    weight="bold")  # fmt: skip
        left += value


def _words_above(ax: Axes, colors: Mapping[str, str]) -> None:
    """The parts' names in their colours, in one line above the axes."""
    x = 0.0
    for name, color in colors.items():
        ax.text(x, 1.03, f"■ {name}", color=color, transform=ax.transAxes, size=9, weight="bold", va="bottom")
        x += 0.014 * len(name) + 0.045


def jobs(record: Mapping[str, Any]) -> NotebookFigure:
    """The recorded jobs as lanes over the seconds, in the colours of the ledger."""
    found = record["jobs"]
    figure, (ax,) = figure_of(1.1 + 0.5 * len(found))
    longest = max(job["wall_s"] for job in found.values())
    colors = KIND_COLORS | {"idle": GREY}
    for row, job in enumerate(found.values()):
        for kind, begin, end in job["pieces"]:
            ax.barh(row, end - begin, left=begin, height=0.66, color=colors[kind], lw=0)
    seconds = {kind: sum(job["seconds"][kind] for job in found.values()) for kind in colors}
    _words_above(ax, {kind: color for kind, color in colors.items() if seconds[kind] > 0.02 * longest})
    ax.set_yticks(range(len(found)), [f"job {letter}" for letter in found])
    ax.set(ylim=(len(found) - 0.45, -0.55), xlim=(0, longest), xlabel="seconds since the first process began")
    ax.tick_params(left=False)
    return figure
