"""The figures of notebook 05 about time: what was left out, a snapshot torn in time, stalls, and two generations."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from course_lib.engine.snapshots import SnapshotStore
from course_lib.engine.snapshots.survey import survey
from course_lib.lab import left_out
from course_lib.lab.fig05 import ORANGE, SKY, figure_of
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure
from course_lib.lab.stalls import Timeline

_FLOOR = 1e-6  # where a difference of exactly 0 is drawn, on an axis that has no 0


def lost_pieces() -> NotebookFigure:
    """Five resumed runs, without their names: how far each is from the run that nobody killed, and its best.pt."""
    whole = left_out.uninterrupted()
    figure = NotebookFigure(figsize=(8, 6.4), layout="constrained", facecolor="white")
    axes = list(figure.subplots(3, 2, sharex=True, sharey=True).flat)
    for ax, (letter, piece) in zip(axes, left_out.suspects().items(), strict=False):
        _draw_run(ax, letter, left_out.resume_without(piece), whole)
    axes[-1].axis("off")
    words = {"training loss": (BLUE, "-"), "held-out loss of the averaged weights": (ORANGE, "--")}
    for name, (color, style) in words.items():
        axes[-1].plot([], [], style, color=color, label=name)
    axes[-1].plot([], [], "*", color=VERMILION, ms=13, ls="", label="best.pt is written")
    axes[-1].legend(
        loc="center", frameon=False, title="distance to the run that nobody killed\n(which writes no best.pt)"
    )
    return figure


def _draw_run(ax: Axes, letter: str, run: left_out.Traces, whole: left_out.Traces) -> None:
    steps = list(range(left_out.DEATH, left_out.DEATH + len(run.train)))
    for mine, twin, color, style in ((run.train, whole.train, BLUE, "-"), (run.average, whole.average, ORANGE, "--")):
        gaps = [max(abs(a - b), _FLOOR) for a, b in zip(mine, twin, strict=True)]
        ax.plot(steps, gaps, style, color=color, lw=1.6)
        ax.plot(steps[:3], gaps[:3], "o", color=color, ms=5)
    for step in run.best_written:
        ax.plot(step, 3, "*", color=VERMILION, ms=13, clip_on=False)
    ax.set_title(f"run {letter}", loc="left", size=10, weight="bold")
    ax.set(yscale="log", ylim=(_FLOOR / 2, 10), xlabel="step")
    ax.set_yticks([_FLOOR, 1e-4, 1e-2, 1], ["0 exactly", "0.0001", "0.01", "1"])
    ax.tick_params(labelbottom=True)
    ax.spines[["top", "right"]].set_visible(False)


def moments(layers: Mapping[str, Sequence[float]], began: int) -> NotebookFigure:
    """For each tensor of a snapshot, the steps whose values it holds; the snapshot should be of step `began`."""
    figure, (ax,) = figure_of(0.9 + 0.3 * len(layers))
    for row, steps in enumerate(layers.values()):
        low, high = min(steps), max(steps)
        ax.barh(row, high - low + 1, left=low - 0.5, height=0.6, color=BLUE if low == high == began else VERMILION)
        words = f"step {low:.0f}" if low == high else f"steps {low:.0f} to {high:.0f}"
        ax.text(high + 0.8, row, words, va="center", size=9, color=DARK)
    ax.axvline(began, color=DARK, lw=1.2, ls=":")
    ax.text(began, -0.75, "the save began at this step", va="bottom", size=9, color=DARK)
    ax.set_yticks(range(len(layers)), list(layers))
    ax.set(xlabel="step whose values are in the file", ylim=(len(layers) - 0.5, -0.7))
    ax.set_xlim(began - 1, max(max(steps) for steps in layers.values()) * 1.2 + 2)
    return figure


def stalls(timelines: Sequence[Timeline]) -> NotebookFigure:
    """The training thread and the writer around one save, for each way; time begins with the save."""
    figure, (ax,) = figure_of(1.0 + 0.75 * len(timelines))
    left = -1.5 * max(end - begin for timeline in timelines for begin, end in timeline.steps[:2])
    right = max(timeline.written_s for timeline in timelines)
    for row, timeline in enumerate(timelines):
        for begin, end in timeline.steps:
            if end > left:
                ax.barh(row - 0.2, end - begin, left=begin, height=0.36, color=SKY, ec="white", lw=0.7)
        ax.barh(row - 0.2, timeline.stall_s, left=0, height=0.36, color=VERMILION, ec="white", lw=0.7)
        ax.barh(row + 0.17, timeline.written_s, left=0, height=0.26, color=GREY)
        words = f"held up for {timeline.stall_s * 1e3:.0f} ms, written after {timeline.written_s * 1e3:.0f} ms"
        ax.text(0.005, row + 0.17, words, va="center", size=9)
    ax.axvline(0, color=DARK, lw=1, ls=":")
    ax.text(0, -0.62, "the save begins", size=9, color=DARK, va="bottom")
    for x, (name, color) in enumerate(
        {"a step": SKY, "held up": VERMILION, "on its way to the disk": "#8A8A8A"}.items()
    ):
        ax.text(0.35 + 0.16 * x, 1.02, f"■ {name}", color=color, transform=ax.transAxes, weight="bold")
    ax.set_yticks(range(len(timelines)), [timeline.way for timeline in timelines])
    ax.set(xlabel="seconds", xlim=(left, right * 1.05 + 0.1), ylim=(len(timelines) - 0.4, -0.65))
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)
    return figure


def generations(store: SnapshotStore) -> NotebookFigure:
    """The snapshots of a run by generation and step; those in the line of the newest claim are blue, others grey."""
    found = survey(store, read=True)
    claims = {claim.generation: claim for claim in store.listing().claims}
    figure, (ax,) = figure_of(0.9 + 0.6 * len(claims))
    for row in found.snapshots:
        color = GREEN if row.snapshot == found.resume else BLUE if row.in_line else GREY
        ax.plot(row.step, row.generation, "D", color=color, ms=13, mec="white", zorder=3)
        words = "loaded" if row.snapshot == found.resume else "" if row.in_line else "in nobody's line"
        ax.annotate(words, (row.step, row.generation), (0, 11), textcoords="offset points", ha="center", color=color
                    if row.in_line else DARK, size=9)  # fmt: skip
        parent = (claims[row.generation].parent or "").split("-")
        ax.plot([int(parent[-1] or 0), row.step], [row.generation] * 2, color=color if row.in_line else GREY,
                ls="-" if row.in_line else ":", lw=2, zorder=1)  # fmt: skip
    for claim in claims.values():
        if claim.parent:
            _, generation, _, step = claim.parent.split("-")
            arrow = {"arrowstyle": "-|>", "color": BLUE, "shrinkA": 9, "shrinkB": 0, "lw": 2}
            ax.annotate("", (int(step), claim.generation), (int(step), int(generation)), arrowprops=arrow)
    ax.set_yticks(list(claims), [f"generation {number}" for number in claims])
    ax.set(xlabel="step", ylim=(max(claims) + 0.5, min(claims) - 0.6), xlim=(0, None))
    ax.tick_params(left=False)
    return figure
