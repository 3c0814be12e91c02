"""A run that died and went on is the run that never died: weights, optimizer, schedule, randomness, records.

All in one process: a death is a loop that is left before the step at hand is done, and a restart is everything
built anew on the same directory.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Points, Toy, crash_at, events, files, momentum, read_indices

from course_lib.engine import Plan, Position, SnapshotStore
from course_lib.engine.order import share_indices


@pytest.mark.parametrize("step", range(10))
def test_a_death_in_any_step_changes_nothing(tmp_path: Path, step: int) -> None:
    whole = Toy(tmp_path / "whole").run()
    again = crash_at(tmp_path / "again", [step], Toy)
    assert again.digests() == whole.digests()
    assert again.losses == {number: whole.losses[number] for number in again.losses}
    assert again.trainer.progress == whole.trainer.progress
    assert min(again.losses) == step // 3 * 3


def test_many_deaths_change_nothing(tmp_path: Path) -> None:
    whole = Toy(tmp_path / "whole").run()
    again = crash_at(tmp_path / "again", [2, 0, 3, 3, 5, 4, 8, 9], Toy)
    assert again.digests() == whole.digests()
    assert again.trainer.progress == whole.trainer.progress


OPTIMIZERS: dict[str, Any] = {
    "momentum": momentum,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "groups": lambda model: torch.optim.Adam([{"params": [p], "lr": 0.01} for p in model.parameters()]),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_snapshots_after_a_death_are_the_same_bytes(tmp_path: Path, optimizer: str) -> None:
    def make(run_dir: Path) -> Toy:
        def schedule(of: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.MultiStepLR(of, milestones=[2, 4])

        return Toy(run_dir, optimizer=OPTIMIZERS[optimizer], schedule=schedule, snapshot_every=1)

    make(tmp_path / "whole").run()
    crash_at(tmp_path / "again", [2, 4, 7], make)
    saved = [{e["step"]: e["sha256"] for e in events(tmp_path / run, "snapshot_saved")} for run in ("whole", "again")]
    assert set(saved[0]) >= {1, 3, 5, 10}
    assert {step: saved[1].get(step, sha) for step, sha in saved[0].items()} == saved[0]


def test_no_epoch_is_trained_twice(tmp_path: Path) -> None:
    """Case A1: the last saved epoch would be trained again if the snapshot held the epoch that was just finished."""

    def make(run_dir: Path, **options: Any) -> Toy:
        return Toy(run_dir, epochs=5, snapshot_every=5, **options)

    make(tmp_path / "run").run(until=15)  # the snapshot after epoch 2 is the last thing that it did
    record = tmp_path / "record"
    again = make(tmp_path / "run", dataset=Points(record=record)).run()

    seen = [(event["epoch"], *event["samples"]) for event in events(tmp_path / "run", "step")]
    assert seen == [(epoch, low, low + 8) for epoch in range(5) for low in range(0, 40, 8)]
    assert sorted(read_indices(record)) == sorted(2 * list(range(40)))
    assert again.digests() == make(tmp_path / "whole").run().digests()


def test_a_finished_run_is_left_alone_and_can_be_prolonged(tmp_path: Path) -> None:
    """Case A2: 35 steps, which the interval of 3 doesn't divide."""
    run_dir = tmp_path / "run"
    Toy(run_dir, epochs=7).run()
    newest = max(SnapshotStore(run_dir).listing().manifests, key=lambda m: m.step)
    assert (newest.step, newest.epoch) == (35, 7)

    before = files(run_dir)
    again = Toy(run_dir, epochs=7).run()
    assert again.yielded == []
    assert files(run_dir) == before
    assert len(again.lines) == 1 and "nothing to do" in again.lines[0]

    longer = Toy(run_dir, epochs=9).run()
    assert sorted(longer.losses) == list(range(35, 45))
    assert "changed at this resume: epochs 7 -> 9" in longer.lines
    assert longer.digests() == Toy(tmp_path / "whole", epochs=9).run().digests()


def test_the_orders_of_the_epochs_differ_and_come_back(tmp_path: Path) -> None:
    """Case A7: an order that does not know the epoch, or starts again with the first epoch's at a resume."""
    record, again = tmp_path / "record", tmp_path / "again"
    Toy(tmp_path / "whole", epochs=4, dataset=Points(record=record)).run()
    whole = read_indices(record)
    epochs = [whole[i : i + 40] for i in range(0, 160, 40)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)

    Toy(tmp_path / "run", epochs=4, snapshot_every=5).run(until=10)
    Toy(tmp_path / "run", epochs=4, snapshot_every=5, dataset=Points(record=again)).run()
    assert read_indices(again) == whole[80:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resume_reads_nothing_that_it_will_not_train_on(tmp_path: Path, num_workers: int) -> None:
    """Not even the samples before the position, which a sampler that skips batches would load and drop."""
    Toy(tmp_path / "run").run(until=8)  # its last snapshot is after 6 steps
    record = tmp_path / "record"
    again = Toy(tmp_path / "run", num_workers=num_workers, dataset=Points(record=record)).run()

    rest = share_indices(Plan(40, 8), Position(epoch=1, next_sample=8, step=6), 2, 0, 1)
    expected = [index for batch in rest for _, index in batch]
    seen = read_indices(record)
    assert (seen if num_workers == 0 else sorted(seen)) == (expected if num_workers == 0 else sorted(expected))
    assert sorted(again.losses) == [6, 7, 8, 9]


def test_a_resume_says_where_the_tensors_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B5: without map_location all ranks put them on the device that saved them."""
    Toy(tmp_path).run(until=5)
    calls: list[dict[str, Any]] = []
    load = torch.load

    def recording(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", recording)
    Toy(tmp_path).run()
    assert calls == [{"map_location": "cpu", "weights_only": True}]
