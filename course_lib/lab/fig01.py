"""The figures of notebook 01: one weight, parts of a batch, samples seen, the learning curve, where time goes."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, Event, NotebookFigure
from course_lib.workloads.data import ImageData

ORANGE, SKY, PURPLE = "#E69F00", "#56B4E9", "#CC79A7"
PHASES = {"data": ORANGE, "forward": SKY, "backward": BLUE, "optimizer": GREEN, "loss.item()": PURPLE}
DARK_PHASES = ("backward", "optimizer")  # whose blocks want white letters
Interval = tuple[str, float, float]  # phase, begin, end; in seconds
Look = tuple[int, str, float, float | None]  # step, move, weight, gradient (None: there is none)


def digits(data: ImageData) -> NotebookFigure:
    """The first two training images of each class, a column per class."""
    figure = NotebookFigure(figsize=(8, 1.9))
    found: dict[int, list[Any]] = {label: [] for label in range(10)}
    for image, label in (data.train[i] for i in range(100)):
        found[label].append(image[0])
    for label, images in found.items():
        for row in range(2):
            ax = figure.add_subplot(2, 10, 1 + row * 10 + label)
            ax.imshow(images[row], cmap="gray")
            ax.set_axis_off()
            if row == 0:
                ax.set_title(f"“{label}”", size=11)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.87, wspace=0.05, hspace=0.05)
    return figure


def one_weight(trace: Sequence[Look]) -> NotebookFigure:
    """The gradient (above) and the value (below) of one weight after each move of some steps."""
    figure = NotebookFigure(figsize=(8, 3.9))
    top, bottom = figure.subplots(2, 1, sharex=True)
    x = np.arange(len(trace))
    edges = np.arange(len(trace) + 1) - 0.5
    gradients = [np.nan if look[3] is None else look[3] for look in trace]
    top.axhline(0, color=GREY, lw=1)
    top.stairs(gradients, edges, baseline=None, color=PHASES["backward"], lw=2)
    bottom.stairs([look[2] for look in trace], edges, baseline=None, color=PHASES["optimizer"], lw=2)
    for ax, words, color in ((top, "its gradient", "backward"), (bottom, "the weight", "optimizer")):
        ax.set_ylabel(words, color=PHASES[color])
        ax.spines[["top", "right"]].set_visible(False)
        for i, (_, move, *_) in enumerate(trace):
            if move in ("backward", "optimizer"):
                ax.axvspan(i - 0.5, i + 0.5, color=PHASES[move], alpha=0.13, lw=0)
    for i in (i for i, gradient in enumerate(gradients) if np.isnan(gradient)):
        top.text(i, 0, "none", color=DARK, ha="center", va="bottom", size=9)
    bottom.set_xticks(x, [look[1] for look in trace], rotation=35, ha="right", rotation_mode="anchor")
    for step in sorted({look[0] for look in trace}):
        places = [i for i, look in enumerate(trace) if look[0] == step]
        top.text((places[0] + places[-1]) / 2, 1.03, f"step {step}", ha="center", transform=top.get_xaxis_transform())
        if step:
            for ax in (top, bottom):
                ax.axvline(places[0] - 0.5, color=GREY, lw=1, ls=":")
    bottom.margins(y=0.15)
    bottom.set_xlim(edges[0], edges[-1])
    figure.align_ylabels()
    figure.tight_layout()
    return figure


def parts(
    whole: torch.Tensor, even: Sequence[torch.Tensor], uneven: Sequence[torch.Tensor], counts: tuple[int, int]
) -> NotebookFigure:
    """Gradients as points in the plane of the two weights in which the two uneven parts differ most."""
    figure = NotebookFigure(figsize=(8, 3.5))
    left, right = figure.subplots(1, 2)
    axes = (uneven[0] - uneven[1]).abs().topk(2).indices
    for ax, group, names in ((left, even, ["16"] * len(even)), (right, uneven, [str(count) for count in counts])):
        points = torch.stack([gradient[axes] for gradient in group]).numpy()
        ax.plot(*points.T, "o", color=SKY, mec=BLUE, ms=10)
        for point, name in zip(points, names, strict=True):
            ax.annotate(name, point, (0, -9), textcoords="offset points", color=BLUE, ha="center", va="top")
        ax.plot(*whole[axes].numpy(), "D", color=GREEN, ms=10, mec="white", zorder=3)
        ax.plot(*points.mean(axis=0), "X", color=VERMILION, ms=7 if ax is left else 10, mec="white", zorder=4)
        ax.set_xlabel("gradient of one weight")
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.45, y=0.25)
    right.plot(*torch.stack([g[axes] for g in uneven]).numpy().T, color=GREY, lw=1, zorder=0)
    left.set_ylabel("gradient of another")
    left.set_title("four parts of 16", loc="left", size=11, weight="bold")
    right.set_title(f"a part of {counts[0]} and one of {counts[1]}", loc="left", size=11, weight="bold")
    there, off = (tuple(point[axes].tolist()) for point in (whole, torch.stack(list(uneven)).mean(0)))
    _say(left, "the parts' plain mean\nis the batch's gradient", there, GREEN, above=True)
    _say(right, "the batch's\ngradient", there, GREEN, above=False)
    _say(right, "the parts'\nplain mean", off, VERMILION, above=True)
    figure.tight_layout()
    return figure


def _say(ax: Axes, words: str, place: tuple[float, float], color: str, above: bool) -> None:
    """Words to the upper left of a point, or to its lower right: the dots lie along the other diagonal."""
    offset, align = ((-9, 8), ("right", "bottom")) if above else ((9, -8), ("left", "top"))
    ax.annotate(words, place, offset, textcoords="offset points", color=color, ha=align[0], va=align[1])


def times_seen(grids: Mapping[str, np.ndarray]) -> NotebookFigure:
    """A cell for each training sample, coloured by how often the epoch used it; a panel for each of the counts."""
    figure = NotebookFigure(figsize=(8, 3.0))
    colours = ListedColormap([VERMILION, "#E8F1F7", BLUE])
    panels = np.atleast_1d(figure.subplots(1, len(grids)))
    for ax, (title, counts) in zip(panels, grids.items(), strict=True):
        ax.imshow(counts.reshape(30, -1), cmap=colours, vmin=-0.5, vmax=2.5, aspect="equal", interpolation="nearest")
        ax.set_title(title, loc="left", size=11, weight="bold")
        ax.set_xticks([])
        ax.set_yticks([])
        numbers = [int((counts == times).sum()) for times in range(3)]
        words = (f"never: {numbers[0]}", f"once: {numbers[1]}", f"twice: {numbers[2]}")
        for place, text, color in zip((0.0, 0.5, 1.0), words, (VERMILION, DARK, BLUE), strict=True):
            align = {0.0: "left", 0.5: "center", 1.0: "right"}[place]
            ax.text(place, -0.06, text, color=color, ha=align, va="top", weight="bold", transform=ax.transAxes)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.9, bottom=0.1, wspace=0.06)
    return figure


def learning(events: Sequence[Event]) -> NotebookFigure:
    """The loss of each step of a run, and the accuracy on the test set at the end of each epoch."""
    figure = NotebookFigure(figsize=(8, 3.4))
    ax = figure.subplots()
    losses = [event["loss"] for event in events if event["event"] == "step"]
    ax.plot(losses, color=BLUE, lw=1.5, marker="o", ms=3)
    ax.set(xlabel="step", ylabel="loss of the batch", ylim=(0, max(losses) * 1.25), xlim=(-1, len(losses) + 0.5))
    ax.spines[["top", "right"]].set_visible(False)
    end = 0
    for record in (event for event in events if event["event"] == "epoch"):
        begin, end = end, end + record["steps"]
        ax.axvline(end - 0.5, color=GREY, lw=1, ls=":")
        words = f"epoch {record['epoch']}\ntest: {record['test_accuracy']:.1%}"
        ax.text((begin + end - 1) / 2, 0.98, words, ha="center", va="top", transform=ax.get_xaxis_transform())
    figure.tight_layout()
    return figure


def in_a_row(seconds: Mapping[str, float]) -> list[Interval]:
    """Durations as intervals, one after the other."""
    ends = np.cumsum(list(seconds.values())).tolist()
    return [(name, end - length, end) for (name, length), end in zip(seconds.items(), ends, strict=True)]


def medians(intervals: Sequence[Interval]) -> dict[str, float]:
    """The median duration of each phase in seconds, in the order in which the phases first come."""
    names = dict.fromkeys(name for name, *_ in intervals)
    return {name: median(end - begin for it, begin, end in intervals if it == name) for name in names}


def timeline(rows: Mapping[str, Sequence[Interval]]) -> NotebookFigure:
    """A row of blocks for each measurement, each from its own zero, on one axis of milliseconds."""
    figure = NotebookFigure(figsize=(8, 0.95 + 0.55 * len(rows)))
    ax = figure.subplots()
    width = max(row[-1][2] - row[0][1] for row in rows.values()) * 1e3
    for y, row in enumerate(rows.values()):
        _blocks(ax, y, row, width)
    names = [name for name in PHASES if any(name == it for row in rows.values() for it, *_ in row)]
    for i, name in enumerate(names):
        ax.text(i * 0.17, 1.04, f"■ {name}", color=PHASES[name], transform=ax.transAxes, weight="bold")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(xlabel="milliseconds", xlim=(0, width * 1.01), ylim=(len(rows) - 0.5, -0.5))
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(left=False)
    figure.tight_layout()
    return figure


def _blocks(ax: Axes, y: int, row: Sequence[Interval], width: float) -> None:
    zero = row[0][1]
    for name, begin, end in row:
        length = (end - begin) * 1e3
        ax.barh(y, length, left=(begin - zero) * 1e3, height=0.62, color=PHASES[name], edgecolor="white", lw=0.6)
        if length > 0.016 * width * len(name):
            color = "white" if name in DARK_PHASES else "black"
            ax.text(((begin + end) / 2 - zero) * 1e3, y, name, ha="center", va="center", color=color, size=9)


def unlabelled(curves: Mapping[str, Sequence[float]]) -> NotebookFigure:
    """Loss curves without a word on where they come from, a panel each, on one scale."""
    figure = NotebookFigure(figsize=(8, 2.2))
    panels = figure.subplots(1, len(curves), sharey=True)
    for ax, (name, losses) in zip(panels, curves.items(), strict=True):
        ax.plot(losses, color=BLUE, lw=1.5)
        ax.set_title(f"curve {name}", loc="left", size=11, weight="bold")
        ax.set(xlabel="step", ylim=(0, 3.2))
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss")
    figure.tight_layout()
    return figure
