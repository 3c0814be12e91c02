"""The figures of notebook 03: a ring all-reduce, two backward passes, samplers, batch sizes, and bugs as curves."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure
from course_lib.lab.ring import Ring
from course_lib.lab.two_ranks import Trace

SKY, ORANGE, LIGHT_BLUE = "#56B4E9", "#E69F00", "#4D9CC9"
PALE_GREEN, PALE_GREY = "#CFEBDD", "#EEEEEE"
SPAN = {"arrowstyle": "<->", "color": VERMILION, "shrinkA": 0, "shrinkB": 0}
BOLD: dict[str, Any] = {"loc": "left", "size": 12, "weight": "bold"}


def _figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    figure = NotebookFigure(figsize=(8, height), facecolor="white", layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


# --- the ring -----------------------------------------------------------------------------------------------------


def ring_figure(ring: Ring) -> Figure:
    """What each rank (a row) holds of each chunk (a column) before the first round and after each.

    The ring must have been run with a power of ten, 10**rank, in every chunk: the digits then tell what is in a sum.
    """
    ranks = len(ring.held[0])
    figure, axes = _figure(4.5, 2, ranks)
    panels = [axes[0], *axes[1:ranks], *axes[ranks + 1 :]]
    axes[ranks].axis("off")
    for ax in panels[len(ring.held) :]:
        ax.axis("off")
    for number, (ax, held) in enumerate(zip(panels, ring.held, strict=False)):
        name = f"round {number}" if number else "before"
        ax.set_title(name, size=10, color=DARK)
        _draw_chunks(ax, held, ring.rounds[number - 1] if number else [])
    words = (
        "A coloured bar is a rank whose\nvalue is in the sum. A thick\nframe: has just arrived.\n\n"
        "Numbers below: chunks.\nUpper row: reduce-scatter.\nLower row: all-gather."
    )
    axes[ranks].text(-0.15, 0.5, words, size=9, va="center", color=DARK, transform=axes[ranks].transAxes)
    done = all(str(int(value)) == "1" * ranks for row in ring.held[-1] for value in row)
    story = "and every rank has every sum" if done else "unfinished"
    title = f"{len(ring.rounds)} rounds, {story}"
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold")
    return figure


def _draw_chunks(ax: Axes, held: list[list[float]], messages: list[tuple[int, float]]) -> None:
    """A box for each chunk, with a bar for each rank whose value is in it; what just arrived has a thick frame."""
    ranks = len(held)
    colors = (BLUE, ORANGE, GREEN, VERMILION, SKY, DARK)
    arrived = {(rank, messages[rank - 1][0]) for rank in range(ranks)} if messages else set()
    for rank, row in enumerate(held):
        for c, value in enumerate(row):
            parts = [r for r in range(ranks) if f"{int(value):0{ranks}d}"[-1 - r] != "0"]
            new = (rank, c) in arrived
            edge, width = ("black", 2.2) if new else (GREY, 0.8)
            ax.add_patch(Rectangle((c + 0.06, rank + 0.08), 0.88, 0.84, fill=False, ec=edge, lw=width, zorder=3))
            for part in parts:
                corner = (c + 0.06 + 0.88 * part / ranks, rank + 0.08)
                ax.add_patch(Rectangle(corner, 0.88 / ranks, 0.84, color=colors[part % 6], lw=0, alpha=0.85))
    ax.set(xlim=(0, ranks), ylim=(ranks, 0), aspect="equal")
    ax.set_yticks(np.arange(ranks) + 0.5, [f"rank {r}" for r in range(ranks)], size=9)
    ax.set_xticks(np.arange(ranks) + 0.5, [str(c) for c in range(ranks)], size=9)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


# --- buckets and overlap ------------------------------------------------------------------------------------------


def hidden(times: Mapping[str, Any]) -> int:
    """How many all-reduces began before this rank's last gradient was ready."""
    last = max(t for _, t in times["gradients"])
    return sum(bucket["began"] < last for bucket in times["buckets"])


def overlap_figure(passes: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """For each name the ranks' backward passes: gradients as they got ready, and all-reduces below them."""
    figure, axes = _figure(1.2 + 1.9 * len(passes), len(passes), 1, sharex=True)
    for ax, (name, ranks) in zip(axes, passes.items(), strict=True):
        for rank, times in enumerate(ranks):
            _draw_pass(ax, times, rank)
        count = len(ranks[0]["buckets"])
        story = f"{name}: {hidden(ranks[0])} of {count} all-reduce{'s' * (count > 1)} began during backward"
        ax.set_title(story, loc="left", size=11, weight="bold")
        ax.set(ylim=(2 * len(ranks) - 0.3, -0.7))
        lanes = [lane for rank in range(len(ranks)) for lane in (f"rank {rank}: backward", "all-reduce")]
        ax.set_yticks(range(len(lanes)), lanes)
        ax.tick_params(left=False)
        ax.spines[["top", "right", "left"]].set_visible(False)
    end = max(_end(times) for ranks in passes.values() for times in ranks)
    axes[-1].set(xlabel="milliseconds since the backward pass began", xlim=(0, 1.14 * end))
    return figure


def _end(times: Mapping[str, Any]) -> float:
    return float(max(times["backward"][1], *(bucket["ended"] for bucket in times["buckets"])))


def _draw_pass(ax: Axes, times: Mapping[str, Any], rank: int) -> None:
    y, last = 2 * rank, max(t for _, t in times["gradients"])
    before = times["backward"][0]
    for i, (_, t) in enumerate(times["gradients"]):
        ax.barh(y, t - before, 0.6, before, color=BLUE if i % 2 else LIGHT_BLUE, lw=0)
        before = t
    for number, bucket in enumerate(times["buckets"], 1):
        ax.barh(y + 1, bucket["ended"] - bucket["began"], 0.6, bucket["began"], color=ORANGE, ec="white", lw=0.8)
        # Several can be on their way at once, but no two of them begin at once.
        ax.text(bucket["began"], y + 1, f" {number}", va="center", size=9)
    end = _end(times)
    ax.plot([last, last], [y - 0.35, y + 1.35], color=VERMILION, lw=1.2)
    ax.annotate("", (end, y), (last, y), arrowprops=SPAN, annotation_clip=False)
    ax.text(end, y, f" waits {end - last:.0f} ms", color=VERMILION, va="center", size=9)


# --- samplers -----------------------------------------------------------------------------------------------------


def shares_figure(ways: Mapping[str, Sequence[Sequence[int]]], right: Sequence[int] = ()) -> Figure:
    """For each way the samples of each rank, as boxes; one that came before is marked, and so are right answers."""
    figure, axes = _figure(0.5 + 1.1 * len(ways), len(ways), 1)
    longest = max(len(mine) for ranks in ways.values() for mine in ranks)
    for ax, (name, ranks) in zip(axes, ways.items(), strict=True):
        seen: set[int] = set()
        for row, mine in enumerate(ranks):
            for column, sample in enumerate(mine):
                twice, color = sample in seen, PALE_GREEN if sample in right else PALE_GREY
                seen.add(sample)
                edge = VERMILION if twice else "white"
                box = FancyBboxPatch((column + 0.1, row + 0.12), 0.8, 0.76, "round,pad=0", fc=color, ec=edge, lw=2)
                ax.add_patch(box)
                ax.text(column + 0.5, row + 0.5, str(sample), ha="center", va="center")
                if twice:
                    ax.text(column + 1.05, row + 0.5, "a second time", color=VERMILION, va="center")
        ax.set(xlim=(0, longest + 2), ylim=(len(ranks), 0))
        ax.set_yticks(np.arange(len(ranks)) + 0.5, [f"rank {rank}" for rank in range(len(ranks))])
        ax.set_xticks([])
        ax.tick_params(left=False)
        ax.spines[:].set_visible(False)
        ax.set_title(name, loc="left", size=11, weight="bold")
    return figure


# --- batch sizes and bugs -----------------------------------------------------------------------------------------


def curves_figure(curves: Mapping[str, Sequence[tuple[int, float]]], xlabel: str, ylabel: str, title: str) -> Figure:
    """Curves of (x, y), each named at its end; the names are moved apart where ends meet."""
    figure, (ax,) = _figure(3.6)
    colors, dashes = (GREY, VERMILION, BLUE, GREEN), ("-", "-", "-", "--")
    ends = sorted((points[-1][1], name) for name, points in curves.items())
    for i, points in enumerate(curves.values()):
        color = colors[i % 4]
        ax.plot(*zip(*points, strict=True), dashes[i % 4], color=color, lw=4 if color == GREY else 2)
    low, high = ax.get_ylim()
    y = low - (high - low)
    for value, name in ends:
        y = max(value, y + 0.075 * (high - low))
        color = colors[list(curves).index(name) % 4]
        ax.text(1.01, y, name, color=DARK if color == GREY else color, va="center", transform=ax.get_yaxis_transform())
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.margins(x=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, **BOLD)
    return figure


def bugs_figure(traces: Mapping[str, Trace], steps_per_epoch: int) -> Figure:
    """A panel for each trace: rank 0's distance from the one-process run, and the ranks' from each other."""
    figure, axes = _figure(0.6 + 1.05 * len(traces), len(traces), 1, sharex=True)
    for ax, (name, trace) in zip(axes, traces.items(), strict=True):
        steps = range(1, len(trace.from_single) + 1)
        top = max(*trace.from_single, *trace.between_ranks) or 1.0
        ax.plot(steps, trace.from_single, color=BLUE, lw=2, marker="o", ms=4, clip_on=False, zorder=3)
        ax.plot(steps, trace.between_ranks, "--", color=VERMILION, marker="s", ms=3, clip_on=False, zorder=4)
        for epoch in range(1, len(steps) // steps_per_epoch):
            ax.axvline(epoch * steps_per_epoch + 0.5, color=GREY, lw=1)
        ax.set(ylim=(-0.08 * top, 1.15 * top), yticks=[0], xlim=(0.5, len(steps) + 0.5), xticks=list(steps))
        ax.set_ylabel(name, rotation=0, ha="right", va="center", size=13, weight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("optimizer step (grey lines: ends of epochs)")
    title = "Rank 0 from the one-process run"
    axes[0].set_title(f"{title} (blue, dots), and the two ranks from each other (red, dashes)", loc="left", size=10)
    return figure
