"""What a run's events add up to, on events made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.engine.report import (
    epoch_line,
    recovery_seconds,
    steps_replayed,
    summarize,
    surviving_steps,
    write_report,
)

Event = dict[str, Any]


def event(name: str, t: float, generation: int | None = 1, rank: int = 0, world_size: int = 2, **more: Any) -> Event:
    own = {"t": t, "event": name, "rank": rank, "world_size": world_size, "generation": generation}
    return own | more


def step(number: int, t: float, generation: int | None = 1, rank: int = 0, **more: Any) -> Event:
    return event("step", t, generation, rank, step=number, seconds=1.0, **more)


def life(generation: int, steps: range, began: float, world_size: int = 2) -> list[Event]:
    """A generation whose ranks start at `began` and take a second for each step, after 2 s of getting ready."""
    ranks = range(world_size)
    told = [event("process_start", began, None, rank, world_size) for rank in ranks]
    told += [event("snapshot_loaded", began + 2, generation, rank, world_size, step=steps.start) for rank in ranks]
    told += [step(n, began + 3 + i, generation, rank) for i, n in enumerate(steps) for rank in ranks]
    return told


# Six steps, a snapshot after four, a kill in step 6; the second life does steps 4 and 5 again on three ranks.
KILLED = [
    *life(1, range(6), began=100.0),
    event("fault", 108.5, rank=1, kind="kill", at="forward", step=6),
    *life(2, range(4, 10), began=110.0, world_size=3),
]


def test_a_killed_run() -> None:
    assert summarize(KILLED) == {
        "steps": 10,
        "generations": 2,
        "world_sizes": [2, 3],
        "steps_replayed": 2,
        "recovery_seconds": [4.5],
        "goodput": round(10 / 18, 4),
    }


def test_an_uninterrupted_run() -> None:
    report = summarize(life(1, range(4), began=0.0))
    assert (report["steps"], report["steps_replayed"], report["recovery_seconds"]) == (4, 0, [])
    assert report["goodput"] == round(4 / 6, 4)


def test_no_events_at_all() -> None:
    report = summarize([])
    assert report == {
        "steps": 0,
        "generations": 0,
        "world_sizes": [],
        "steps_replayed": 0,
        "recovery_seconds": [],
        "goodput": 0.0,
    }


def test_the_newest_generation_has_the_last_word_on_a_step_even_when_an_older_one_speaks_later() -> None:
    late = step(5, 200.0, generation=1, loss=9.0)
    kept = surviving_steps([*KILLED, late])
    assert list(kept) == list(range(10))
    assert [e["generation"] for e in kept.values()] == [1] * 4 + [2] * 6
    assert all(e["rank"] == 0 for e in kept.values())


@given(st.permutations(KILLED))
def test_the_surviving_steps_do_not_depend_on_the_order_of_the_events(mixed: list[Event]) -> None:
    assert surviving_steps(mixed) == surviving_steps(KILLED)
    assert steps_replayed(mixed) == 2


def test_each_repetition_counts_once_however_many_ranks_log_it() -> None:
    lives = [*life(1, range(3), 0.0), *life(2, range(1, 3), 10.0), *life(3, range(1, 2), 20.0, world_size=4)]
    assert steps_replayed(lives) == 3


def test_a_death_without_a_fault_is_dated_by_the_last_step_before_it() -> None:
    lives = [*life(1, range(2), began=0.0), *life(2, range(1, 4), began=20.0), *life(3, range(4, 5), began=40.0)]
    assert recovery_seconds(lives) == [23 - 4, 43 - 25]


def test_several_failed_starts_are_one_recovery_from_the_first_fault() -> None:
    failed = [event("process_start", 10.0, None), event("fault", 12.0, 2, kind="kill", at="load")]
    lives = [*life(1, range(2), 0.0), event("fault", 5.0, kind="kill"), *failed, *life(3, range(1, 3), 20.0)]
    assert recovery_seconds(lives) == [18.0]


def test_a_death_before_the_first_step_is_known_from_its_fault() -> None:
    first = [event("process_start", 0.0, None), event("fault", 2.0, None, kind="kill", at="start")]
    assert recovery_seconds([*first, *life(1, range(3), 10.0)]) == [11.0]


def test_a_slow_rank_is_no_death() -> None:
    slow = [event("fault", 2.5, kind="slow", at="load")]
    assert recovery_seconds(sorted([*life(1, range(3), 0.0), *slow], key=lambda e: float(e["t"]))) == []


def test_a_clean_stop_is_no_death() -> None:
    lives = [*life(1, range(2), 0.0), event("stop_requested", 4.5, step=2), *life(2, range(2, 4), 1000.0)]
    assert recovery_seconds(lives) == []
    assert steps_replayed(lives) == 0


def test_a_survivor_that_logs_its_last_step_after_the_restart_starts_nothing() -> None:
    lives = life(1, range(2), 0.0) + life(2, range(1, 3), 10.0)
    late = sorted([*lives, step(2, 13.5, generation=1, rank=1)], key=lambda e: float(e["t"]))
    assert recovery_seconds(late) == recovery_seconds(lives) == [9.0]


def test_steps_of_a_script_without_generations_in_the_same_directory_do_no_harm() -> None:
    earlier = [step(n, float(n), generation=None) for n in range(12)]
    report = summarize([*earlier, *KILLED])
    assert report["recovery_seconds"] == [4.5]
    assert [e["generation"] for e in surviving_steps([*earlier, *KILLED]).values()] == [1] * 4 + [2] * 6 + [None] * 2


def test_the_report_is_written_whole_and_counts_the_lines_that_are_not(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    lines = [json.dumps(e) for e in KILLED]
    (tmp_path / "events" / "host-1.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:-9])
    (tmp_path / "report.json").write_text("an older report")
    report = write_report(tmp_path, {"epochs": 2, "weights_sha256": "ab"})
    assert json.loads((tmp_path / "report.json").read_text()) == report
    # The torn line was a rank's record of a step that the others have told of.
    assert report == summarize(KILLED) | {"bad_lines": 1, "epochs": 2, "weights_sha256": "ab"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events", "report.json"]


def test_a_report_that_cannot_be_written_costs_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = write_report(tmp_path / "gone", {"epochs": 1})
    assert report["epochs"] == 1
    said = capfd.readouterr().err
    assert said.startswith("no report: ") and said.count("\n") == 1


def test_the_line_of_an_epoch_fits_into_a_notebook() -> None:
    metrics = {"train_accuracy": 0.38134, "train_loss": 1.9801, "test_accuracy": 0.4714, "test_loss": 1.4965}
    line = epoch_line({"epoch": 0, "steps": 24, "lr": 0.04895, **metrics}, 3, 64)
    assert line == (
        "epoch 1/3 | global batch 64 | train accuracy 0.3813 loss 1.9801 | test accuracy 0.4714 loss 1.4965"
    )
    assert len(line) <= 100
    assert epoch_line({"epoch": 9, "steps": 5, "lr": 1.0, "bleu": 0.25}, 10, 8) == (
        "epoch 10/10 | global batch 8 | bleu 0.2500"
    )
