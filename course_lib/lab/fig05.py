"""The figures of notebook 05 about files: torn saves, flipped bits, a publish line by line, and what a resume loads."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from course_lib.lab.answers import one_line
from course_lib.lab.one_bit import BEFORE, flipped
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure
from course_lib.lab.publishing import Publish, Row, crash_rows
from course_lib.lab.snapshot_claims import resume_points, snapshots
from course_lib.lab.torn import PARAMETERS, Death

ORANGE, SKY, PURPLE, PALE = "#E69F00", "#56B4E9", "#CC79A7", "#F2F2F2"


def figure_of(height: float, columns: int = 1, **options: Any) -> tuple[NotebookFigure, list[Any]]:
    """A figure of the course's width with a row of panels."""
    figure = NotebookFigure(figsize=(8, height), layout="constrained", facecolor="white")
    panels = list(figure.subplots(1, columns, squeeze=False, **options)[0])
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, panels


def torn(deaths: Sequence[Death]) -> NotebookFigure:
    """For each byte at which a save was killed, what is then under the name; on the left in place, right beside."""
    bytes_ = sorted({death.byte for death in deaths})
    figure, panels = figure_of(0.9 + 0.42 * len(bytes_), 2, sharex=True, sharey=True)
    for ax, way, title in zip(panels, ("in place", "beside"), ("written in place", "written beside"), strict=True):
        for death in (death for death in deaths if death.way == way):
            row, size = bytes_.index(death.byte), death.left["snapshot.pt"] / 1e6
            good = death.step is not None
            ax.barh(row, 12 * PARAMETERS / 1e6, height=0.6, fc="none", ec=GREY, ls=":")
            ax.barh(row, size, height=0.6, color=GREEN if good else VERMILION, hatch="" if good else "///", ec="white")
            words = "the old snapshot, whole" if death.step == 1 else "the new one" if good else "cannot be opened"
            inside = good or size > 40
            ax.text(2 if inside else size + 2, row, words, va="center", size=9, weight="bold",
                    color="black", bbox={"fc": "white", "ec": "none", "pad": 1, "alpha": 0.85})  # fmt: skip
        ax.set_title(title, loc="left", size=11, weight="bold")
        ax.set(xlabel="MB under the name")
        ax.tick_params(left=False)
    panels[0].set_yticks(range(len(bytes_)), [f"killed at {byte / 1e6:.6g} MB" for byte in bytes_])
    panels[0].set_ylim(len(bytes_) - 0.5, -0.5)
    return figure


def bits(value: float) -> NotebookFigure:
    """What a float32 becomes when one of its bits is flipped, for each of the 32 bits; and the bits that it has."""
    figure, (ax,) = figure_of(3.4)
    pattern = f"{int(np.float32(value).view(np.uint32)):032b}"
    fields = {"sign": ([31], VERMILION), "exponent": (range(30, 22, -1), ORANGE), "fraction": (range(22, -1, -1), SKY)}
    ax.axhline(abs(value), color=GREY, lw=1)
    ax.text(-0.6, abs(value) * 6, f"{value:g}", color=DARK, ha="right", va="bottom")
    for name, (places, color) in fields.items():
        for bit in places:
            after = flipped(value, bit)
            ax.plot([bit, bit], [abs(value), max(abs(after), 1e-45)], color=color, lw=5, solid_capstyle="butt")
            ax.plot(bit, max(abs(after), 1e-45), "o", color=color, ms=7, mec="white")
            if bit in (31, 30, 29, 23, 22):
                above = abs(after) >= abs(value) and bit != 22  # whose number would touch the one of bit 23
                ax.annotate(f"{after:.3g}", (bit, abs(after)), (0, 7 if above else -7), textcoords="offset points",
                            ha="center", va="bottom" if above else "top", size=9)  # fmt: skip
            ax.text(bit, 1.02, pattern[31 - bit], ha="center", va="bottom",
                    family="monospace", color=color, weight="bold", transform=ax.get_xaxis_transform())  # fmt: skip
        middle = (places[0] + places[-1]) / 2
        ax.text(middle, 1.1, name, ha="center", color=color, weight="bold", transform=ax.get_xaxis_transform())
    ax.set(yscale="log", xlim=(32, -1.5), ylim=(1e-28, 1e46), xlabel="the bit that is flipped")
    ax.set_xticks([31, 30, 23, 22, 0], ["31", "30", "23", "22", "0"], size=9)
    ax.set_yticks([1e-20, 1, 1e20, 1e38], ["1e-20", "1", "1e20", "1e38"])
    ax.set_ylabel("its size then")
    return figure


def curves(whole: Sequence[float], flipped_curves: Mapping[str, Sequence[float]]) -> NotebookFigure:
    """The losses of runs that were resumed from a file with a flipped bit, over the run from the sound file."""
    figure, panels = figure_of(2.9, len(flipped_curves), sharey=True)
    steps = list(range(BEFORE, BEFORE + len(whole)))
    for ax, (name, losses), color in zip(
        panels, flipped_curves.items(), (BLUE, VERMILION, PURPLE, ORANGE), strict=False
    ):
        ax.plot(steps, whole, color=GREY, lw=6, solid_capstyle="butt")
        alive = [loss if math.isfinite(loss) and loss < 10 else math.nan for loss in losses]
        ax.plot(steps, alive, color=color, lw=1.6)
        ends = next((i for i, loss in enumerate(alive) if math.isnan(loss)), None)
        if ends is not None:
            ax.plot(steps[ends - 1], alive[ends - 1], "X", color=color, ms=10, mec="white")
            ax.annotate(f"then {losses[ends]:.0e},\nthen {losses[-1]}", (steps[ends - 1], alive[ends - 1]), (6, 42),
                        textcoords="offset points", color=color)  # fmt: skip
        ax.set_title(name, loc="left", size=10, weight="bold", color=color)
        ax.set(xlabel="step", ylim=(0, 1))
    panels[0].set_ylabel("loss")
    panels[0].text(steps[-1], 0.9, "wide grey:\nfrom the sound file", color=DARK, ha="right", va="top", size=9)
    return figure


_LOOKS = {"nothing": (PALE, DARK), "whole": (GREEN, "white")}


def crash_map(publish: Publish) -> NotebookFigure:
    """The lines of a publish, in the order in which they are done; beside each what the disk may hold after it."""
    try:
        rows = crash_rows(publish)
    except Exception as error:  # the learner's own, about which the check says more
        rows = [Row(None, f"(it raised {one_line(error)})", (), ())]
    figure, (ax,) = figure_of(0.75 + 0.27 * len(rows))
    ax.axis("off")
    ax.text(0, -1.0, "when this line is done and the machine dies …", color=DARK, va="center")
    ax.text(5.2, -1.0, "… this may be under the name", color=DARK, va="center")
    for y, row in enumerate(rows):
        ax.text(0, y, row.code[:56], family="monospace", size=9, va="center", color="black" if row.line else DARK)
        for x, state in enumerate(row.found):
            face, ink = _LOOKS.get(state, (VERMILION, "white"))
            if state in row.bad:
                face, ink = VERMILION, "white"
            ax.add_patch(Rectangle((5.2 + 0.98 * x, y - 0.42), 0.94, 0.84, fc=face, ec="white"))
            ax.text(5.67 + 0.98 * x, y, state if len(state) < 9 else "lost", ha="center", va="center", size=9,
                    color=ink, weight="bold")  # fmt: skip
    ax.set(xlim=(-0.05, 10.2), ylim=(len(rows) - 0.4, -1.5))
    return figure


def fall_back(run: Path | str) -> NotebookFigure:
    """A row for each number of damaged snapshots: which are damaged, which one is loaded, and what is done again."""
    steps, points = snapshots(run), resume_points(run)
    figure, (ax,) = figure_of(0.8 + 0.45 * len(points))
    for row, (count, point) in enumerate(points.items()):
        damaged = steps[len(steps) - count :]
        for x, step in enumerate(steps):
            color = VERMILION if step in damaged else GREEN if step == point else GREY
            ax.add_patch(Rectangle((x, row - 0.35), 0.9, 0.7, fc=color, ec="white", hatch="///" * (step in damaged)))
            word = "damaged" if step in damaged else "loaded" if step == point else ""
            ax.text(x + 0.45, row, word, ha="center", va="center", size=9, weight="bold",
                    bbox={"fc": "white", "ec": "none", "pad": 1.5, "alpha": 0.85} if word else None)  # fmt: skip
        again = (
            f"goes on after {point} steps, {steps[-1] - point} done again" if point is not None else "stops and says so"
        )
        ax.text(len(steps) + 0.1, row, again, va="center", color=VERMILION if point is None else DARK)
    ax.set(xlim=(0, len(steps) + 3), ylim=(len(points) - 0.4, -0.6))
    ax.set_xticks([x + 0.45 for x in range(len(steps))], [f"after {step} steps" for step in steps])
    ax.set_yticks(range(len(points)), ["none", *(f"newest {n}" if n > 1 else "newest" for n in list(points)[1:])])
    ax.spines[:].set_visible(False)
    ax.tick_params(left=False, bottom=False, labeltop=True, labelbottom=False)
    ax.set_ylabel("damaged")
    return figure
