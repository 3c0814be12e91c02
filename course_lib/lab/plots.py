"""Pictures drawn from recorded events, and the numbers that the pictures and the claims are made of.

A run is a sequence of attempts, one for each generation. An attempt begins at a snapshot, or at step 0; what it did
beyond the snapshot that the next one begins at is lost, and done again. Steps count from 0: after 30 steps comes
step 30, whose loss is that of the snapshot's weights, so both stand at 30 on the axis.
"""

import math
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.engine.report import surviving_steps as surviving_steps

Event = dict[str, Any]
Curve = dict[int, float]  # step -> loss

# Okabe and Ito's colours, which colour-blind people can tell apart; width, dashes and markers differ as well.
BLUE, VERMILION, GREEN, YELLOW, GREY, DARK = "#0072B2", "#D55E00", "#009E73", "#F0E442", "#C4C4C4", "#555555"
STYLE: dict[str, Any] = {"font.size": 10.0, "axes.spines.top": False, "axes.spines.right": False}
LEFT, RIGHT, TOP, BOTTOM, GAP = 1.05, 1.1, 0.5, 0.55, 0.14  # the figure's margins and the panels' distance, inches
WIDTH, LOSS, ROW, DIFFERENCE = 8.0, 2.3, 0.36, 0.75  # its width, and the heights of the panels and of an attempt's row

DEEDS = {
    "kill": "killed",
    "exit": "exited",
    "exception": "failed (exception)",
    "segfault": "crashed (segfault)",
    "sigterm": "got SIGTERM",
    "sigint": "got SIGINT",
    "hang": "hung",
    "nan": "got a NaN",
    "oom": "ran out of memory",
}
MOMENTS = {"start": "as it started", "load": "as it loaded", "snapshot": "as it saved", "eval": "as it evaluated"}


class NotebookFigure(Figure):
    """A figure that a notebook shows when it is a cell's last value, without pyplot and its global state."""

    def _repr_png_(self) -> bytes:
        png = BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


@dataclass(frozen=True)
class Attempt:
    """What one generation did, from `began` steps done to the step `stopped` that it died in (or would do next)."""

    generation: int | None
    began: int
    fresh: bool
    curve: Curve
    stopped: int
    ending: str  # in words; empty while it is running
    crashed: bool


def loss_of(record: Event) -> float:
    """A step's loss; NaN when it has none."""
    loss = record.get("loss")
    return float(loss) if isinstance(loss, int | float) else math.nan


def replayed_steps(events: list[Event]) -> list[int]:
    """The number of each step that was done although an earlier generation had done it, once per repetition."""
    done = {(event["generation"], event["step"]) for event in events if event["event"] == "step"}
    times = Counter(step for _, step in done)
    return sorted((times - Counter(list(times))).elements())


def max_abs_loss_difference(a: list[Event], b: list[Event]) -> float:
    """The largest distance of the losses of two runs over their surviving steps.

    Infinite when the runs don't have the same steps, have none, or have a loss that is not finite: none of these
    must look like agreement.
    """
    left, right = surviving_steps(a), surviving_steps(b)
    if not left or left.keys() != right.keys():
        return math.inf
    return _largest([loss_of(left[step]) - loss_of(right[step]) for step in left])


def _largest(differences: list[float]) -> float:
    return max(abs(d) if math.isfinite(d) else math.inf for d in differences)


def attempts(events: list[Event]) -> list[Attempt]:
    """The attempts of a run, in order; one that died before it had a generation is there if a fault tells of it."""
    numbers = sorted({e["generation"] for e in events if e["event"] in ("step", "snapshot_loaded")})
    groups = [[e for e in events if e.get("generation") == number] for number in numbers]
    found = [_attempt(group, last=group is groups[-1]) for group in groups]
    for fault in (e for e in events if e["event"] == "fault" and e.get("generation") is None):
        place = sum(group[0]["t"] < fault["t"] for group in groups) + sum(a.generation is None for a in found)
        began = found[place].began if place < len(found) else 0
        found.insert(place, Attempt(None, began, True, {}, began, _deed(fault), crashed=True))
    return found


def _attempt(group: list[Event], last: bool) -> Attempt:
    by_rank = sorted(group, key=lambda event: -event["rank"])  # so that the lowest rank's record comes last and stays
    curve = {e["step"]: loss_of(e) for e in by_rank if e["event"] == "step"}
    loaded = next((e for e in group if e["event"] == "snapshot_loaded"), {"step": min(curve, default=0)})
    stopped = max(curve, default=loaded["step"] - 1) + 1
    names = {event["event"] for event in group}
    fault = next((e for e in group if e["event"] == "fault" and e["kind"] in DEEDS), None)
    crashed = "finish" not in names and (fault is not None or "error" in names or not last)
    ending = "ran to the end" if "finish" in names else ""
    if crashed and fault is not None:
        ending, stopped = _deed(fault), stopped if fault["at"] in MOMENTS else fault["step"]
    elif "stop_requested" in names:
        ending, crashed = f"stopped as asked after {stopped} steps", False
    elif crashed:
        ending = f"{_dead_rank(group)} died " + (f"after step {stopped - 1}" if curve else "before its first step")
    began = min(curve, default=loaded["step"])
    return Attempt(group[0]["generation"], began, bool(loaded.get("fresh")), dict(sorted(curve.items())), stopped, ending, crashed)


def _deed(fault: Event) -> str:
    when = MOMENTS.get(fault["at"], f"in step {fault['step']}")
    return f"rank {fault['rank']} {DEEDS.get(fault['kind'], 'failed')} {when}"


def _dead_rank(group: list[Event]) -> str:
    """The rank that left no word while all others reported an error, else the one that did fewer steps than all."""
    ranks = set(range(group[0]["world_size"]))
    lost = {e["rank"] for e in group if e["event"] == "error" and "PeerLost" in str(e.get("error"))}
    done = {rank: sum(e["event"] == "step" and e["rank"] == rank for e in group) for rank in ranks}
    slowest = {rank for rank in ranks if done[rank] == min(done.values())}
    suspects = next((s for s in (ranks - lost, slowest) if len(s) == 1), set())
    return f"rank {suspects.pop()}" if suspects else "a rank"


def recovery_figure(
    uninterrupted: list[Event], interrupted: list[Event], title: str | None = None
) -> Figure:
    """Three panels over the step: the losses of both runs, the attempts of the interrupted one, and the difference.

    Without a title, the headline says what happened. A run that is still going on, or has no step yet, is drawn too.
    """
    tries = attempts(interrupted)
    reference = {step: loss_of(record) for step, record in surviving_steps(uninterrupted).items()}
    alive: Curve = {}
    for attempt in tries:  # unlike surviving_steps, without what was lost and not yet done again
        alive = {step: loss for step, loss in alive.items() if step < attempt.began} | attempt.curve
    with matplotlib.rc_context(STYLE):
        figure, (top, middle, bottom) = _panels(len(tries), [*reference, *alive, *(a.stopped for a in tries)])
        _draw_losses(top, reference, alive, tries)
        _draw_attempts(middle, tries)
        verdict = _draw_difference(bottom, reference, alive)
        crashes = sum(a.crashed for a in tries)
        again = len(replayed_steps(interrupted))
        headline = f"{_count(crashes, 'crash', 'crashes')}, {_count(again, 'step')} done again; {verdict}"
        figure.text(LEFT / WIDTH, 1 - 0.3 / figure.get_figheight(), title or headline, size=12, weight="bold")
    return figure


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number or 'no'} {noun if number == 1 else plural or noun + 's'}"


def _panels(rows: int, steps: list[int]) -> tuple[Figure, list[Axes]]:
    heights = [LOSS, max(rows, 1) * ROW, DIFFERENCE]
    height = TOP + sum(heights) + 2 * GAP + BOTTOM
    figure = NotebookFigure(figsize=(WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    low, high = min(steps, default=0), max(steps, default=1)
    axes: list[Axes] = []
    above = TOP
    for tall in heights:
        box = (LEFT / WIDTH, 1 - (above + tall) / height, 1 - (LEFT + RIGHT) / WIDTH, tall / height)
        axes.append(figure.add_axes(box, sharex=axes[0] if axes else None))
        axes[-1].tick_params(labelbottom=tall is heights[-1], bottom=tall is heights[-1])
        above += tall + GAP
    axes[0].set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low) + 0.5)
    axes[2].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[2].set_xlabel("step")
    return figure, axes


def _draw_losses(ax: Axes, reference: Curve, alive: Curve, tries: list[Attempt]) -> None:
    every = reference | alive | {s: loss for a in tries for s, loss in a.curve.items()}
    dots = {"marker": "o", "markersize": 3} if len(every) <= 150 else {}
    ax.plot(list(reference), list(reference.values()), color=GREY, lw=7, solid_capstyle="round", label="uninterrupted")
    ax.plot(list(alive), list(alive.values()), color=BLUE, lw=1.6, **dots, label="interrupted")
    for before, after in pairwise(tries):
        lost = {step: loss for step, loss in before.curve.items() if step >= after.began - 1}
        if max(lost, default=-1) >= after.began:
            ax.plot(list(lost), list(lost.values()), "--", color=VERMILION, lw=1.4, label="lost",
                    **(dots | {"markersize": 7, "markerfacecolor": "none"} if dots else {}))
            ax.axvspan(after.began, before.stopped, color=YELLOW, alpha=0.35, lw=0, zorder=0)
