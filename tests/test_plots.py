"""The numbers and the picture of a recovery, from made-up events in the shape in which a run records them."""

import math
import sys
from io import BytesIO
from itertools import combinations
from typing import Any

import matplotlib
import pytest
from helpers import launch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from course_lib.lab.plots import (
    Event,
    max_abs_loss_difference,
    recovery_figure,
    starts,
    surviving_steps,
)

STEPS, EVERY = 60, 10
KILL = {"kind": "kill", "rank": 1}


def loss_at(step: int) -> float:
    return 2.3 * math.exp(-step / 18) + 0.1 + 0.06 * math.sin(step * 1.7)


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: str, rank: int, generation: int | None, world_size: int, **fields: Any) -> None:
        common = {"t": 1e9 + len(self.events) / 100, "event": event, "rank": rank, "world_size": world_size}
        self.events.append(common | {"generation": generation} | fields)


def run(
    *deaths: tuple[int, dict[str, Any] | None], steps: int = STEPS, world: int = 2, drift: float = 0.0
) -> list[Event]:
    """A run with a snapshot every 10 steps, which dies once in each of these steps; a fault of None leaves no event.

    After the first death its losses are off by up to `drift`. Of a death without an event the peers give notice.
    """
    record, done = Recorder(), 0
    for generation, (death, fault) in enumerate([*deaths, (steps, None)], 1):
        for rank in range(world):
            record("process_start", rank, None, world)
            record("snapshot_loaded", rank, generation, world, step=done, fresh=done == 0)
        saved = done
        for step in range(done, death):
            loss = loss_at(step) + drift * math.sin(step) * (generation > 1)
            for rank in reversed(range(world)):
                fields = {"epoch": 0, "lr": 0.1, "samples": [8 * step, 8 * step + 8], "seconds": 0.01}
                record("step", rank, generation, world, step=step, loss=loss, **fields)
            if (step + 1) % EVERY == 0 and not (step + 1 == death and fault and fault.get("at") == "snapshot"):
                saved = step + 1
                record("snapshot_saved", 0, generation, world, step=saved, stall_s=0.0, write_s=0.0, bytes=1)
        if fault is not None:
            record("fault", generation=generation, world_size=world, **({"at": "backward", "step": death} | fault))
        elif death < steps:
            for rank in set(range(world)) - {1}:
                record("error", rank, generation, world, error="PeerLost: Connection closed by peer")
        else:
            for rank in range(world):
                record("finish", rank, generation, world, step=steps)
        done = saved
    return record.events


BASE = run()
AT_START = [
    {
        "t": 1.0,
        "event": "fault",
        "rank": 1,
        "world_size": 2,
        "generation": None,
        "kind": "kill",
        "at": "start",
        "step": 0,
    }
]
CASES = {
    "no crash": BASE,
    "one crash": run((37, KILL)),
    "first step": run((0, KILL)),
    "before a snapshot": run((4, KILL)),
    "near the end": run((57, KILL)),
    "two crashes": run((23, KILL), (37, {"kind": "hang", "rank": 0})),
    "three at one step": run((37, KILL), (37, KILL), (37, {"kind": "segfault", "rank": 1})),
    "nine crashes": run(*((5 + 6 * n, KILL) for n in range(9))),
    "no event of it": run((37, None)),
    "at the start": AT_START + BASE,
    "in a snapshot": run((40, {"kind": "exception", "rank": 0, "at": "snapshot"})),
    "other losses": run((37, KILL), drift=0.1),
    "shorter": run((37, KILL), steps=50),
    "still going on": [e for e in run((37, KILL)) if e["generation"] != 2 or e.get("step", 0) < 34],
    "nothing yet": [],
}


def altered(events: list[Event], generation: int, step: int, loss: float) -> list[Event]:
    here = ("step", generation, step)
    return [e | {"loss": loss} if (e["event"], e["generation"], e.get("step")) == here else e for e in events]


def line(ax: Axes, label: str) -> list[tuple[float, float]]:
    """The points of all lines of this name."""
    found = [entry for entry in ax.lines if entry.get_label() == label]
    return [(float(x), float(y)) for entry in found for x, y in zip(*entry.get_data(), strict=True)]


def texts(figure: Figure) -> list[Text]:
    """All texts that are drawn; a tick's label exists outside the axis's range too, but is not."""
    hidden: set[Text] = set()
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    found = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    return [text for text in found if text.get_visible() and text.get_text() and text not in hidden]


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_text()]


def test_of_a_repeated_step_the_newest_generation_and_the_lowest_rank_count() -> None:
    steps = surviving_steps(run((37, KILL), world=3))
    assert list(steps) == list(range(STEPS))
    assert {record["rank"] for record in steps.values()} == {0}
    assert [record["generation"] for record in steps.values()] == [1] * 30 + [2] * 30


def test_the_difference_is_that_of_the_surviving_steps() -> None:
    crashed = CASES["two crashes"]
    assert max_abs_loss_difference(BASE, crashed) == 0.0
    assert max_abs_loss_difference(BASE, altered(crashed, 1, 22, 9.0)) == 0.0  # of a lost step
    for generation, step in [(1, 19), (2, 22), (3, 30), (3, 59)]:
        moved = altered(crashed, generation, step, loss_at(step) + 1e-6)
        assert max_abs_loss_difference(BASE, moved) == pytest.approx(1e-6, rel=1e-3)
        assert max_abs_loss_difference(moved, BASE) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 30, 59])
def test_a_loss_that_is_not_finite_is_no_agreement(step: int, loss: float) -> None:
    broken = altered(BASE, 1, step, loss)
    assert max_abs_loss_difference(BASE, broken) == math.inf
    assert max_abs_loss_difference(broken, BASE) == math.inf
    assert max_abs_loss_difference(broken, broken) == math.inf


def test_other_steps_or_none_are_no_agreement() -> None:
    without = [event for event in BASE if event.get("step") != 17]
    assert max_abs_loss_difference(BASE, without) == math.inf
    assert max_abs_loss_difference(BASE, run(steps=50)) == math.inf
    assert max_abs_loss_difference(BASE, []) == math.inf
    assert max_abs_loss_difference([], []) == math.inf
    missing = [{k: v for k, v in event.items() if k != "loss"} for event in BASE]
    assert max_abs_loss_difference(missing, missing) == math.inf


RESUMED = "resumed from the snapshot after 30 steps (7 done again)"
STORIES = {
    "no crash": [""],
    "one crash": ["rank 1 killed in step 37", RESUMED],
    "no event of it": ["rank 1 died after step 36", RESUMED],
    "first step": ["rank 1 killed in step 0", "began again at step 0, without a snapshot"],
    "before a snapshot": ["rank 1 killed in step 4", "began again at step 0, without a snapshot (4 done again)"],
    "at the start": ["rank 1 killed as it started", "began again at step 0, without a snapshot"],
    "in a snapshot": [
        "rank 0 hit by exception as it saved",
        "resumed from the snapshot after 30 steps (10 done again)",
    ],
    "two crashes": [
        "rank 1 killed in step 23",
        "resumed from the snapshot after 20 steps (3 done again); rank 0 hung in step 37",
        RESUMED,
    ],
    "still going on": ["rank 1 killed in step 37", "resumed from the snapshot after 30 steps (4 done again)"],
}


@pytest.mark.parametrize("name", STORIES)
def test_each_start_is_told_in_words(name: str) -> None:
    assert [start.story for start in starts(CASES[name])] == STORIES[name]
    _, middle, _ = recovery_figure(BASE, CASES[name]).axes
    assert words(middle) == [story for story in STORIES[name] if story]


def test_who_died_is_said_only_when_it_shows() -> None:
    silent = [event for event in run((37, None)) if event["event"] != "error"]
    assert starts(silent)[0].story == "a rank died after step 36"
    behind = [e for e in silent if (e["rank"], e.get("generation"), e.get("step"), e["event"]) != (1, 1, 36, "step")]
    assert starts(behind)[0].story == "rank 1 died after step 36"
    assert starts(run((0, None), world=3))[0].story == "rank 1 died before its first step"


def test_a_stop_and_a_slow_rank_are_no_crashes() -> None:
    stopped = [e | {"event": "stop_requested"} if e["event"] == "error" else e for e in run((40, None))]
    assert [(s.story, s.crashed) for s in starts(stopped)] == [
        ("stopped as asked after 40 steps", False),
        ("resumed from the snapshot after 40 steps", False),
    ]
    slow = {"event": "fault", "kind": "slow", "at": "data", "step": 5, "t": 2e9, "rank": 1, "world_size": 2}
    assert [(s.story, s.crashed) for s in starts([*BASE, slow | {"generation": 1}])] == [("", False)]
    died_later = starts([slow | {"generation": 1, "t": 0.0}, *CASES["one crash"]])
    assert [s.story for s in died_later] == STORIES["one crash"]


def test_a_run_that_died_for_good_ends_with_a_crash() -> None:
    assert starts([e for e in run((37, KILL)) if e["generation"] == 1])[-1].crashed
    gone = [e for e in run((37, None)) if e["generation"] == 1]
    assert (starts(gone)[-1].crashed, starts(gone)[-1].story) == (True, "rank 1 died after step 36")


def test_the_curves_are_those_of_the_runs() -> None:
    figure = recovery_figure(BASE, CASES["one crash"])
    top, _, bottom = figure.axes
    curve = [(step, loss_at(step)) for step in range(STEPS)]
    assert line(top, "uninterrupted") == line(top, "interrupted") == curve
    assert line(top, "lost") == curve[30:37]
    assert line(top, "crash") == [curve[37]] and line(top, "snapshot") == [curve[30]]
    assert line(bottom, "difference") == [(step, 0.0) for step in range(STEPS)]
    assert words(bottom) == ["largest difference: 0.0 (exactly)"]
    assert {"uninterrupted", "interrupted", "lost and\ndone again"} == set(words(top))
    assert top.get_title("left") == "1 crash, 7 steps done again, exactly the same curve"


def test_the_lost_branch_is_drawn_where_it_was() -> None:
    top, _, bottom = recovery_figure(BASE, CASES["other losses"]).axes
    assert line(top, "lost") == [(step, loss_at(step)) for step in range(30, 37)]
    assert line(top, "interrupted")[35] == (35, loss_at(35) + 0.1 * math.sin(35))
    assert line(bottom, "difference")[35][1] == pytest.approx(0.1 * math.sin(35))
    assert words(bottom) == ["largest difference: 1.0e-01"]


def test_several_crashes_have_a_mark_each() -> None:
    top, middle, _ = recovery_figure(BASE, CASES["two crashes"]).axes
    assert [x for x, _ in line(top, "crash")] == [x for x, _ in line(middle, "crash")] == [23, 37]
    assert [x for x, _ in line(top, "snapshot")] == [x for x, _ in line(middle, "snapshot")] == [20, 30]
    assert [x for x, _ in line(middle, "start")] == [0, 23, 20, 37, 30, 60]
    assert [label.get_text() for label in middle.get_yticklabels()] == ["start 1", "start 2", "start 3"]


def test_a_live_run_falls_back() -> None:
    top, _, bottom = recovery_figure(BASE, CASES["still going on"]).axes
    assert [x for x, _ in line(top, "interrupted")] == list(range(34))
    assert [x for x, _ in line(top, "lost")] == list(range(30, 37))
    assert words(bottom) == ["largest difference: 0.0 (exactly) in 34 shared steps; 26 not shared"]
    assert top.get_title("left") == "1 crash, 4 steps done again, 26 steps not in both runs"


def test_a_shorter_run_is_not_the_same_curve() -> None:
    top, _, bottom = recovery_figure(BASE, CASES["shorter"]).axes
    assert words(bottom) == ["largest difference: 0.0 (exactly) in 50 shared steps; 10 not shared"]
    assert "exactly" not in top.get_title("left")


@pytest.mark.filterwarnings("error")
def test_a_loss_that_is_not_finite_is_said() -> None:
    broken = altered(altered(CASES["one crash"], 1, 36, math.inf), 2, 59, math.nan)
    figure = recovery_figure(BASE, broken)
    assert words(figure.axes[2]) == ["a loss is not finite"]
    figure.savefig(BytesIO(), format="png")


def test_a_given_title_replaces_the_headline() -> None:
    assert recovery_figure(BASE, BASE, title="Chapter 4").axes[0].get_title("left") == "Chapter 4"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_all_words_can_be_read(name: str) -> None:
    """At least 9 points, inside the picture, and none over another."""
    figure = recovery_figure(BASE if name != "nothing yet" else [], CASES[name])
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    boxes = {text: text.get_window_extent() for text in texts(figure)}
    assert len(boxes) > 5
    for text, box in boxes.items():
        assert text.get_fontsize() >= 9, text
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    shrunk = {text: box.padded(-1) for text, box in boxes.items()}  # neighbours may touch
    assert [(a, b) for a, b in combinations(shrunk, 2) if shrunk[a].overlaps(shrunk[b])] == []


def test_strokes_differ_in_more_than_colour() -> None:
    top = recovery_figure(BASE, CASES["one crash"]).axes[0]
    style = {ln.get_label(): (ln.get_linestyle(), ln.get_linewidth(), ln.get_marker()) for ln in top.lines}
    assert len(set(style.values())) == len(style) == 5


def test_a_notebook_shows_the_figure_and_nothing_global_changes() -> None:
    before = dict(matplotlib.rcParams)
    figure = recovery_figure(BASE, BASE)
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert dict(matplotlib.rcParams) == before
    code = "import sys, course_lib.lab.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert launch([sys.executable, "-c", code]).returncode == 0
