"""The figures of notebook 08 say what they were given."""

from pathlib import Path

import pytest
import test_n08
from test_figures_06 import colors, rgb, words

from course_lib.lab import fig08, fig08_scale, llama3, scale
from course_lib.lab.goodput_cases import read_cases
from course_lib.lab.goodput_claims import constants, report_of
from course_lib.lab.plots import VERMILION
from course_lib.lab.report_figures import KIND_COLORS
from course_lib.lab.simulator import simulate

run = test_n08.run


def test_the_stages_of_a_recovery_are_all_of_it(run: Path) -> None:
    found = report_of(run).recoveries[0]
    seconds = fig08.stages(found)
    assert sum(seconds.values()) == pytest.approx(found.total / 1e6)
    assert all(value > 0 for value in seconds.values())
    said = words(fig08.restarts({"cold": run, "warm": run}))
    assert {"cold", "warm", *(f"■ {stage}" for stage in fig08.STAGES)} <= set(said)
    assert said.count(f"{found.total / 1e6:.1f} s") == 2
    assert "seconds since the death" in words(fig08.recovery(run))


def test_measured_and_predicted_are_two_whole_bars(run: Path) -> None:
    figure = fig08.parts(run, constants(run), every=3)
    assert {"measured", "predicted", "■ steps that count", "■ done again"} <= set(words(figure))
    widths = [patch.get_width() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert len(widths) == 10 and sum(widths) == pytest.approx(200)


def test_the_curve_has_both_ways_and_the_run(run: Path) -> None:
    figure = fig08.curve(run, constants(run), every=3)
    assert {"— written while it trains", "— training waits for the write", "your run"} <= set(words(figure))
    stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
    assert len(stars) == 1 and stars[0].get_xdata()[0] == pytest.approx(3 * test_n08.PACE)  # type: ignore[index]
    assert [line.get_marker() for line in figure.axes[0].lines].count("s") == 2


def test_the_recorded_jobs_are_lanes_in_the_ledgers_colours() -> None:
    figure = fig08.jobs(read_cases(test_n08.RECORD))
    assert {"job A", "job D", "■ replayed", "■ idle"} <= set(words(figure))
    assert rgb(KIND_COLORS["replayed"]) in colors(figure)


def test_each_cause_has_a_bar_and_the_bars_are_all_of_them() -> None:
    figure = fig08_scale.causes()
    assert sum(patch.get_width() for patch in figure.axes[0].patches) == llama3.UNEXPECTED  # type: ignore[attr-defined]
    assert {"faulty GPU", "148", "others, each below 3", "■ takes a rack"} <= set(words(figure))


def test_the_best_interval_is_told_beside_the_curve() -> None:
    said = words(fig08_scale.intervals(llama3.MTBF_S, 660, {"waits": (60, 0), "goes on": (2, 60)}))
    assert {"waits:\n85 % at 19 min", "goes on:\n92 % at 3 min"} <= set(said)


def test_sizes_and_parts_are_those_of_the_simulation() -> None:
    found = {
        gpus: {name: simulate(it, scale.interval_for(it), 20, 5) for name, it in scale.ladder(gpus).items()}
        for gpus in (8, 1024)
    }
    said = words(fig08_scale.sizes(found))
    assert {"8", "1,024", "+ warm spares: 99 %"} <= set(said) and any(text.startswith("nothing: ") for text in said)
    figure = fig08_scale.where(found, 1024)
    widths = [patch.get_width() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert sum(widths) == pytest.approx(100 * len(scale.MEASURES))
    assert {"■ waiting", "+ hot spares"} <= set(words(figure)) and rgb(VERMILION) in colors(figure)
