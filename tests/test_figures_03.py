"""What notebook 03 is made of: the ring, two ranks in plain arithmetic, its figures, and the scenes on real ranks."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from matplotlib.figure import Figure
from ranks import on_ranks

from course_lib.lab import ddp_evidence as scenes
from course_lib.lab.exercises import n03
from course_lib.lab.fig03 import bugs_figure, curves_figure, hidden, overlap_figure, ring_figure, shares_figure
from course_lib.lab.ring import Ring, ring_all_reduce, run_ring
from course_lib.lab.two_ranks import BUGS, trace


def words(figure: Figure) -> str:
    """All that is written in the figure, once it has been drawn."""
    figure.savefig(BytesIO(), format="png")
    texts = [text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text") and a.get_visible())]  # type: ignore[attr-defined]
    return "\n".join(texts)


# --- the ring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_ring_leaves_every_sum_on_every_rank(ranks: int) -> None:
    chunks = [[10**rank * (c + 1) for c in range(ranks)] for rank in range(ranks)]
    ring = run_ring(ring_all_reduce, chunks)
    assert len(ring.rounds) == 2 * (ranks - 1) and all(len(messages) == ranks for messages in ring.rounds)
    assert ring.held[0] == chunks and ring.held[-1] == [[sum(column) for column in zip(*chunks, strict=True)]] * ranks


def test_a_ring_refuses_what_a_rank_does_not_hold() -> None:
    with pytest.raises(ValueError, match="rank 1 sends 5"):
        Ring([[1.0, 2.0], [3.0, 4.0]]).pass_on([(0, 1.0), (1, 5.0)])
    with pytest.raises(ValueError, match="1 messages for 2 ranks"):
        Ring([[1.0, 2.0], [3.0, 4.0]]).pass_on([(0, 1.0)])


def test_the_picture_of_a_ring_says_whether_it_is_done() -> None:
    chunks = [[10**rank] * 4 for rank in range(4)]
    assert "6 rounds, and every rank has every sum" in words(ring_figure(run_ring(ring_all_reduce, chunks)))
    half: Callable[..., object] = n03.ring.wrong[2]
    ring = run_ring(half, chunks)
    assert "3 rounds, unfinished" in words(ring_figure(ring))


# --- curves -------------------------------------------------------------------------------------------------------


def test_each_bug_leaves_the_true_curve_where_the_notebook_says() -> None:
    traces = {bug: trace(bug) for bug in BUGS}
    first = {bug: next((i for i, d in enumerate(t.from_single) if d > 0), None) for bug, t in traces.items()}
    assert first == {
        "nothing wrong": None,
        "called model.module": 0,
        "tail not weighted": 2,
        "set_epoch forgotten": 3,
        "loss not divided": 0,
    }
    assert [bug for bug, t in traces.items() if any(t.between_ranks)] == ["called model.module"]
    assert set(n03.curves.values()) == set(BUGS)
    assert "grey lines" in words(bugs_figure(traces, 3))


def test_the_other_pictures_name_what_they_show() -> None:
    text = words(shares_figure({"padded": [[0, 2, 4], [1, 3, 0]]}, right=[0]))
    assert text.count("a second time") == 1 and "rank 1" in text
    text = words(curves_figure({"64": [(0, 2.0), (1, 1.0)], "512": [(0, 2.0), (1, 1.5)]}, "epoch", "loss", "two"))
    assert all(word in text for word in ("64", "512", "two", "epoch"))


def passed(began: list[float]) -> dict[str, Any]:
    """A backward pass with gradients at 10 and 20 ms, and all-reduces of 5 ms."""
    buckets = [{"bytes": 8, "gradients": 1, "began": t, "ended": t + 5} for t in began]
    return {"backward": [0.0, 26.0], "gradients": [["1", 10.0], ["0", 20.0]], "buckets": buckets}


def test_the_timeline_counts_what_is_hidden() -> None:
    assert hidden(passed([11, 21])) == 1 and hidden(passed([21])) == 0
    text = words(overlap_figure({"small": [passed([11, 21])] * 2, "one": [passed([21])] * 2}))
    assert "small: 1 of 2 all-reduces began during backward" in text
    assert "one: 0 of 1 all-reduce began during backward" in text and "waits 6 ms" in text


# --- real ranks ---------------------------------------------------------------------------------------------------

QUICK = ("start", "tail", "empty", "accumulate", "unused", "buffers", "bypass", "evaluation", "hang")


def play(world: Any) -> dict[str, Any]:
    return {name: scenes.SCENES[name](world) for name in QUICK}


def test_the_scenes_show_what_the_notebook_says() -> None:
    zero, one = on_ranks(2, play, timeout=110)
    assert zero["start"]["before"] != one["start"]["before"] and zero["start"]["after"] == one["start"]["after"]
    assert zero["tail"] == one["tail"] == {"plain": 5.25, "weighted": 4.0}
    assert (one["empty"]["samples"], one["empty"]["gradient"]) == (0, 5.0)
    seen = [tuple(found.values()) for found in zero["accumulate"].values()]
    assert seen == [(4, 4.5), (1, 4.5), (1, 18.0)]
    assert [rank["unused"]["default"]["gradient"] for rank in (zero, one)] == [1.0, 3.0]
    assert "indices which did not receive grad for rank 1: 2" in one["unused"]["default"]["error"]
    assert zero["unused"]["find_unused_parameters"] == {"steps": 2, "error": "", "gradient": 2.0}
    assert [round(rank["buffers"]["after a step"], 3) for rank in (zero, one)] == [0.1, 1.1]
    assert zero["buffers"]["after a broadcast"] == one["buffers"]["after a broadcast"]
    assert [rank["bypass"]["model.module(x)"][-1] for rank in (zero, one)] == [-3.0, -9.0]
    assert zero["evaluation"] == one["evaluation"] == pytest.approx({"padded": 0.5, "exact": 0.4})
    assert "Timed out" in zero["hang"]["said"] and "skipped" in one["hang"]["said"]
