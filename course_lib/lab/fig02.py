"""The figures of notebook 02: a step in its phases, who runs when, memory, statistics, and rounding."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from course_lib.engine import read_events
from course_lib.lab.busy import Work, busiest
from course_lib.lab.phases import PHASES, Span
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure, surviving_steps

SKY, ORANGE, PINK = "#56B4E9", "#E69F00", "#CC79A7"
# Moving data, forward, backward and the optimizer have notebook 01's colours.
COLORS = dict(zip(PHASES, (ORANGE, VERMILION, GREY, ORANGE, PINK, BLUE, GREEN), strict=True)) | {"forward": SKY}
NARROW = 0.14  # of a step: a shorter span has no room for its name
FLOOR = 1e-18  # where a difference of exactly 0 is drawn on a logarithmic axis


def _panels(count: int, height: float, title: str, sharex: bool = False) -> tuple[NotebookFigure, list[Axes]]:
    figure = NotebookFigure(figsize=(8, height), facecolor="white", layout="constrained")
    axes = list(figure.subplots(count, 1, squeeze=False, sharex=sharex).flat)
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def step_figure(step: Sequence[Span]) -> NotebookFigure:
    """One step over time: what the process does in the upper row, and what the lanes do under it."""
    lanes = sorted({span.row for span in step if span.row != "process"})
    figure, (ax,) = _panels(1, 1.5 + 0.5 * len(lanes), "One step through the lanes, recorded")
    rows, begin = ["process", *lanes], min(span.start for span in step)
    end = max(span.end for span in step) - begin
    for span in step:
        y, start, length = rows.index(span.row), 1e3 * (span.start - begin), 1e3 * (span.end - span.start)
        ax.barh(y, length, left=start, height=0.6, color=COLORS[span.name], ec="white", lw=0.5)
    for row, name, start, length in _labels(step, end):
        y, first, x = rows.index(row), 1e3 * (start - begin), 1e3 * (start - begin + length / 2)
        if length > NARROW * end:
            ax.text(x, y, name, ha="center", va="center", color="white" if name == "backward" else "black")
        elif row == "process":
            ax.text(first, y - 0.36, name, ha="right" if first > 800 * end else "left", va="bottom")
        else:
            ax.text(first + 1e3 * length, y, f" {name}", va="center")
    ax.set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.9), xlabel="milliseconds")
    ax.tick_params(left=False)
    return figure


def _labels(step: Sequence[Span], whole: float) -> list[tuple[str, str, float, float]]:
    """Row, name, start and length of what is to be named: narrow neighbours of the process share one label."""
    labels: list[tuple[str, str, float, float]] = []
    for span in sorted(step, key=lambda span: (span.row, span.start)):
        length = span.end - span.start
        if labels and labels[-1][0] == span.row and max(length, labels[-1][3]) <= NARROW * whole:
            row, name, start, _ = labels.pop()
            labels.append((row, f"{name}, {span.name}", start, length))
        else:
            labels.append((span.row, span.name, span.start, length))
    return labels


def share_figure(shares: Mapping[int, float]) -> NotebookFigure:
    """The part of a step that the process spends making replicas, for each number of lanes."""
    figure, (ax,) = _panels(1, 2.2, "Making replicas, as a part of the whole step (measured here)")
    for row, part in enumerate(shares.values()):
        ax.barh(row, 1, color="#EEEEEE", height=0.6)
        ax.barh(row, part, color=VERMILION, height=0.6)
        ax.text(part + 0.01, row, f"{part:.0%}", va="center", weight="bold", color=VERMILION)
    ax.set(xlim=(0, 1), xticks=[], ylim=(len(shares) - 0.5, -0.5))
    ax.set_yticks(range(len(shares)), [f"{lanes} lanes: {lanes - 1} new each step" for lanes in shares])
    ax.tick_params(left=False)
    ax.spines[:].set_visible(False)
    ax.text(1, len(shares) - 0.55, "everything else in the step", ha="right", va="bottom", color=DARK)
    return figure


def turns_figure(threads: list[Work], processes: list[Work], window_s: float) -> NotebookFigure:
    """Which of two workers was running in the least disturbed window of each race; above threads, below processes."""
    figure, axes = _panels(2, 3.2, "Two workers that only run Python: who runs when (recorded)", sharex=True)
    for ax, works, name in zip(axes, (threads, processes), ("two threads", "two processes"), strict=True):
        begin, end = busiest(works, window_s)
        for work in works:
            for low, high in work.running():
                if high > begin and low < end:
                    color = (BLUE, ORANGE)[work.lane]
                    ax.barh(work.lane, 1e3 * (high - low), left=1e3 * (low - begin), height=0.7, color=color)
        ax.set(xlim=(0, 1e3 * window_s), yticks=[0, 1], yticklabels=["worker 0", "worker 1"], ylim=(1.5, -0.5))
        ax.set_title(name, loc="left", size=10)
        ax.tick_params(left=False)
    axes[1].set_xlabel("milliseconds, in each race's least disturbed moment; a gap: the worker had to wait")
    return figure


def memory_figure(gpus: Sequence[Mapping[str, float]], title: str) -> NotebookFigure:
    """What each GPU holds, in GB, stacked and named; a drawing from computed sizes, not a measurement."""
    figure, (ax,) = _panels(1, 0.9 + 0.6 * len(gpus), title)
    names = list(dict.fromkeys(name for gpu in gpus for name in gpu))
    colors = dict(zip(names, (BLUE, SKY, GREEN, ORANGE, GREY, VERMILION, PINK), strict=False))
    widest = max(sum(gpu.values()) for gpu in gpus)
    for row, gpu in enumerate(gpus):
        left = 0.0
        for name, size in gpu.items():
            ax.barh(row, size, left=left, color=colors[name], height=0.6, ec="white")
            left += size
        ax.text(left + 0.01 * widest, row, f"{left:.1f} GB", va="center", weight="bold")
    for line, name in enumerate(names):  # in the room that the emptier GPUs leave
        y = 0.75 + line * (len(gpus) - 1.1) / len(names)
        alone = "" if name in gpus[-1] else "  (GPU 0 alone)"
        ax.barh(y, 0.02 * widest, left=0.5 * widest, height=0.2, color=colors[name])
        ax.text(0.53 * widest, y, name + alone, va="center", size=9)
    ax.set_yticks(range(len(gpus)), [f"GPU {row}" for row in range(len(gpus))])
    ax.set(ylim=(len(gpus) - 0.5, -0.5), xlim=(0, 1.12 * widest), xlabel="GB, activations left out")
    ax.tick_params(left=False)
    return figure


def statistics_figure(lanes: Sequence[float], half: Sequence[float], whole: Sequence[float]) -> NotebookFigure:
    """The running means of the channels after one step: through two lanes, from lane 0's half, from the whole batch."""
    figure, (ax,) = _panels(1, 2.8, "Batch norm's running means after one step")
    channels = range(len(lanes))
    ax.plot(channels, whole, "D", color=GREY, ms=6)
    ax.plot(channels, half, "o", mfc="none", mec=BLUE, mew=1.6, ms=10)
    ax.plot(channels, lanes, "o", color=VERMILION, ms=4)
    ax.set(xlabel="channel of the first norm layer", ylabel="running mean")
    marks = [("D", GREY, DARK, "plain module, whole batch"), ("o", BLUE, BLUE, "plain module, lane 0's half")]
    marks += [("o", VERMILION, VERMILION, "two lanes, whole batch")]
    for row, (marker, edge, ink, name) in enumerate(marks):
        y, face = 0.95 - 0.15 * row, "none" if edge == BLUE else edge
        ax.plot(1.03, y, marker, mec=edge, mfc=face, ms=7, transform=ax.transAxes, clip_on=False)
        ax.text(1.05, y, name, color=ink, va="center", transform=ax.transAxes)
    return figure


def rounding_figure(pairs: Mapping[str, tuple[Path, Path]]) -> NotebookFigure:
    """How far the losses of two runs are apart at each step, for each named pair of run directories."""
    figure, (ax,) = _panels(1, 3.0, "Lanes against one device: how far the losses are apart (recorded)")
    for (name, runs), color in zip(pairs.items(), (VERMILION, BLUE), strict=False):
        left, right = (surviving_steps(read_events(run).events) for run in runs)
        gaps = [max(FLOOR, abs(left[step]["loss"] - right[step]["loss"])) for step in left if step in right]
        ax.plot(gaps, "o-", color=color, ms=4)
        ax.annotate(name, (len(gaps) - 1, gaps[-1]), (8, 0), textcoords="offset points", color=color, va="center")
    ax.set(yscale="log", xlabel="step", ylabel="distance", ylim=(FLOOR / 5, 10))
    ticks = {FLOOR: "exactly 0", 1e-15: "1e-15", 1e-12: "1e-12", 1e-9: "1e-9", 1e-6: "1e-6", 1e-3: "1e-3", 1.0: "1"}
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.minorticks_off()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def suspects_figure(found: Mapping[str, Sequence[float]]) -> NotebookFigure:
    """The evidence of the last exercise: three distances for each of four implementations, on a logarithmic axis."""
    questions = ("64 samples: from plain", "63 samples: from plain", "64 samples: from lane 0 alone")
    figure, axes = _panels(len(found), 6.0, "Four home-made DataParallels: how far is the gradient?", sharex=True)
    for ax, (name, distances) in zip(axes, found.items(), strict=True):
        for row, (distance, color) in enumerate(zip(distances, (BLUE, SKY, GREY), strict=True)):
            ax.barh(row, max(distance, 1e-17), color=color, height=0.7)
            words = f"{distance:.0e}" if distance else "exactly 0"
            ax.text(1.3 * max(distance, 1e-17), row, words, va="center", size=9)
        ax.set(xscale="log", xlim=(1e-17, 50), ylim=(2.5, -0.5))
        ax.set_xticks([1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1], ["1e-15", "1e-12", "1e-9", "1e-6", "1e-3", "1"])
        ax.set_yticks(range(3), questions, size=9)
        ax.set_title(name, loc="left", size=10, weight="bold", pad=2)
        ax.tick_params(left=False)
    axes[-1].set_xlabel("relative distance (1e-16 is rounding in float64)")
    return figure
