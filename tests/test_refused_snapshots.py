"""What never becomes a snapshot, and what a snapshot that cannot be written costs."""

import errno
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Points, Toy, events, files, net

from course_lib.engine import Best, NonFiniteError, SnapshotError, SnapshotStore, UsageError
from course_lib.engine.step import MicroBatch, Step


class Broken(Toy):
    """In one step the loss is multiplied by something."""

    step, factor = 7, math.nan

    def loss(self, step: Step, batch: MicroBatch) -> torch.Tensor:
        return super().loss(step, batch) * (self.factor if step.number == self.step and not step.warmup else 1.0)


def steps_on_disk(run_dir: Path) -> list[int]:
    return sorted(manifest.step for manifest in SnapshotStore(run_dir).listing().manifests)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, factor: float) -> None:
    toy = Broken(tmp_path, snapshot_every=1)
    toy.factor = factor
    with pytest.raises(NonFiniteError, match=rf"step 7 is {factor} \(samples 16 to 23 of epoch 1's order\)"):
        toy.run()
    assert steps_on_disk(tmp_path) == [5, 6, 7]
    assert [event["step"] for event in events(tmp_path, "step")] == list(range(7))
    # The cause gone, the run goes on as if nothing had been.
    assert Toy(tmp_path, snapshot_every=1).run().digests() == Toy(tmp_path / "whole").run().digests()


def test_an_overflow_under_a_scaler_stops_nothing_but_a_broken_weight_does(tmp_path: Path) -> None:
    def make(name: str) -> Broken:
        return Broken(tmp_path / name, scaler=torch.amp.GradScaler("cpu"), epochs=2)

    toy = make("skipped").run()
    assert toy.trainer.progress.position.step == 10
    broken = make("broken")
    with torch.no_grad():
        next(broken.model.parameters())[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="step 0 is nan"):
        broken.run()


class Spoiling(Toy):
    """After step 4 something is no number, though the loss was one."""

    def __init__(self, run_dir: Path, spoil: Callable[[Toy], torch.Tensor], value: float) -> None:
        super().__init__(run_dir)
        self.spoil, self.value = spoil, value

    def body(self, step: Step) -> None:
        super().body(step)
        if step.number == 5 and not step.warmup:
            with torch.no_grad():
                self.spoil(self).view(-1)[0] = self.value


SPOILT: dict[str, Callable[[Toy], torch.Tensor]] = {
    "weight": lambda toy: next(toy.model.parameters()).data,
    "buffer": lambda toy: toy.model.state_dict()["1.running_mean"],
    "momentum": lambda toy: toy.optimizer.state_dict()["state"][0]["momentum_buffer"],
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", SPOILT)
def test_a_state_that_is_no_number_is_not_published(tmp_path: Path, name: str, value: float) -> None:
    # The writer finds it while training goes on; the next loss may be the first to tell.
    with pytest.raises(NonFiniteError, match="not finite after step 5: no snapshot|loss of step [67] is"):
        Spoiling(tmp_path, SPOILT[name], value).run()
    assert steps_on_disk(tmp_path) == [3]
    assert sorted(Toy(tmp_path).run().losses) == list(range(3, 10))


class Full:
    """A disk that is full from the first save to the last of `times`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: float = math.inf, skip: int = 0) -> None:
        self.calls = 0
        whole = SnapshotStore.draft

        def draft(store: SnapshotStore, *args: Any, **options: Any) -> Any:
            self.calls += 1
            if skip < self.calls <= skip + times:
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole(store, *args, **options)

        monkeypatch.setattr(SnapshotStore, "draft", draft)


def test_a_full_disk_costs_a_snapshot_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Full(monkeypatch, times=1, skip=1)
    toy = Toy(tmp_path).run()
    assert toy.lines[-1].startswith("finished after 10 steps")
    assert steps_on_disk(tmp_path) == [3, 9, 10]
    (skipped,) = events(tmp_path, "snapshot_skipped")
    assert skipped["step"] == 6 and "No space left" in skipped["reason"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "no snapshot after step 6, training goes on" in line and "No space left" in line
    assert [event["step"] for event in events(tmp_path, "snapshot_saved")] == [3, 9, 10]
    assert toy.digests() == Toy(tmp_path / "whole").run().digests()


def test_a_full_disk_keeps_the_old_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Full(monkeypatch, skip=1)
    with pytest.raises(SnapshotError, match="its last snapshot could not be published"):
        Toy(tmp_path).run()
    assert steps_on_disk(tmp_path) == [3]
    monkeypatch.undo()
    assert sorted(Toy(tmp_path).run().losses) == list(range(3, 10))


def test_without_its_last_snapshot_a_run_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Full(monkeypatch, skip=3)
    with pytest.raises(SnapshotError, match="its last snapshot could not be published"):
        Toy(tmp_path).run()
    assert not (tmp_path / "report.json").exists() and events(tmp_path, "finish") == []


def test_strict_makes_it_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Full(monkeypatch, skip=1, times=1)
    with pytest.raises(SnapshotError, match="no snapshot after step 6: OSError.*No space left"):
        Toy(tmp_path, strict=True).run()
    assert [event["step"] for event in events(tmp_path, "snapshot_skipped")] == [6]


def test_a_run_directory_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file stands where the directory should be")
    with pytest.raises(UsageError, match="cannot write to the run directory"):
        Toy(tmp_path / "run").run()


class Turning:
    """Holds a number, and after some time something that a snapshot cannot hold."""

    def __init__(self) -> None:
        self.value: Any = 1

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["inner"]


class Turned(Toy):
    def body(self, step: Step) -> None:
        super().body(step)
        if step.number == 4 and not step.warmup:
            self.state.extra["mine"].value = object()  # type: ignore[attr-defined]


def test_what_no_snapshot_can_hold_ends_the_run_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extra\.mine\.inner is a builtins\.object"):
        Turned(tmp_path, extra={"mine": Turning()}).run()
    assert steps_on_disk(tmp_path) == [3]

    first = Turning()
    first.value = object()
    with pytest.raises(TypeError, match=r"extra\.mine\.inner"):
        Toy(tmp_path / "at once", extra={"mine": first}).run()
    assert steps_on_disk(tmp_path / "at once") == []


def test_an_evaluation_that_returns_no_numbers_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="could not convert"):
        Toy(tmp_path, evaluate=lambda: {"grade": "good"}).run()
    assert steps_on_disk(tmp_path) == [3]
    Toy(tmp_path, evaluate=lambda: {"grade": torch.tensor(0.5)}, extra=None).run()


def test_nothing_is_written_without_a_run(tmp_path: Path) -> None:
    Toy(tmp_path, dataset=Points(8), extra={"best": Best()})
    assert files(tmp_path) == {}


class Masked(torch.nn.Linear):
    """A layer with minus infinity in a buffer, as the mask of an attention has it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", torch.full((3,), -math.inf))


def test_a_buffer_that_is_infinite_from_the_start_is_no_accident(tmp_path: Path) -> None:
    toy = Toy(tmp_path, model=net(Masked())).run()
    assert steps_on_disk(tmp_path) == [6, 9, 10] and toy.state.is_finite()
    with torch.no_grad():
        toy.model.get_parameter("1.weight")[0, 0] = math.inf
    assert not toy.state.is_finite()


def test_a_loss_that_is_no_number_waits_for_the_good_snapshot_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SnapshotStore.draft

    def slow(store: SnapshotStore, *args: Any, **facts: Any) -> Any:
        time.sleep(0.3)
        return whole(store, *args, **facts)

    monkeypatch.setattr(SnapshotStore, "draft", slow)
    toy = Broken(tmp_path, snapshot_every=3)
    with pytest.raises(NonFiniteError, match="step 7 is nan"):
        toy.run()
    assert [e["step"] for e in events(tmp_path, "snapshot_saved")] == [3, 6]
