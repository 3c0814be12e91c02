"""The figures of notebook 06 that tell what happened: the life of a job on many nodes, and recorded scenes."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from course_lib.engine import read_events
from course_lib.lab.fig05 import ORANGE, PURPLE, SKY
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure, surviving_steps
from course_lib.lab.story import Deed, Life, Story, read_story, story

COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, "#8C6D31", "#777777")
_WORDS = {"kill": "killed", "stop": "asked to stop", "hang": "freezes", "pause": "paused"}
_WORDS |= {"lost": "its agent ends, too"}


def color_of(generation: int) -> str:
    """The colour of a generation, the first of which is 1."""
    return COLORS[(generation - 1) % len(COLORS)]


def timeline(run: Path | str, undisturbed: Path | str | None = None) -> NotebookFigure:
    """The whole life of a run that was told: the number of ranks, a lane for each node, and the loss, over the time.

    Below the loss lies, wide and grey, that of the `undisturbed` run at the same steps.
    """
    curve = {}
    if undisturbed is not None:
        curve = {step: float(e["loss"]) for step, e in surviving_steps(read_events(undisturbed).events).items()}
    return draw_story(read_story(run), curve)


def draw_story(told: Story, curve: Mapping[int, float] | None = None, loss: bool = True) -> NotebookFigure:
    """Three panels over the seconds, or without the loss two."""
    nodes = sorted({life.node for life in told.lives} | {deed.node for deed in told.deeds})
    heights = [0.75, 0.5 * len(nodes), 1.6][: 3 if loss else 2]
    figure = NotebookFigure(figsize=(8, sum(heights) + 0.75), layout="constrained", facecolor="white")
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
    end = max([life.ended for life in told.lives] + [deed.t for deed in told.deeds])
    _draw_sizes(panels[0], told.lives)
    _draw_lanes(panels[1], told, nodes, end)
    if loss:
        _draw_loss(panels[2], told, curve or {})
    panels[-1].set_xlabel("seconds")
    told_last = max((deed.t for deed in told.deeds if deed.what in _WORDS), default=0.0)
    panels[-1].set_xlim(-0.01 * end, max(1.03 * end, told_last + 0.22 * end))
    figure.align_ylabels()
    return figure


def _generations(lives: Sequence[Life]) -> dict[int, list[Life]]:
    return {number: [life for life in lives if life.generation == number] for number in sorted({
        life.generation for life in lives})}  # fmt: skip


def _draw_sizes(ax: Axes, lives: Sequence[Life]) -> None:
    """A block for each generation from its first step to its last event, as high as it has ranks."""
    most = max(life.ranks for life in lives)
    for number, group in _generations(lives).items():
        begun = min((life.trained for life in group if life.trained is not None), default=None)
        if begun is None:
            continue
        ended = max(life.busy for life in group)
        ax.bar(begun, group[0].ranks, width=ended - begun, align="edge", color=color_of(number), ec="white")
        ax.text((begun + ended) / 2, group[0].ranks + 0.15, str(group[0].ranks), ha="center", weight="bold")
    sizes = [size for size, _ in groupby(group[0].ranks for group in _generations(lives).values())]
    if len(sizes) > 1:
        ax.set_title(f"{' → '.join(map(str, sizes))} ranks", loc="left", size=11, weight="bold")
    ax.set(ylabel="ranks", ylim=(0, most + 1.4), yticks=[])
    ax.tick_params(bottom=False)


def _draw_lanes(ax: Axes, told: Story, nodes: list[str], end: float) -> None:
    """Each worker's life: pale while it starts up, full while it trains, its generation's colour and number."""
    for life in told.lives:
        same = [other for other in told.lives if (other.node, other.generation) == (life.node, life.generation)]
        height = 0.62 / len(same)
        y = nodes.index(life.node) + (same.index(life) - (len(same) - 1) / 2) * height
        begun = life.trained if life.trained is not None else life.ended
        look: dict[str, Any] = {
            "height": height * (0.92 if len(same) == 1 else 0.8),
            "color": color_of(life.generation),
            "lw": 0,
        }
        ax.barh(y, begun - life.born, left=life.born, alpha=0.3, **look)
        ax.barh(y, life.ended - life.busy, left=life.busy, alpha=0.3, **look)
        ax.barh(y, life.busy - begun, left=begun, **look)
        if len(same) == 1 and life.busy - begun > 0.04 * end:
            ax.text((begun + life.busy) / 2, y, str(life.generation), color="white", ha="center", va="center",
                    weight="bold")  # fmt: skip
    for number, deed in enumerate(told.deeds):
        said = any(deed.t - 1 < other.t and other.what == deed.what for other in told.deeds[:number])
        _draw_deed(ax, deed, told, nodes.index(deed.node), end, said)
    names = [f"node {node}" if told.deeds else node for node in nodes]
    ax.set_yticks(range(len(nodes)), names)
    ax.set_ylim(len(nodes) - 0.45, -0.55)
    ax.tick_params(left=False, bottom=False)
    ax.spines["left"].set_visible(False)


def _draw_deed(ax: Axes, deed: Deed, told: Story, row: int, end: float, said: bool) -> None:
    """A mark, and beside it what it is, unless that was `said` at another node in the same second."""
    following = min(
        (life.born for life in told.lives if life.node == deed.node and life.born > deed.t), default=math.inf
    )
    if deed.what in ("start", "resume"):
        ax.plot(deed.t, row, ">", color=DARK, ms=6, zorder=4)
        before = any(other.node == deed.node and other.t < deed.t for other in told.deeds)
        late = any(life.trained is not None and life.trained < deed.t for life in told.lives)
        if before or late:
            _say(ax, "back" if before else "waits", deed.t, row - 0.37, DARK, above=True)
        return
    asked = deed.what == "stop"
    color = DARK if asked else VERMILION
    ax.plot(deed.t, row, "s" if asked else "X", color=color, ms=6 if asked else 9, mec="white", zorder=5)
    if not said:
        above = following - deed.t < 0.15 * end
        _say(ax, _WORDS[deed.what], deed.t, row - 0.37 if above else row, color, above=above)


def _say(ax: Axes, words: str, t: float, y: float, color: str, above: bool = False) -> None:
    """Words to the right of a mark, or above it."""
    aside, va, ha = (0, "bottom", "center") if above else (8, "center", "left")
    ax.annotate(words, (t, y), (aside, 0), textcoords="offset points", color=color, size=9, va=va, ha=ha)


def _draw_loss(ax: Axes, told: Story, curve: Mapping[int, float]) -> None:
    known = [(t, curve[step]) for t, step, _, _ in told.steps if step in curve]
    if known:
        ax.plot(*zip(*known, strict=True), "o", color=GREY, ms=8, mec="none")
    for number in sorted({generation for _, _, generation, _ in told.steps}):
        points = [(t, loss) for t, _, generation, loss in told.steps if generation == number]
        ax.plot(*zip(*points, strict=True), "o-", color=color_of(number), ms=3, lw=1)
    ax.set_ylabel("loss")
    if known:
        words = "wide grey: at the same step\nof the job that nobody disturbed"
        ax.text(0.01, 0.06, words, color=DARK, size=9, transform=ax.transAxes, va="bottom")


def recorded_story(scene: Mapping[str, Any]) -> NotebookFigure:
    """The lanes of a recorded scene."""
    return draw_story(story(scene["deeds"], scene["events"]), loss=False)


def hang(job: Mapping[str, Any]) -> NotebookFigure:
    """The ranks of a recorded job in which one hangs: each step as a tick, the errors, and the wait between them."""
    steps = [event for event in job["events"] if event["event"] == "step"]
    last = max(event["t"] for event in steps)
    errors = {event["rank"]: event["t"] - last for event in job["events"] if event["event"] == "error"}
    ranks = sorted({event["rank"] for event in steps})
    figure = NotebookFigure(figsize=(8, 0.9 + 0.55 * len(ranks)), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.spines[["top", "right", "left"]].set_visible(False)
    for rank in ranks:
        ts = [event["t"] - last for event in steps if event["rank"] == rank]
        ax.plot(ts, [rank] * len(ts), "|", color=BLUE, ms=16, mew=2)
        if rank in errors:
            ax.barh(rank, errors[rank], left=0, height=0.4, color=GREY)
            ax.text(0.15, rank, "waits in the all-reduce", va="center", size=9)
            ax.plot(errors[rank], rank, "X", color=VERMILION, ms=10, mec="white")
            ax.text(errors[rank] + 0.12, rank, "timeout", color=VERMILION, va="center")
        else:
            ax.text(0.15, rank, "says nothing, and is said to be running", va="center", color=VERMILION)
    ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    ax.set(ylim=(len(ranks) - 0.5, -0.5), xlim=(-1.2, max(errors.values(), default=4) * 1.25))
    ax.set_xlabel("seconds since the last step")
    ax.tick_params(left=False)
    return figure
