"""The figures of notebook 02, and the numbers in them, from made-up records."""

import pytest

from course_lib.lab.busy import Work, busiest, cores_used
from course_lib.lab.fig02 import memory_figure, share_figure, step_figure, suspects_figure, turns_figure
from course_lib.lab.phases import PHASES, Span, fastest, share
from course_lib.lab.plots import NotebookFigure

MS = 1e-3


def words(figure: NotebookFigure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def step(replicate_ms: float) -> list[Span]:
    """A step whose other phases take 10 ms each."""
    spans, now = [], 5.0
    for name in PHASES:
        length = (replicate_ms if name == "replicate" else 10) * MS
        spans.append(Span("process", name, now, now + length))
        now += length
    return [*spans, Span("lane 0", "forward", 5.02, 5.03)]


def works(together: bool) -> list[Work]:
    """Two workers with 100 chunks of 1 ms each, side by side or in turns; a chunk in between was interrupted."""
    found = []
    for lane in (0, 1):
        starts = [n * MS if together else (2 * n + lane) * MS for n in range(100)]
        found.append(Work(lane, tuple((s, s + MS, MS) for s in starts) + ((0.3, 0.4, MS),)))
    return found


def test_cores_used() -> None:
    assert cores_used(works(together=True), 0.05) == pytest.approx(2)
    assert cores_used(works(together=False), 0.05) == pytest.approx(1)
    assert cores_used(works(together=True)) == pytest.approx(2 * 101 * MS / 0.4)


def test_the_busiest_window_avoids_what_was_interrupted() -> None:
    begin, end = busiest(works(together=True), 0.05)
    assert begin >= 0 and end == pytest.approx(begin + 0.05) and end <= 0.1 + 1e-9


def test_the_share_of_a_phase_is_that_of_undisturbed_phases() -> None:
    assert share([step(60), step(20)], "replicate") == pytest.approx(20 / 80)
    slow, quick = step(60), step(20)
    assert fastest([slow, quick, slow]) is quick


def test_a_step_names_every_phase() -> None:
    said = " ".join(words(step_figure(step(200))))
    assert all(name in said for name in (*PHASES, "forward"))


def test_turns_are_drawn_in_a_row_for_each_worker() -> None:
    figure = turns_figure(works(together=False), works(together=True), 0.05)
    threads, processes = (len(ax.patches) for ax in figure.axes)
    assert 50 <= threads <= 54 and 100 <= processes <= 104


def test_shares_and_memory_say_their_numbers() -> None:
    assert "25%" in words(share_figure({2: 0.25, 4: 0.5}))
    said = words(memory_figure([{"weights": 1.0, "scores": 6.0}, {"weights": 1.0}], "t"))
    assert {"7.0 GB", "1.0 GB", "weights", "scores  (GPU 0 alone)"} <= set(said)


def test_a_distance_of_nothing_is_said_so() -> None:
    figure = suspects_figure({"1": [1e-3, 1e-16, 0.0]})
    assert words(figure) == ["1e-03", "1e-16", "exactly 0"]
    assert figure._repr_png_().startswith(b"\x89PNG")
