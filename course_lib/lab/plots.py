"""Pictures drawn from recorded events, and the numbers that the pictures and the claims are made of.

A run is a sequence of starts. Each begins at a snapshot, or at step 0; what a start did beyond the snapshot that the
next one begins at is lost, and done again. Steps count from 0: after 30 steps comes step 30, whose loss is that of
the snapshot's weights, so both stand at 30 on the axis.
"""

import math
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from course_lib.engine.report import steps_replayed
from course_lib.engine.report import surviving_steps as surviving_steps

Event = dict[str, Any]
Curve = dict[int, float]  # step -> loss

# Okabe and Ito's colours (the yellow a tint), which all can tell apart; widths, dashes and markers differ as well.
BLUE, VERMILION, GREEN, YELLOW, GREY, DARK = "#0072B2", "#D55E00", "#009E73", "#FBF7C5", "#C4C4C4", "#555555"
ARROW = {"arrowstyle": "-|>", "color": VERMILION, "connectionstyle": "arc3,rad=0.6", "shrinkA": 7, "shrinkB": 6}
DEEDS = {"kill": "killed", "exit": "exited", "hang": "hung", "oom": "ran out of memory", "nan": "got a NaN"}
MOMENTS = {"start": "as it started", "load": "as it loaded", "snapshot": "as it saved", "eval": "as it evaluated"}


class NotebookFigure(Figure):
    """A figure that a notebook shows when it is a cell's last value, without pyplot and its global state."""

    def _repr_png_(self) -> bytes:
        self.savefig(png := BytesIO(), format="png")
        return png.getvalue()


@dataclass(frozen=True)
class Start:
    """What one generation did, from `began` steps done to the step `stopped`, which it died in or would do next."""

    began: int
    stopped: int
    curve: Curve
    crashed: bool
    story: str


def _curve(steps: dict[int, Event]) -> Curve:
    return {step: float(record.get("loss", math.nan)) for step, record in sorted(steps.items())}


def max_abs_loss_difference(a: list[Event], b: list[Event]) -> float:
    """The largest distance of the losses of two runs over their surviving steps.

    Infinite when the runs don't have the same steps, have none, or have a loss that is not finite: none of these
    may look like agreement.
    """
    left, right = _curve(surviving_steps(a)), _curve(surviving_steps(b))
    return _largest([left[step] - right[step] for step in left]) if left.keys() == right.keys() else math.inf


def _largest(differences: list[float]) -> float:
    return max((abs(d) if math.isfinite(d) else math.inf for d in differences), default=math.inf)


def starts(events: list[Event]) -> list[Start]:
    """The starts of a run in order; one that died before it had a generation counts if a fault tells of it."""
    numbers = {e["generation"] for e in events if e["event"] in ("step", "snapshot_loaded")}
    told: dict[int | None, list[Event]] = {}
    for event in events:
        told.setdefault(event.get("generation"), []).append(event)
    groups = [told[number] for number in numbers]
    groups += [[e] for e in events if e["event"] == "fault" and e.get("generation") is None]
    found: list[Start] = []
    for group in sorted(groups, key=lambda group: group[0]["t"]):
        found.append(_start(group, found, last=len(found) == len(groups) - 1))
    return found


def _start(group: list[Event], earlier: list[Start], last: bool) -> Start:
    curve = _curve(surviving_steps(group))
    loaded = [*curve, *(e["step"] for e in group if e["event"] == "snapshot_loaded")]
    began = loaded[0] if loaded else earlier[-1].stopped if earlier else 0
    stopped = max(curve) + 1 if curve else began
    story = ["began again at step 0, without a snapshot" if loaded and earlier else ""]
    if loaded and began:
        story = [f"resumed from the snapshot after {began} steps"]
    if again := sum(any(step in start.curve for start in earlier) for step in curve):
        story[0] += f" ({again} done again)"
    names = {event["event"] for event in group}
    fault = next((e for e in group if e["event"] == "fault" and e["kind"] != "slow"), None)
    crashed = not names & {"finish", "stop_requested"} and (fault is not None or "error" in names or not last)
    if crashed and fault is not None:
        stopped = stopped if fault["at"] in MOMENTS else fault["step"]
        deed = DEEDS.get(fault["kind"], f"hit by {fault['kind']}")
        story.append(f"rank {fault['rank']} {deed} {MOMENTS.get(fault['at'], 'in step ' + str(stopped))}")
    elif crashed:
        story.append(f"{_dead_rank(group)} died {f'after step {stopped - 1}' if curve else 'before its first step'}")
    elif "stop_requested" in names:
        story.append(f"stopped as asked after {stopped} steps")
    return Start(began, stopped, curve, crashed, "; ".join(filter(None, story)))


def _dead_rank(group: list[Event]) -> str:
    """The rank that did not lose a peer while all others did, else the one that did fewer steps than all others."""
    size = next((e["world_size"] for e in group if e["event"] == "snapshot_loaded"), 0)
    ranks = range(max(size, *(e["rank"] + 1 for e in group)))
    victims = {e["rank"] for e in group if e["event"] == "error" and "PeerLost" in str(e.get("error"))}
    done = [sum(e["event"] == "step" and e["rank"] == rank for e in group) for rank in ranks]
    for suspects in ([r for r in ranks if r not in victims], [r for r in ranks if done[r] == min(done)]):
        if len(suspects) == 1:
            return f"rank {suspects[0]}"
    return "a rank"


def recovery_figure(uninterrupted: list[Event], interrupted: list[Event], title: str | None = None) -> Figure:
    """Three panels over the step: the losses of both runs, the starts of the interrupted one, and the difference.

    Without a title the headline says what happened. A run that is still going on, or has no step yet, is drawn too.
    """
    tries, reference = starts(interrupted), _curve(surviving_steps(uninterrupted))
    alive: Curve = {}
    for start in tries:  # unlike surviving_steps, without what was lost and is not yet done again
        alive = {step: loss for step, loss in alive.items() if step < start.began} | start.curve
    figure, (top, middle, bottom) = _panels(len(tries), [*reference, *alive, *(start.stopped for start in tries)])
    _draw_losses(top, reference, alive, tries)
    _draw_starts(middle, tries)
    verdict = _draw_difference(bottom, reference, alive)
    crashes, again = sum(start.crashed for start in tries), steps_replayed(interrupted)
    headline = f"{crashes} crash{'es' * (crashes != 1)}, {again} step{'s' * (again != 1)} done again, {verdict}"
    top.set_title(title or headline, loc="left", size=12, weight="bold")
    return figure


def _panels(rows: int, steps: list[int]) -> tuple[Figure, list[Axes]]:
    """The empty panels, in inches: 2.3 high, 0.36 for each row, 0.75, with room for words in the right margin."""
    heights = [2.3, max(rows, 1) * 0.36, 0.75]
    height = sum(heights) + 1.35
    figure = NotebookFigure(figsize=(8, height), facecolor="white")
    FigureCanvasAgg(figure)  # to measure texts with
    figure.subplots_adjust(left=0.13, right=0.86, top=1 - 0.4 / height, bottom=0.55 / height, hspace=0.6 / sum(heights))
    axes: list[Axes] = list(figure.subplots(3, 1, sharex=True, height_ratios=heights))
    for ax, name in zip(axes, ("loss", "", "difference"), strict=True):
        ax.set_ylabel(name)
        ax.spines[["top", "right"]].set_visible(False)
    low, high = min(steps, default=0), max(steps, default=1)
    axes[2].set(xlabel="step", xlim=(low - 0.02 * (high - low) - 0.5, high + 0.02 * (high - low) + 0.5))
    axes[2].xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))
    figure.align_ylabels()
    return figure, axes


def _draw_losses(ax: Axes, reference: Curve, alive: Curve, tries: list[Start]) -> None:
    """The uninterrupted curve, wide, under the interrupted one, thin; what a crash threw away, dashed, over both."""
    every = reference | alive | {step: loss for start in tries for step, loss in start.curve.items()}
    marker = "o" if max(every, default=0) - min(every, default=0) <= 150 else ""
    curves = {"uninterrupted": (reference, GREY, 7.0, ""), "interrupted": (alive, BLUE, 1.6, marker)}
    for name, (curve, color, width, dots) in curves.items():
        ax.plot(list(curve), list(curve.values()), color=color, lw=width, marker=dots, ms=3, label=name)
    for i, start in enumerate(tries):
        kept = min((later.began for later in tries[i + 1 :]), default=start.stopped)
        lost = {step: loss for step, loss in start.curve.items() if step >= kept}
        ax.plot(list(lost), list(lost.values()), "--", color=VERMILION, marker=marker, ms=7, mfc="none", label="lost")
    finite = {step: loss for step, loss in every.items() if math.isfinite(loss)}
    if finite:
        low, high = min(finite.values()), max(finite.values())
        ax.set_ylim(top=high + 0.25 * (high - low or 1.0))  # room for words
        _mark_crashes(ax, finite, tries)
    losses = {name: [loss for loss in curve.values() if math.isfinite(loss)] for name, (curve, *_) in curves.items()}
    ends = sorted((values[-1], name) for name, values in losses.items() if values)
    for (y, name), offset in zip(ends, (-7, 7), strict=False):  # the higher one's name a little up, the other's down
        color = BLUE if name == "interrupted" else DARK
        ax.annotate(name, (1, y), (6, offset), ("axes fraction", "data"), "offset points", color=color, va="center")


def _mark_crashes(ax: Axes, losses: Curve, tries: list[Start]) -> None:
    """A cross where a start died, and an arrow back to where the next one began."""
    words = "lost and\ndone again"  # once is enough
    for before, after in pairwise(tries):
        (x, y), (x0, y0) = ((s, losses[min(losses, key=lambda k: abs(k - s))]) for s in (before.stopped, after.began))
        if before.crashed:
            ax.plot(x, y, "X", color=VERMILION, ms=10, mec="white", zorder=5, label="crash")
        if after.began:
            ax.plot(x0, y0, "D", color=GREEN, ms=7, mec="white", zorder=5, label="snapshot")
        if x > x0:
            ax.axvspan(x0, x, color=YELLOW, lw=0, zorder=0, label="band")
            ax.annotate("", (x0, y0), (x, y), arrowprops=ARROW)
            across = ax.get_xaxis_transform()
            _keep_inside(ax.text((x0 + x) / 2, 0.98, words, color=VERMILION, ha="center", va="top", transform=across))
            words = ""


def _draw_starts(ax: Axes, tries: list[Start]) -> None:
    """A row for each start: a line from where it began to where it stopped, and above it what happened, in words."""
    ax.set_ylim(max(len(tries), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(tries)), [f"start {row + 1}" for row in range(len(tries))])
    ax.tick_params(left=False, bottom=False)
    ax.spines[:].set_visible(False)
    for row, start in enumerate(tries):
        y = row + 0.28
        ax.plot([start.began, start.stopped], [y, y], color=BLUE, lw=2.5, label="start")
        if start.began:
            ax.plot(start.began, y, "D", color=GREEN, ms=6, label="snapshot")
        if start.crashed:
            ax.plot(start.stopped, y, "X", color=VERMILION, ms=8, label="crash")
        _keep_inside(ax.text(start.began, row + 0.08, start.story))


def _keep_inside(text: Text) -> None:
    """Move a text sideways so that it begins inside its panel and ends inside the figure."""
    figure, ax, box = text.get_figure(), text.axes, text.get_window_extent()
    if isinstance(figure, Figure) and ax is not None:
        shift = max(min(0.0, 0.99 * figure.bbox.x1 - box.x1), ax.bbox.x0 - box.x0)
        text.set_transform(text.get_transform() + ScaledTranslation(shift / figure.dpi, 0, figure.dpi_scale_trans))


def _draw_difference(ax: Axes, reference: Curve, alive: Curve) -> str:
    """The interrupted run's loss minus the other's, at each step that both have; returns the verdict."""
    gaps = {step: alive[step] - reference[step] for step in alive if step in reference}
    largest = _largest(list(gaps.values()))
    ax.axhline(0, color=GREY, lw=1)
    ax.plot(list(gaps), list(gaps.values()), color=BLUE, lw=1.6, label="difference")
    scale = largest if 0 < largest < math.inf else 1.0
    ax.set_ylim(-1.4 * scale, 2.8 * scale)
    ax.set_yticks([-scale, 0, scale] if scale == largest else [0])
    alone = len(reference.keys() ^ alive.keys())
    verdict = f"largest difference: {largest:.1e}" if largest else "largest difference: 0.0 (exactly)"
    if math.isinf(largest):
        verdict = "a loss is not finite" if gaps else "nothing to compare yet"
    elif alone:
        verdict += f" in {len(gaps)} shared steps; {alone} not shared"
    ax.text(0.99, 0.95, verdict, ha="right", va="top", weight="bold", transform=ax.transAxes)
    return f"{alone} steps not in both runs" if alone else verdict if largest else "exactly the same curve"
