"""A loss curve that grows while the job runs: it falls back when a restart begins at a snapshot, and goes on."""

import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.engine import read_events
from course_lib.engine.runlog import Event
from course_lib.lab.plots import BLUE, GREEN, GREY, VERMILION, NotebookFigure, Start, starts

_PERIOD_S = 1.0


def live_figure(events: list[Event], running: bool) -> Figure:
    """The loss of each start over the step; what a death cost is grey, and the newest start says what it did."""
    figure = NotebookFigure(figsize=(8, 3.2), dpi=90, layout="constrained")
    ax = figure.subplots()
    tries = starts(events)
    for number, start in enumerate(tries, 1):
        _draw(ax, start, number, newest=number == len(tries))
    step = tries[-1].stopped if tries else 0
    title = f"running: {step} steps done" if running else f"ended after {step} steps"
    if tries and tries[-1].story:
        title += f"; start {len(tries)}: {tries[-1].story}"
    ax.set_title(title, loc="left", size=10)
    ax.set(xlabel="optimizer step", ylabel="loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _draw(ax: Any, start: Start, number: int, newest: bool) -> None:
    if not start.curve:
        return
    steps, losses = list(start.curve), list(start.curve.values())
    ax.plot(steps, losses, color=BLUE if newest else GREY, lw=2 if newest else 3.5, zorder=3 if newest else 2)
    if start.began:
        ax.plot(steps[0], losses[0], "D", color=GREEN, ms=7, mec="white", zorder=5)
        _say(ax, f"start {number} goes on from its snapshot", steps[0], losses[0], (8, 10), "left")
    if start.crashed:
        ax.plot(steps[-1], losses[-1], "X", color=VERMILION, ms=11, mec="white", zorder=6)
        _say(ax, f"start {number} died", steps[-1], losses[-1], (-8, -14), "right")
    elif newest:
        ax.plot(steps[-1], losses[-1], "o", color=BLUE, ms=6, zorder=5)


def _say(ax: Any, words: str, step: int, loss: float, aside: tuple[int, int], align: str) -> None:
    ax.annotate(words, (step, loss), aside, textcoords="offset points", ha=align, size=9)


class LiveCurve:
    """Shows the events of `run_dir` in a notebook and keeps them up to date; outside of one it does nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._drawn = (-1, True)  # events, and whether the job ran: what the figure on display shows
        self._next = 0.0
        self._handle: Any = None

    def refresh(self, running: bool) -> None:
        """Draw again, unless nothing is new or the last time is less than a second ago; the end is always drawn."""
        if running and time.monotonic() < self._next:
            return
        events = read_events(self._run_dir).events
        if (len(events), running) == self._drawn:
            return
        self._drawn = len(events), running
        figure = live_figure(events, running)
        if self._handle is None:
            self._handle = _display(figure)
        else:
            self._handle.update(figure)
        self._next = time.monotonic() + _PERIOD_S


def _display(figure: Figure) -> Any:
    """The handle of a figure that can be replaced where it stands: `clear_output` would remove the other outputs."""
    from IPython.core.getipython import get_ipython
    from IPython.display import DisplayHandle, display

    if get_ipython() is None:
        return _Nowhere()
    handle = DisplayHandle()  # type: ignore[no-untyped-call]
    display(figure, display_id=handle.display_id)  # type: ignore[no-untyped-call]
    return handle


class _Nowhere:
    def update(self, figure: Figure) -> None:
        """A figure that nobody looks at."""
