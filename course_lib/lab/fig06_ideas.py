"""The figures of notebook 06 that explain: shares, the tree of the sum, what settings cost, two halves, own times."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course_lib.engine import UsageError
from course_lib.engine.halves import refuse_halves
from course_lib.engine.order import share as engine_share
from course_lib.engine.shards import _middle
from course_lib.lab.answers import is_open
from course_lib.lab.elastic_claims import own_times
from course_lib.lab.fig05 import ORANGE, PURPLE, SKY, figure_of
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure

RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY)  # the colour of each rank
Share = Callable[[int, int, int, int], tuple[int, int]]


def shares(share: Share, start: int = 128, stop: int = 192, most: int = 5) -> NotebookFigure:
    """Who takes which of a step's samples, for each number of ranks, by the learner's own function."""
    figure, (ax,) = figure_of(0.9 + 0.38 * most)
    for ranks in range(1, most + 1):
        for rank in range(ranks):
            try:
                low, high = (int(end) for end in share(start, stop, rank, ranks))
            except (TypeError, ValueError, ArithmeticError):
                low, high = start, start
            if is_open(share) or not start - 999 < low <= high < stop + 999:
                low, high = start, start
            ax.barh(ranks, high - low, left=low, height=0.68, color=RANKS[rank], ec="white")
            if high > low:
                ax.text((low + high) / 2, ranks, f"rank {rank}: {high - low}", ha="center", va="center", size=9,
                        color="white", weight="bold")  # fmt: skip
    ax.set_yticks(range(1, most + 1), [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in range(1, most + 1)])
    ax.set(ylim=(most + 0.5, 0.5), xlim=(start, stop), xticks=[start, stop])
    ax.set_xlabel("a step's samples, by their place in the epoch's order", labelpad=-8)
    ax.tick_params(left=False)
    return figure


def tree(shards: int = 4, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> NotebookFigure:
    """The tree in which the gradients of a step's shards are summed, once for each number of ranks.

    A box has the colour of the rank that has it; a red line is a sum that travels from one rank to another.
    """
    figure, panels = figure_of(2.5, len(sizes))
    for ax, ranks in zip(panels, sizes, strict=True):
        _draw_tree(ax, 0, shards, shards, ranks)
        depth = (shards - 1).bit_length()
        ax.set(xlim=(-0.6, shards - 0.4), ylim=(-0.75, depth + 0.5))
        ax.set_title(f"{ranks} rank{'s' * (ranks > 1)}", size=10, weight="bold")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[:].set_visible(False)
        for shard in range(shards):
            ax.text(shard, -0.55, f"shard {shard}" if shards < 3 else str(shard), ha="center", size=9, color=DARK)
    panels[0].set_ylabel("one sum for all", color=DARK)
    panels[0].set_xlabel("shards", color=DARK)
    return figure


def _owner(shard: int, shards: int, ranks: int) -> int:
    return next(rank for rank in range(ranks) if shard < engine_share(0, shards, rank, ranks)[1])


def _draw_tree(ax: Axes, low: int, high: int, shards: int, ranks: int) -> tuple[float, float]:
    """Draw the node over [low, high) and what is below it; returns where it stands."""
    owner = _owner(low, shards, ranks)
    if high - low == 1:
        x, y = float(low), 0.0
    else:
        middle = _middle(low, high)
        left, right = _draw_tree(ax, low, middle, shards, ranks), _draw_tree(ax, middle, high, shards, ranks)
        x, y = (left[0] + right[0]) / 2, max(left[1], right[1]) + 1
        for (cx, cy), first in ((left, low), (right, middle)):
            travels = _owner(first, shards, ranks) != owner
            ax.plot([cx, x], [cy, y], color=VERMILION if travels else GREY, lw=2.5 if travels else 1.5, zorder=1)
    ax.add_patch(Rectangle((x - 0.36, y - 0.24), 0.72, 0.48, fc=RANKS[owner], ec="white", zorder=2))
    ax.text(x, y, f"r{owner}", ha="center", va="center", color="white", weight="bold", size=9, zorder=3)
    return x, y


def losses(record: Mapping[str, Any]) -> NotebookFigure:
    """For each recorded setting, from the loss of a node to the next step: the part that the settings decide, and
    the start of a worker."""
    figure, (ax,) = figure_of(0.9 + 0.5 * len(record["losses"]))
    for row, found in enumerate(record["losses"].values()):
        settings, noticed, stepped = found["settings"], found["until_new_worker"], found["until_next_step"]
        ax.barh(row, noticed, height=0.6, color=VERMILION)
        ax.barh(row, stepped - noticed, left=noticed, height=0.6, color=GREY)
        words = f"{settings['keep_alive_interval']} s × {settings['keep_alive_max_attempt']}"
        words += f" + {settings['last_call_timeout']} s"
        ax.text(stepped + 0.5, row, f"{stepped:.0f} s  ({words})", va="center", color=DARK)
    for x, (words, color) in enumerate({"nobody trains: noticing, last call": VERMILION, "start of a worker": "#8A8A8A"
                                        }.items()):  # fmt: skip
        ax.text(0.25 + 0.45 * x, 1.02, f"■ {words}", color=color, transform=ax.transAxes, weight="bold", size=9)
    ax.set_yticks(range(len(record["losses"])), list(record["losses"]))
    ax.set(xlabel="seconds from the loss of a node to the next step", ylim=(len(record["losses"]) - 0.4, -0.6))
    ax.set_xlim(0, 1.45 * max(found["until_next_step"] for found in record["losses"].values()))
    ax.tick_params(left=False)
    return figure


def refused(low: int, high: int) -> bool:
    """Whether the engine refuses --nnodes low:high where the nodes share no disk."""
    try:
        refuse_halves((low, high))
    except UsageError:
        return True
    return False


def halves(most: int = 8) -> NotebookFigure:
    """Each --nnodes MIN:MAX: the larger and the smaller half, of which one or both could go on."""
    figure, (ax,) = figure_of(3.6)
    for high in range(1, most + 1):
        for low in range(1, high + 1):
            color = VERMILION if refused(low, high) else GREEN
            ax.add_patch(Rectangle((high - 0.46, low - 0.46), 0.92, 0.92, fc=color, ec="white"))
            if refused(low, high):
                words = f"{high - high // 2}|{high // 2}"
                ax.text(high, low, words, ha="center", va="center", color="white", weight="bold", size=9)
    told = {
        "green: of two halves\none at most has MIN": GREEN,
        "red: two halves could\nboth go on, such as\nthese": VERMILION,
    }
    for y, (words, color) in enumerate(told.items()):
        ax.text(most + 0.7, most - 1 - 2.5 * y, words, color=color, va="top", weight="bold")
    ax.set(xlim=(0.4, most + 3.4), ylim=(0.4, most + 0.6), xticks=range(1, most + 1), yticks=range(1, most + 1))
    ax.set(xlabel="MAX", ylabel="MIN")
    return figure


def slow_rank(run: Path | str, ranks: int) -> NotebookFigure:
    """A bar for each rank: how long a step took, and which part of that the rank was busy itself."""
    times = own_times(run, ranks)
    figure, (ax,) = figure_of(0.9 + 0.45 * len(times))
    for rank, (whole, own) in times.items():
        ax.barh(rank, whole * 1e3, height=0.62, color=GREY)
        others = median([mine for other, (_, mine) in times.items() if other != rank] or [own])
        ax.barh(rank, own * 1e3, height=0.62, color=VERMILION if own > 2 * others else BLUE)
    longest = max(whole for whole, _ in times.values()) * 1e3
    for x, (words, color) in enumerate({"by itself": DARK, "waits for the others": "#8A8A8A"}.items()):
        ax.text(0.3 + 0.25 * x, 1.02, f"■ {words}", color=color, transform=ax.transAxes, weight="bold", size=9)
    ax.set_yticks(list(times), [f"rank {rank}" for rank in times])
    ax.set(xlabel="milliseconds of a step (medians)", ylim=(len(times) - 0.4, -0.6), xlim=(0, 1.1 * longest))
    ax.tick_params(left=False)
    return figure
