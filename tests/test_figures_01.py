"""Notebook 01's figures show what was measured, and its exercises' truths are the engine's."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import REPO
from kernels import kernel
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.utils.data import DataLoader

from course_lib.engine import Plan, Position
from course_lib.lab import fig01
from course_lib.lab.builder.source import build
from course_lib.lab.exercises import n01
from course_lib.lab.slow_disk import SlowDisk
from course_lib.workloads.data import DataSpec, load


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for ax in figure.axes for text in ax.texts)


def test_the_step_to_write_is_the_engines() -> None:
    plan, at = Plan(1500, 64), Position()
    for step in range(3 * plan.steps_per_epoch):
        assert n01.where.solution(step, 1500, 64) == (at.epoch, *plan.batch(at))
        at = plan.after_step(at)
        at = plan.next_epoch(at) if plan.epoch_done(at) else at


def test_a_generator_that_began_again_loses_as_many_samples_as_it_repeats() -> None:
    seen = n01.seen_after_restart()
    assert seen.sum() == 1500 and set(seen) == {0, 1, 2}
    assert (seen == 0).sum() == (seen == 2).sum() == n01.never_seen.solution
    shown = words(fig01.times_seen({"one": seen, "other": np.ones(1500, dtype=int)}))
    assert f"never: {n01.never_seen.solution}" in shown and "once: 1500" in shown


def test_the_five_curves_have_the_signs_that_tell_them_apart() -> None:
    curves = n01.five_curves()
    by_cause = {n01.bugs.solution[name]: np.array(losses) for name, losses in curves.items()}
    stuck, same = by_cause["zero_grad between backward and step"], by_cause["the same batch in each step"]
    assert stuck == pytest.approx(np.log(10), rel=1e-6)
    assert all(later < earlier for earlier, later in pairwise(same))
    assert by_cause["nothing wrong"][-10:].mean() < 0.6
    assert by_cause["labels of other samples"].min() > 2
    swinging = by_cause["zero_grad missing"]
    assert swinging[-10:].max() > 1 > swinging[:24].min()
    assert len(fig01.unlabelled(curves).axes) == 5 and not words(fig01.unlabelled(curves))


def test_a_timeline_has_a_block_for_each_interval_in_milliseconds() -> None:
    rows = {"a": [("data", 5.0, 5.002), ("forward", 5.002, 5.012)], "b": [("backward", 0.0, 0.03)]}
    blocks = [patch for patch in fig01.timeline(rows).axes[0].patches if isinstance(patch, Rectangle)]
    shown = [(block.get_x(), block.get_width()) for block in blocks]
    assert np.array(shown) == pytest.approx(np.array([(0, 2), (2, 10), (0, 30)]))


def test_medians_and_a_row_of_them() -> None:
    measured = [
        ("data", 0.0, 1.0),
        ("forward", 1.0, 3.0),
        ("data", 3.0, 6.0),
        ("forward", 6.0, 7.0),
        ("data", 7.0, 9.0),
    ]
    assert fig01.medians(measured) == {"data": 2.0, "forward": 1.5}
    assert fig01.in_a_row({"data": 2.0, "forward": 1.5}) == [("data", 0.0, 2.0), ("forward", 2.0, 3.5)]


def gradients() -> Figure:
    parts = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([-1.0, -3.0, 0.0])]
    return fig01.parts((40 * parts[0] + 24 * parts[1]) / 64, [*parts, *parts], parts, counts=(40, 24))


def weight() -> Figure:
    return fig01.one_weight([(0, "zero_grad", 1.0, None), (0, "backward", 1.0, 0.5), (0, "optimizer", 0.9, 0.5)])


def curve() -> Figure:
    steps = [{"event": "step", "loss": 2.0 - step / 10} for step in range(4)]
    return fig01.learning([*steps, {"event": "epoch", "epoch": 0, "steps": 4, "test_accuracy": 0.9731}])


@pytest.mark.parametrize(
    ("draw", "said"), [(gradients, "the parts'\nplain mean"), (weight, "none"), (curve, "epoch 0\ntest: 97.3%")]
)
def test_a_figure_names_what_it_shows(draw: Callable[[], Figure], said: str) -> None:
    figure = draw()
    assert said in words(figure)
    assert isinstance(figure, fig01.NotebookFigure) and figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_loader_that_is_not_forked_finds_the_slow_disk(method: str) -> None:
    disk = SlowDisk(load(DataSpec("digits", None)).train, seconds=0.0005)
    loader = DataLoader(disk, batch_sampler=[[0, 1], [2]], num_workers=1, multiprocessing_context=method, timeout=60)
    assert [tuple(images.shape) for images, _ in loader] == [(2, 1, 32, 32), (1, 1, 32, 32)]


@pytest.mark.slow
def test_the_cells_with_loaders_run_where_processes_are_not_forked(tmp_path: Path) -> None:
    cells = {cell["id"]: cell.source for cell in build(REPO / "notebooks/src/01_single_gpu.py").student.cells}
    with kernel(REPO, {"COURSE_RUNS": str(tmp_path / "runs")}) as it:
        it.text("import multiprocessing\nmultiprocessing.set_start_method('spawn')")
        for name in ("ready", "data", "watch", "two-lives", "my-loop", "measure", "timed", "slow-disk"):
            it.text(cells[f"code-{name}"])
