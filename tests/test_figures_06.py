"""The figures of notebook 06 say what they were given."""

from io import BytesIO
from pathlib import Path
from typing import Any

import test_elastic_lab
from matplotlib.figure import Figure

from course_lib.engine.order import share
from course_lib.lab import fig06, fig06_ideas
from course_lib.lab.exercises import n06
from course_lib.lab.plots import VERMILION

run, scenes = test_elastic_lab.run, test_elastic_lab.scenes


def words(figure: Figure) -> list[str]:
    """All that is written in the figure, once it has been drawn."""
    figure.savefig(BytesIO(), format="png")
    texts = figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_visible())
    return [text.get_text() for text in texts if text.get_text()]  # type: ignore[attr-defined]


def colors(figure: Figure) -> list[Any]:
    return [patch.get_facecolor()[:3] for ax in figure.axes for patch in ax.patches]


def rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_the_timeline_tells_the_story(run: Path) -> None:
    figure = fig06.timeline(run, run)
    said = words(figure)
    assert {"node a", "node b", "node d", "killed", "asked to stop"} <= set(said)
    assert any("2 → 1 → 2 ranks" in text for text in said)
    bars = [patch.get_height() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert bars == [2, 1, 2]
    assert [len(line.get_xdata()) for line in figure.axes[2].lines] == [7, 2, 3, 2]  # type: ignore[arg-type]


def test_recorded_scenes(scenes: dict[str, Any]) -> None:
    spare = words(fig06.recorded_story(scenes["spare"]))
    assert {"node a", "node b", "node c", "killed", "waits"} <= set(spare)
    assert "its agent ends, too" in words(fig06.recorded_story(scenes["store"]))
    said = words(fig06.hang(scenes["jobs"]["hang"]))
    assert said.count("timeout") == said.count("waits in the all-reduce") == 2
    assert said.count("says nothing, and is said to be running") == 1


def test_shares_are_those_of_the_learners_function() -> None:
    said = words(fig06_ideas.shares(share))
    assert {"rank 0: 64", "rank 1: 32", "rank 0: 22", "rank 2: 21", "rank 4: 12"} <= set(said)
    assert "rank 0: 22" not in words(fig06_ideas.shares(n06._floor))

    def unfilled(start: int, stop: int, rank: int, ranks: int) -> Any: ...

    for bad in (unfilled, lambda start, stop, rank, ranks: None, lambda start, stop, rank, ranks: ranks / 0):
        assert not any("rank 0:" in text for text in words(fig06_ideas.shares(bad)))  # type: ignore[arg-type]


def test_the_tree_is_the_same_and_what_travels_is_red() -> None:
    figure = fig06_ideas.tree(shards=4, sizes=(1, 2, 3, 4))
    travels = [sum(line.get_color() == VERMILION for line in ax.lines) for ax in figure.axes]
    assert travels == [0, 1, 2, 3]
    assert {len(ax.patches) for ax in figure.axes} == {7}


def test_halves_and_losses(scenes: dict[str, Any]) -> None:
    assert [fig06_ideas.refused(*nodes) for nodes in ((1, 1), (1, 2), (2, 3), (2, 4), (3, 4))] == [
        False,
        True,
        False,
        True,
        False,
    ]
    said = words(fig06_ideas.halves(4))
    assert said.count("2|2") == 2 and said.count("1|1") == 1 and said.count("2|1") == 1
    assert {"the defaults", "both"} <= set(words(fig06_ideas.losses(scenes)))


def test_the_slow_rank_is_red(run: Path) -> None:
    found = colors(fig06_ideas.slow_rank(run, 2))
    assert found.count(rgb(VERMILION)) == 1 and found[-1] == rgb(VERMILION)
