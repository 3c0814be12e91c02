"""What a resume refuses, naming the difference, and what it allows and logs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import Points, Toy, events, files, momentum, net

from course_lib.engine import Best, Plan, SnapshotStore, TrainState, UsageError
from course_lib.engine.identity import Identity
from course_lib.engine.snapshots.store import open_payload

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "global batch": ({"global_batch_size": 16}, "global batch size 8 there, 16 here"),
    "seed": ({"seed": 7}, "seed 0 there, 7 here"),
    "data set's size": ({"dataset": Points(48)}, "samples 40 there, 48 here"),
    "data set": ({"identity": {"data": "b"}}, "data a there, b here"),
    "shape": ({"model": nn.Linear(4, 1)}, r"model.0.bias float32 (8,) there, nothing here"),
    "type": ({"model": net(dtype=torch.float64)}, r"model.0.bias float32 (8,) there, float64 (8,) here"),
    "optimizer": (
        {"optimizer": lambda model: torch.optim.Adam(model.parameters())},
        "optimizer SGD there, Adam here",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_job_is_refused_and_leaves_no_trace(tmp_path: Path, name: str) -> None:
    """Also case E5: a learning rate that was tuned for one global batch would be used with another."""

    def make(**changes: Any) -> Toy:
        given: dict[str, Any] = {"identity": {"data": "a"}, "model": net()}
        return Toy(tmp_path, **(given | changes))

    make().run(until=5)
    before = files(tmp_path)
    changes, words = OTHERS[name]
    other = make(**changes)
    weights = other.digests()
    with pytest.raises(UsageError) as caught:
        other.run()
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(tmp_path / "snapshots") in str(caught.value) and "--run-dir" in str(caught.value)
    assert files(tmp_path) == before
    assert other.digests() == weights
    make().run()


def rewrite(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Publish the newest snapshot again with another content, as a generation of its own."""
    store = SnapshotStore(run_dir)
    newest = max(store.listing().manifests, key=lambda manifest: manifest.step)
    content = open_payload(store.read(newest))
    change(content)
    claim = store.claim(newest.generation + 1, newest.name)
    store.save(claim, content, step=newest.step, epoch=newest.epoch, world_size=1, config={})


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "extra.best", "configured_lrs"])
def test_a_snapshot_without_a_part_is_refused(tmp_path: Path, part: str) -> None:
    """Case A4: go on with a fresh optimizer, and the loss jumps for a while."""

    def make() -> Toy:
        return Toy(tmp_path, extra={"best": Best()}, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))

    make().run(until=5)
    rewrite(tmp_path, lambda content: content["state"].pop(part))
    before = files(tmp_path)
    toy = make()
    weights = toy.digests()
    with pytest.raises(UsageError, match=f"it lacks {part};"):
        toy.run()
    assert files(tmp_path) == before
    assert toy.digests() == weights


def test_a_snapshot_with_a_part_too_many_is_refused(tmp_path: Path) -> None:
    Toy(tmp_path, extra={"best": Best()}).run(until=5)
    with pytest.raises(UsageError, match="it has extra.best;"):
        Toy(tmp_path).run()


def test_a_state_that_is_refused_changes_nothing() -> None:
    """Also when it is the last part that does not fit."""

    def state(*extra: str, groups: int = 1) -> TrainState:
        model = net()
        parameters = list(model.parameters())
        parts = [{"params": parameters}] if groups == 1 else [{"params": [p]} for p in parameters]
        return TrainState(model, torch.optim.SGD(parts, lr=0.1), extra={name: Best() for name in extra})

    there = state("a", "b")
    with torch.no_grad():
        there.module[0].weight.zero_()  # type: ignore[index]
    for here, words in ((state("a"), "has extra.b"), (state("a", "b", groups=4), "parameter groups")):
        before = here.weights_digest()
        with pytest.raises(UsageError, match=words):
            here.load_state_dict(there.state_dict())
        assert here.weights_digest() == before


def test_a_change_of_the_settings_is_logged(tmp_path: Path) -> None:
    Toy(tmp_path, settings={"num_workers": 0, "device": "cpu"}).run(until=5)
    again = Toy(tmp_path, settings={"num_workers": 0, "device": "cuda", "new": 1}, epochs=3, snapshot_every=4).run()
    notes = ["epochs 2 -> 3", "snapshot every 3 -> 4", "device cpu -> cuda"]
    assert events(tmp_path, "snapshot_loaded")[-1]["changes"] == notes
    assert [line for line in again.lines if "changed" in line] == [f"changed at this resume: {note}" for note in notes]


@pytest.mark.parametrize("schedule", [None, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)])
def test_a_change_of_the_learning_rate_is_applied_and_logged(tmp_path: Path, schedule: Any) -> None:
    def make(run_dir: Path, lr: float) -> Toy:
        return Toy(run_dir, schedule=schedule, optimizer=lambda model: momentum(model, lr))

    whole = make(tmp_path / "whole", 0.05).run()
    make(tmp_path / "run", 0.05).run(until=5)
    again = make(tmp_path / "run", 0.025).run(until=8)
    assert again.lrs == pytest.approx({step: whole.lrs[step] / 2 for step in range(3, 8)})
    assert events(tmp_path / "run", "snapshot_loaded")[-1]["changes"] == ["learning rate 0.05 -> 0.025"]

    # It counts from there on, and is not applied a second time.
    last = make(tmp_path / "run", 0.025).run()
    assert last.lrs == pytest.approx({step: whole.lrs[step] / 2 for step in range(6, 10)})
    assert events(tmp_path / "run", "snapshot_loaded")[-1]["changes"] == []


def test_what_a_manifest_cannot_hold_is_refused_at_once() -> None:
    state = TrainState(net(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    plan = Plan(8, 4)
    Identity(state, plan, {"path": Path("a"), "sizes": (1, 2)}, {})
    with pytest.raises(TypeError, match=r"identity\.thing is a builtins\.object"):
        Identity(state, plan, {"thing": object()}, {})
    with pytest.raises(TypeError, match="JSON"):
        Identity(state, plan, {}, {"classes": {"a", "b"}})


@pytest.mark.parametrize(
    "options", [{"epochs": 0}, {"epochs": -1}, {"snapshot_every": 0}, {"global_batch_size": 0}, {"dataset": Points(0)}]
)
def test_numbers_that_make_no_sense_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        Toy(tmp_path, **options)
    assert files(tmp_path) == {}
