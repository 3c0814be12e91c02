"""The tutorial's toy: its figures from records that were made up, and from short runs of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from helpers import BENCH

from course_lib.engine import UsageError
from course_lib.lab.toy import TITLES, measure, table

Launch = Callable[..., helpers.Completed]


def leave(run_dir: Path, done: list[range], saved: list[list[int]], weights: str, snapshot: str) -> Path:
    """A run of four epochs of two steps: `done` and `saved` by each generation; all but the last are killed."""
    events: list[dict[str, Any]] = []
    for number, (steps, snapshots) in enumerate(zip(done, saved, strict=True), start=1):
        common: dict[str, Any] = {"rank": 0, "world_size": 1, "generation": number}
        events += [
            common
            | {"event": "drawn", "data": "one" if snapshot == "ours" else f"data {number}", "weights": "at first"}
        ]
        events += [common | {"event": "snapshot_loaded", "step": steps[0]}]
        events += [common | {"event": "step", "step": n, "epoch": n // 2, "loss": 1 / (n + 1)} for n in steps]
        events += [common | {"event": "snapshot_saved", "step": n} for n in snapshots]
        if number < len(done):
            events += [common | {"event": "fault", "kind": "kill", "at": "forward", "step": steps[-1] + 1}]
    (run_dir / "events").mkdir(parents=True)
    lines = [json.dumps({"t": float(t)} | event) + "\n" for t, event in enumerate(events)]
    (run_dir / "events" / "elsewhere-7.jsonl").write_text("".join(lines))
    path, content = run_dir / "snapshot.pt", dict[str, Any](MODEL_STATE={}, EPOCHS_RUN=2)
    if snapshot == "ours":
        path, content = run_dir / "snapshots" / "gen-0001-step-00000008.pt", {"state": {"model": {}, "optimizer": {}}}
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path)
    report = {"steps": 8, "epochs": 4, "generations": len(done), "weights_sha256": weights, "optimizer_sha256": "o"}
    (run_dir / "report.json").write_text(json.dumps(report))
    return run_dir


def test_what_was_saved_and_done_again_all_the_same_is_counted(tmp_path: Path) -> None:
    # Epochs 0 and 2 save; 2 is finished and saved, and trained again. The kill is in step 7.
    calm = leave(tmp_path / "calm", [range(8)], [[2, 6]], "as it was", "theirs")
    killed = leave(tmp_path / "killed", [range(7), range(4, 8)], [[2, 6], [6]], "moved", "theirs")
    found = measure(calm, killed)
    assert (found["killed_in_step"], found["killed_in_epoch"], found["restarted_at_epoch"]) == (7, 3, 2)
    assert (found["steps_done_again"], found["steps_done_again_though_saved"]) == (3, 2)
    assert found["finished_epochs_done_again"] == [2]
    assert found["steps_at_the_end_in_no_file"] == 2
    assert found["snapshot_holds"] == ["EPOCHS_RUN", "MODEL_STATE"]
    assert (found["same_weights"], found["same_optimizer"], found["learnt"]) == (False, True, True)
    assert (
        measure(calm, leave(tmp_path / "b", [range(7), range(4, 8)], [[6], [6]], "at first", "theirs"))["learnt"]
        is False
    )


def test_a_run_that_lost_nothing_and_the_table(tmp_path: Path) -> None:
    calm = leave(tmp_path / "calm", [range(8)], [[4, 8]], "w", "ours")
    ours = measure(calm, leave(tmp_path / "killed", [range(7), range(4, 8)], [[4], [8]], "w", "ours"))
    assert (ours["steps_done_again"], ours["steps_done_again_though_saved"]) == (3, 0)
    assert (ours["steps_at_the_end_in_no_file"], ours["same_weights"], ours["data_sets"]) == (0, True, 1)
    theirs = measure(calm, leave(tmp_path / "theirs", [range(7), range(0, 8)], [[2], [2]], "at first", "theirs"))
    found = {"epochs": 4, "save_every": 2, "ranks": 1, "ways": {"engine": ours, "published": theirs}}
    head, _, *lines = table(found).splitlines()
    assert "step 7 of 8, in epoch 3" in head
    assert lines[0] == f"|  | {TITLES['published']} | {TITLES['engine']} |"
    assert "| steps done again | 7 | 3 |" in lines
    assert "| of these, in the saved weights already | 2 | 0 |" in lines
    assert "| finished epochs trained again | 3 (0 to 2) | 2 |" in lines
    assert "| the optimizer is in the snapshot | no | yes |" in lines
    assert "| training changed the weights | no: the largest loss is 1 | yes |" in lines
    assert "| same final weights as undisturbed | no | yes |" in lines
    assert "| data sets drawn | 2 by 2 processes | 1 by 2 processes |" in lines


def test_a_run_that_was_not_killed_and_restarted_just_once_has_no_figures(tmp_path: Path) -> None:
    calm = leave(tmp_path / "calm", [range(8)], [[8]], "w", "ours")
    with pytest.raises(UsageError, match="one kill and one restart were wanted, and there are 0"):
        measure(calm, calm)
    twice = leave(tmp_path / "twice", [range(3), range(5), range(8)], [[], [4], [8]], "w", "ours")
    with pytest.raises(UsageError, match="there are 2, 1 and 3 generations"):
        measure(calm, twice)
    (calm / "report.json").unlink()
    with pytest.raises(UsageError, match="is not finished"):
        measure(calm, calm)


def test_numbers_that_make_no_sense_are_refused(launch: Launch) -> None:
    done = launch([sys.executable, BENCH / "classic_toy.py", "--kill-epoch", "50"], 60, helpers.torchrun_env())
    assert (done.returncode, done.output.count("\n")) == (2, 1) and "--kill-epoch below --epochs" in done.output


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [(1, ["momentum"]), pytest.param(2, ["published", "counted", "engine"], marks=pytest.mark.slow)],
)
def test_a_short_toy_does_what_the_long_one_does(launch: Launch, tmp_path: Path, ranks: int, ways: list[str]) -> None:
    # Saved after epochs 0 and 2, as they are counted there; killed in the middle of epoch 3.
    path, size = tmp_path / "toy.json", 64 // ranks
    numbers = ["--epochs", "4", "--save-every", "2", "--kill-epoch", "3", "--ranks", str(ranks)]
    command = [sys.executable, BENCH / "classic_toy.py", *numbers, "--json", path, "--ways", *ways]
    done = launch(command, env=helpers.torchrun_env({"TMPDIR": str(tmp_path)}))
    assert done.returncode == 0, done.tail()
    for name, way in json.loads(path.read_text())["ways"].items():
        again = (size // 2) if name == "counted" else size + size // 2
        assert (way["killed_in_step"], way["steps_done_again"]) == (3 * size + size // 2, again)
        assert way["steps_done_again_though_saved"] == (size if name in ("published", "momentum") else 0)
        assert way["steps_at_the_end_in_no_file"] == (0 if name == "engine" else size)
        assert way["finished_epochs_done_again"] == ([] if name == "counted" else [2])
        assert ("optimizer" in way["snapshot_holds"], way["same_weights"]) == (name == "engine", name == "engine")
        assert way["learnt"] == (name != "published") and (way["largest_loss"] > 0) == (name != "published")
        assert way["data_sets"] == (2 * ranks if name == "published" else 1)
