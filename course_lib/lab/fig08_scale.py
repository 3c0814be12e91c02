"""The figures of notebook 08 about large clusters: what failed, how often to save, and what each measure buys."""

import math
from collections.abc import Mapping

import numpy as np

from course_lib.lab import llama3, scale
from course_lib.lab.economics import best_interval, daly, goodput, young
from course_lib.lab.fig05 import ORANGE, PURPLE, SKY, figure_of
from course_lib.lab.fig08 import THREE, mark_three
from course_lib.lab.plots import BLUE, DARK, GREEN, VERMILION, NotebookFigure
from course_lib.lab.report_figures import SLATE
from course_lib.lab.simulator import Outcome, simulate

PART_COLORS = {"productive": GREEN, "stalled": PURPLE, "replayed": ORANGE, "recovering": VERMILION, "waiting": SLATE}
MEASURE_COLORS = dict(zip(scale.MEASURES, ("#777777", VERMILION, ORANGE, SKY, BLUE), strict=True))
Scaled = Mapping[int, Mapping[str, Outcome]]
_NODES_RUNS = 30_000  # nodes times runs: as many as take a second or two


def causes(least: int = 3) -> NotebookFigure:
    """What interrupted Llama 3's training, coloured by what it takes from the job; the rarest are one bar."""
    rare = sum(count for count in llama3.CAUSES.values() if count < least)
    bars = {cause: count for cause, count in llama3.CAUSES.items() if count >= least}
    bars[f"others, each below {least}"] = rare
    takes = {"a node": VERMILION, "a rack": PURPLE, "the processes alone": SKY}
    figure, (ax,) = figure_of(0.7 + 0.25 * len(bars))
    for row, (cause, count) in enumerate(bars.items()):
        kind = "a rack" if cause in llama3.RACK_CAUSES else "a node"
        kind = "the processes alone" if cause in llama3.PROCESS_CAUSES else kind
        ax.barh(row, count, height=0.72, color=SLATE if cause.startswith("others") else takes[kind])
        ax.text(count + 1.5, row, str(count), va="center", size=9)
    for line, (words, color) in enumerate([*takes.items(), ("one of these", SLATE)]):
        ax.text(0.57, 0.3 - 0.09 * line, f"■ takes {words}", color=color, transform=ax.transAxes, weight="bold")
    ax.set_yticks(range(len(bars)), list(bars))
    ax.set(xlabel="interruptions in 54 days", ylim=(len(bars) - 0.4, -0.6), xlim=(0, 165))
    ax.tick_params(left=False)
    return figure


def intervals(mtbf_s: float, recovery_s: float, stalls: Mapping[str, tuple[float, float]]) -> NotebookFigure:
    """Goodput over the interval for each way of saving, which has a stall and a write; Young, Daly and the optimum."""
    figure, (ax,) = figure_of(3.6)
    ax.set_xscale("log")
    at = np.geomspace(15, 6 * 3600, 400)
    for (words, (stall, write)), color in zip(stalls.items(), (ORANGE, BLUE, GREEN), strict=False):
        costs = {"mtbf_s": mtbf_s, "stall_s": stall, "recovery_s": recovery_s, "write_s": write}
        lowest = max(at[0], write)
        xs = at[at >= lowest]
        ax.plot(xs, [100 * goodput(x, **costs) for x in xs], color=color, lw=2.2)
        best = best_interval(stall, mtbf_s, write)
        three = young(stall, mtbf_s), daly(stall, mtbf_s), best
        mark_three(ax, [(x, 100 * goodput(x, **costs)) for x in three], color)
        top, above = 100 * goodput(best, **costs), color != ORANGE
        told = f"{words}:\n{top:.0f} % at {_time(best)}"
        ax.annotate(told, (best, top), (0, 10 if above else -26), textcoords="offset points", color=color, size=9,
                    weight="bold", ha="center", va="bottom" if above else "top")  # fmt: skip
    ax.text(0.5, 0.05, THREE, transform=ax.transAxes, color=DARK, ha="center")
    ax.set_xticks([15, 60, 300, 1200, 3600, 4 * 3600], ["15 s", "1 min", "5 min", "20 min", "1 h", "4 h"])
    ax.set_xticks([], minor=True)
    ax.set(xlabel="training between two snapshots", ylabel="goodput in %", ylim=(40, 104), xlim=(at[0], at[-1]))
    return figure


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def simulated(days: float = llama3.DAYS) -> dict[int, dict[str, Outcome]]:
    """Each size with each measure, and those before it, at its best interval."""
    found: dict[int, dict[str, Outcome]] = {}
    for gpus in scale.SIZES:
        runs = max(2, min(200, _NODES_RUNS // (gpus // llama3.GPUS_PER_NODE)))
        found[gpus] = {
            name: simulate(cluster, scale.interval_for(cluster), days, runs)
            for name, cluster in scale.ladder(gpus).items()
        }
    return found


def sizes(found: Scaled) -> NotebookFigure:
    """Goodput over the number of GPUs, a line for each measure."""
    figure, (ax,) = figure_of(4.0)
    ax.set_xscale("log")
    gpus = list(found)
    free = -math.inf
    ends = sorted(scale.MEASURES, key=lambda name: found[gpus[-1]][name].mean)
    places: dict[str, float] = {}
    for name in ends:
        places[name] = free = max(100 * found[gpus[-1]][name].mean, free + 6.5)
    for name in scale.MEASURES:
        means = [100 * found[size][name].mean for size in gpus]
        ax.plot(gpus, means, "o-", color=MEASURE_COLORS[name], lw=2.2, ms=6)
        words = name if name == "nothing" else f"+ {name}"
        ax.text(gpus[-1] * 1.25, places[name], f"{words}: {means[-1]:.0f} %", color=MEASURE_COLORS[name], va="center",
                weight="bold", size=9)  # fmt: skip
    ax.set_xticks(gpus, [f"{size:,}" for size in gpus])
    ax.set_xticks([], minor=True)
    ax.set(xlabel="GPUs", ylabel="goodput in %", ylim=(-4, 103), xlim=(gpus[0] * 0.8, gpus[-1] * 60))
    return figure


def where(found: Scaled, gpus: int) -> NotebookFigure:
    """Where the time of one size goes, a bar for each measure."""
    outcomes = found[gpus]
    figure, (ax,) = figure_of(3.0)
    for row, outcome in enumerate(outcomes.values()):
        left = 0.0
        for part, color in PART_COLORS.items():
            width = 100 * outcome.shares[part]
            ax.barh(row, width, left=left, height=0.7, color=color, ec="white", lw=0.6)
            if width > 3.4:
                ink = "black" if part == "replayed" else "white"
                ax.text(left + width / 2, row, f"{width:.0f}", ha="center", va="center", size=9, color=ink)
            left += width
    x = 0.0
    for part, color in PART_COLORS.items():
        ax.text(x, 1.02, f"■ {part}", color=color, transform=ax.transAxes, size=9, weight="bold", va="bottom")
        x += 0.014 * len(part) + 0.05
    ax.set_yticks(range(len(outcomes)), [name if name == "nothing" else f"+ {name}" for name in outcomes])
    ax.set(ylim=(len(outcomes) - 0.4, -0.6), xlim=(0, 100), xlabel=f"% of the time of {gpus:,} GPUs")
    ax.tick_params(left=False)
    return figure
