"""The figures of notebook 04: the life of a job, epochs trained twice, the overlay, the line-up, and who used what."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from course_lib.engine import read_events
from course_lib.engine.report import surviving_steps
from course_lib.engine.runlog import log_files
from course_lib.lab import lineup
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure

ORANGE, SKY, PURPLE = "#E69F00", "#56B4E9", "#CC79A7"
Event = dict[str, Any]
# Of a generation, starting up and training: the first grey, the next blue, here and in the overlay.
_SHADES = (("#E0E0E0", "#8A8A8A"), ("#BFDDF0", BLUE), ("#F6DFA8", "#B27B00"), ("#BFE6D9", GREEN))


def _axes(height: float, heights: tuple[int, ...] = (1,)) -> tuple[NotebookFigure, Any]:
    figure = NotebookFigure(figsize=(8, height), layout="constrained", facecolor="white")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for ax in [axes] if len(heights) == 1 else axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _processes(run: Path | str) -> list[list[Event]]:
    """The events of each worker process, in the order of their births; one that recorded no generation is left out."""
    files = [path.read_text().splitlines() for path in log_files(run)]
    lives = [[json.loads(line) for line in lines if line.endswith("}")] for lines in files]
    return sorted((life for life in lives if life), key=lambda life: float(life[0]["t"]))


def life_of_a_job(run: Path | str) -> NotebookFigure:
    """Time from left to right: the agent over all, and below it each worker that it started, by rank."""
    lives = _processes(run)
    zero, end = lives[0][0]["t"], max(life[-1]["t"] for life in lives)
    generations = sorted({life[-1]["generation"] for life in lives})
    ranks = sorted({life[-1]["rank"] for life in lives})
    figure, ax = _axes(1.0 + 0.55 * (len(ranks) + 1))
    ax.barh(0, end - zero + 0.8, left=-0.4, height=0.5, color="white", ec=DARK)
    ax.text(0, 0, "the agent (torchrun): starts workers, watches them, starts them again", va="center")
    for life in lives:
        rank, generation = life[-1]["rank"], generations.index(life[-1]["generation"])
        born, died = life[0]["t"] - zero, life[-1]["t"] - zero
        first = next((e["t"] - zero for e in life if e["event"] == "step"), died)
        light, dark = _SHADES[generation % len(_SHADES)]
        ax.barh(rank + 1, first - born, left=born, height=0.6, color=light)
        ax.barh(rank + 1, died - first, left=first, height=0.6, color=dark)
        does = " starts up" if first - born > 0.28 * (end - zero) else ""
        ax.text(born, rank + 1, f" generation {generation}{does}", va="center")
        if died - first > 0.07 * (end - zero):
            ax.text((first + died) / 2, rank + 1, "trains", va="center", ha="center", color="white", weight="bold")
    for death in [max(life[-1]["t"] for life in lives if life[-1]["generation"] == g) for g in generations[:-1]]:
        ax.plot([death - zero] * 2, [0.4, len(ranks) + 1], color=VERMILION, lw=1.4, ls=":")
        ax.text(
            death - zero, len(ranks) + 0.75, "  one worker was killed: all of them go", color=VERMILION, va="center"
        )
    ax.set_ylim(len(ranks) + 1, -0.5)
    ax.set_yticks(range(len(ranks) + 1), ["agent", *(f"rank {rank}" for rank in ranks)])
    ax.set_xlabel("seconds (light: starting up, dark: training)")
    return figure


def epochs_trained(run: Path | str) -> NotebookFigure:
    """A row for each generation, a block for each epoch that it finished or began; those done before are red."""
    events = read_events(run).named("step")
    steps: dict[tuple[int, int], set[int]] = defaultdict(set)
    for event in events:
        steps[event["generation"], event["epoch"]].add(event["step"])
    generations = sorted({generation for generation, _ in steps})
    size = max(len(found) for found in steps.values())
    figure, ax = _axes(0.9 + 0.5 * len(generations))
    whole: set[int] = set()
    for row, generation in enumerate(generations):
        for epoch in sorted(e for g, e in steps if g == generation):
            share = len(steps[generation, epoch]) / size
            color = VERMILION if epoch in whole else BLUE if share == 1 else GREY
            ax.barh(row, share * 0.96, left=epoch + 0.02, height=0.7, color=color)
            word = "again!" if epoch in whole else f"epoch {epoch}" if share == 1 else "cut"
            inside = {"color": "white" if share == 1 else DARK, "weight": "bold"}
            ax.text(epoch + 0.06, row, word, va="center", **inside)
        whole |= {e for g, e in steps if g == generation and len(steps[g, e]) == size}
    ax.set_yticks(range(len(generations)), [f"generation {number}" for number in generations])
    ax.set_ylim(len(generations) - 0.4, -0.6)
    last = max(epoch for _, epoch in steps) + 1
    ax.set(xlabel="epochs of training data", xticks=range(last + 1), xlim=(0, last))
    return figure


def overlay(run: Path | str) -> NotebookFigure:
    """The losses of the generation that died and of the next one, and their difference where both did the step."""
    curves: dict[int, dict[int, float]] = defaultdict(dict)
    for event in read_events(run).named("step"):
        curves[event["generation"]][event["step"]] = event["loss"]
    before, after = (curves[generation] for generation in sorted(curves)[:2])
    figure, (top, bottom) = _axes(4.2, (5, 2))
    top.plot(list(before), list(before.values()), color=GREY, lw=7, solid_capstyle="butt")
    top.plot(list(after), list(after.values()), color=BLUE, lw=1.6, marker="o", ms=3)
    top.plot(max(before), before[max(before)], "X", color=VERMILION, ms=11, mec="white", zorder=5)
    top.annotate("rank 1 is killed", (max(before), before[max(before)]), (8, 12), textcoords="offset points",
                 color=VERMILION)  # fmt: skip
    first = min(after)
    top.annotate("resumed here", (first, after[first]), (0, 34), textcoords="offset points", color=BLUE, ha="center",
                 arrowprops={"arrowstyle": "-|>", "color": BLUE})  # fmt: skip
    top.text(0.01, 0.06, "wide grey: the generation that died\nthin blue: the one after it", color=DARK,
             transform=top.transAxes, size=9)  # fmt: skip
    top.set_ylabel("loss")
    shared = sorted(before.keys() & after.keys())
    gaps = [after[step] - before[step] for step in shared]
    bottom.axhline(0, color=GREY, lw=1)
    bottom.plot(shared, gaps, color=BLUE, marker="o", ms=4)
    largest = max(map(abs, gaps), default=0.0)
    verdict = "exactly 0.0 at each" if largest == 0 else f"at most {largest:.1e}"
    bottom.set_title(f"{len(shared)} steps were done by both; difference {verdict}", loc="left", size=10, weight="bold")
    bottom.set(ylabel="difference", xlabel="step")
    if largest == 0:
        bottom.set(ylim=(-1, 1), yticks=[0])
    return figure


_FLOOR = 1e-6  # where a difference of exactly 0 is drawn, on an axis that has no 0


def line_up() -> NotebookFigure:
    """Seven resumed runs: how far their losses are from the uninterrupted run's, by step, without their names."""
    whole = lineup.uninterrupted()
    figure = NotebookFigure(figsize=(8, 9.5), layout="constrained", facecolor="white")
    axes = list(figure.subplots(4, 2, sharex=True, sharey=True).flat)
    for ax, (number, piece) in zip(axes, lineup.suspects().items(), strict=False):
        _draw_suspect(ax, number, lineup.resume_without(piece), whole)
    axes[-1].axis("off")
    words = ["distance to the uninterrupted run:", "blue: of the training loss"]
    words += ["red, dashed: of the held-out loss", "dots: the first four steps", "grey: steps that the twin hasn't"]
    for row, (line, color) in enumerate(zip(words, (DARK, BLUE, VERMILION, DARK, DARK), strict=True)):
        axes[-1].text(0.05, 0.85 - 0.14 * row, line, color=color, transform=axes[-1].transAxes)
    return figure


def _draw_suspect(ax: Axes, number: str, resumed: lineup.Curves, whole: lineup.Curves) -> None:
    start = lineup.DEATH
    for color, curve, twin in ((BLUE, resumed.train, whole.train), (VERMILION, resumed.held_out, whole.held_out)):
        gaps = [max(abs(a - b), _FLOOR) for a, b in zip(curve, twin[start:], strict=False)]
        steps = list(range(start, start + len(gaps)))
        ax.plot(steps, gaps, color=color, lw=1.4, ls="-" if color == BLUE else "--")
        ax.plot(steps[:4], gaps[:4], "o", color=color, ms=5 if color == BLUE else 4)
    end = start + len(resumed.train)
    if end > len(whole.train):
        ax.axvspan(len(whole.train), end, color="#DDDDDD", lw=0)
        ax.text(len(whole.train) + 0.3, 3.2, f"{end - len(whole.train)} too many", va="top", size=9)
    ax.set_title(f"curve {number}", loc="left", size=10, weight="bold")
    ax.set(yscale="log", ylim=(_FLOOR / 2, 6), xlabel="step")
    ax.set_yticks([_FLOOR, 1e-4, 1e-2, 1], ["0 exactly", "0.0001", "0.01", "1"])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(labelbottom=True)
    ax.spines[["top", "right"]].set_visible(False)


def who_used_what(run: Path | str) -> NotebookFigure:
    """Every epoch's samples as a bar, coloured by the start that used them; what a death cost lies above, hatched."""
    events = read_events(run).named("step")
    kept = surviving_steps(events)
    starts = sorted({event["generation"] for event in events})
    colors = dict(zip(starts, (GREY, BLUE, ORANGE, GREEN, PURPLE), strict=False))
    ranks = {event["generation"]: event["world_size"] for event in events}
    epochs = sorted({event["epoch"] for event in events})
    figure, ax = _axes(0.9 + 0.75 * len(epochs))
    for event in kept.values():
        low, high = event["samples"]
        ax.barh(event["epoch"], high - low, left=low, height=0.4, color=colors[event["generation"]], ec="white", lw=0.5)
    lost = {(e["generation"], e["step"]): e for e in events if kept[e["step"]]["generation"] != e["generation"]}
    for event in lost.values():
        low, high = event["samples"]
        look = {"color": VERMILION, "hatch": "///", "ec": "white", "lw": 0}
        ax.barh(event["epoch"] - 0.31, high - low, left=low, height=0.14, **look)
    for number, generation in enumerate(starts, 1):
        epoch, low, _ = _longest([event for event in kept.values() if event["generation"] == generation])
        name = f"start {number}: {ranks[generation]} rank{'s' * (ranks[generation] > 1)}"
        ink = DARK if colors[generation] == GREY else colors[generation]
        ax.text(low + 6, epoch + 0.23, name, color=ink, va="top", weight="bold")
    if lost:
        epoch, _, high = _longest(list(lost.values()))
        ax.text(high, epoch - 0.31, "  lost, done again", color=VERMILION, va="center", weight="bold")
    ax.set_yticks(epochs, [f"epoch {epoch}" for epoch in epochs])
    ax.set_ylim(max(epochs) + 0.6, -0.6)
    ax.set_xlabel("samples of the epoch, in its order (each block is one optimizer step)")
    return figure


def _longest(steps: list[Event]) -> tuple[int, int, int]:
    """The epoch of which these steps used most, and the first and the last sample of it that they used."""
    spans: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        spans[step["epoch"]] += step["samples"]
    epoch = max(spans, key=lambda epoch: max(spans[epoch]) - min(spans[epoch]))
    return epoch, min(spans[epoch]), max(spans[epoch])
