"""The figures of notebook 05 say what they were given."""

import math
from io import BytesIO
from pathlib import Path

import pytest
import test_snapshot_claims
import torch
from matplotlib.figure import Figure

from course_lib.engine import SnapshotStore
from course_lib.lab import fig05, fig05_time
from course_lib.lab.exercises import n05
from course_lib.lab.plots import GREEN, VERMILION
from course_lib.lab.stalls import Timeline
from course_lib.lab.torn import Death

finished_run, one_thread = test_snapshot_claims.run, test_snapshot_claims.one_thread


def words(figure: Figure) -> list[str]:
    """All that is written in the figure, once it has been drawn."""
    figure.savefig(BytesIO(), format="png")
    texts = figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_visible())
    return [text.get_text() for text in texts if text.get_text()]  # type: ignore[attr-defined]


def test_torn_saves() -> None:
    left = {"snapshot.pt": 40_000_000}
    deaths = [
        Death("in place", 40_000_000, 9, None, "RuntimeError: torn", left),
        Death("beside", 40_000_000, 9, 1, "", {"snapshot.pt": 80_002_026, "snapshot.new": 40_000_000}),
    ]
    said = words(fig05.torn(deaths))
    assert {"killed at 40 MB", "cannot be opened", "the old snapshot, whole"} <= set(said)


def test_bits() -> None:
    said = words(fig05.bits(0.5))
    assert {"sign", "exponent", "fraction", "-0.5", "1.7e+38", "2.71e-20", "0.5"} <= set(said)
    digits = [text for text in said if text in ("0", "1") and len(text) == 1]
    assert digits.count("1") >= 6  # 126 has six ones; the axes may have some more


def test_curves_end_where_they_are_no_numbers() -> None:
    whole = [0.5, 0.4, 0.3]
    figure = fig05.curves(whole, {"the sign": [0.6, 0.5, 0.3], "exponent": [0.5, 4e33, math.nan]})
    said = words(figure)
    assert {"the sign", "exponent", "then 4e+33,\nthen nan"} <= set(said)
    assert figure.axes[0].lines[0].get_ydata().tolist() == whole  # type: ignore[union-attr]


def test_a_publish_line_by_line() -> None:
    figure = fig05.crash_map(n05._no_folder_sync)
    said = words(figure)
    assert said.count("whole") >= 1 and "(it has returned)" in said and "os.link(new, path)" not in said
    boxes = [patch for patch in figure.axes[0].patches if patch.get_facecolor()[:3] == _rgb(VERMILION)]
    assert len(boxes) == 1  # it has returned, and the name may be gone
    assert not [p for p in fig05.crash_map(n05._publish).axes[0].patches if p.get_facecolor()[:3] == _rgb(VERMILION)]


def test_a_publish_that_raises_is_drawn_as_one() -> None:
    def broken(path: Path, content: bytes) -> None:
        raise ValueError("no such luck")

    assert "(it raised ValueError: no such luck)" in words(fig05.crash_map(broken))


def _rgb(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_fall_back(finished_run: Path) -> None:
    figure = fig05.fall_back(finished_run)
    said = words(figure)
    assert {"after 2 steps", "after 6 steps", "none", "newest 3", "stops and says so"} <= set(said)
    assert "goes on after 4 steps, 2 done again" in said
    assert said.count("damaged") == 6 + 1 and said.count("loaded") == 3  # and the name of the axis
    assert sum(patch.get_facecolor()[:3] == _rgb(GREEN) for patch in figure.axes[0].patches) == 3


def test_lost_pieces_have_no_names() -> None:
    said = words(fig05_time.lost_pieces())
    assert {f"run {letter}" for letter in "ABCDE"} <= set(said)
    assert not any(piece in " ".join(said) for piece in ("best value", "plateau", "order", "nothing missing"))


def test_moments() -> None:
    said = words(fig05_time.moments({"layer 0": [3.0, 3.0], "layer 1": [5.0, 7.0]}, began=3))
    assert {"layer 0", "step 3", "steps 5 to 7", "the save began at this step"} <= set(said)


def test_stalls() -> None:
    steps = ((-0.1, 0.0), (0.02, 0.1), (0.1, 0.2))
    said = words(fig05_time.stalls([Timeline("a way", steps, 0.02, 0.15), Timeline("another", steps, 0.0, 0.3)]))
    assert {"a way", "another", "held up for 20 ms, written after 150 ms"} <= set(said)


def test_generations(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)

    def save(claim, step):  # type: ignore[no-untyped-def]
        return store.save(claim, {"weight": torch.ones(2)}, step=step, epoch=0, world_size=1, config={})

    one = store.claim(1, None)
    parent = save(one, 20)
    save(store.claim(2, parent.name), 25)
    save(one, 30)
    said = words(fig05_time.generations(store))
    assert {"generation 1", "generation 2", "loaded", "in nobody's line"} <= set(said)


@pytest.mark.parametrize("publish", [n05._in_place, n05._replaces])
def test_pictures_are_png(publish: object) -> None:
    assert fig05.crash_map(publish)._repr_png_().startswith(b"\x89PNG")  # type: ignore[arg-type]
