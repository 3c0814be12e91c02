"""The series' experiment: its preset, its schedule, and the table and figure that are made from what the runs left."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import REPO, launch

from course_lib.engine import UsageError
from course_lib.lab import toy
from course_lib.lab.series import NAMES, results, table, write_results
from course_lib.workloads.options import parse_options
from course_lib.workloads.vision import step_schedule

PYTHON = str(REPO / "scripts" / "reproduce.py")


def test_the_preset_is_the_series_and_what_is_given_beside_it_counts() -> None:
    groups = ("group", "snapshots")
    asked = parse_options("", *groups, argv=["--preset", "series", "--data-root", "x", "--lr", "0.05"])
    assert (asked.data, asked.model, asked.epochs, asked.global_batch_size) == ("image_folder", "resnet34", 15, 256)
    assert (asked.schedule, asked.weight_decay, asked.lr) == ("steps", 0.0, 0.05)
    assert parse_options("", *groups, argv=[]).schedule == "cosine"


def test_the_rate_falls_to_a_tenth_after_each_five_epochs() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = step_schedule(optimizer, steps_per_epoch=3)
    rates = []
    for _ in range(15 * 3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0.1] * 15 + [0.01] * 15 + [0.001] * 15
    assert rates == pytest.approx(expected)


def leave_run(run_dir: Path, losses: list[float], sizes: list[int], saved: dict[int, str]) -> None:
    """What a finished run of two epochs of two steps leaves."""
    common: dict[str, Any] = {"t": 1.0, "rank": 0, "world_size": sizes[-1], "generation": len(sizes)}
    events = [common | {"event": "step", "step": n, "epoch": n // 2, "loss": loss} for n, loss in enumerate(losses)]
    for epoch in range(2):
        metrics = {"train_loss": losses[2 * epoch], "train_accuracy": 0.5 + epoch / 4, "test_accuracy": 0.4}
        events.append(common | {"event": "epoch", "epoch": epoch, **metrics})
    events += [common | {"event": "snapshot_saved", "step": step, "sha256": sha} for step, sha in saved.items()]
    (run_dir / "events").mkdir(parents=True)
    (run_dir / "snapshots").mkdir()
    (run_dir / "events" / "host-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    manifest = {"machine": {"cpu": "a processor", "gpu": "none", "host": "mine"}, "versions": {}, "config": {"seed": 0}}
    (run_dir / "snapshots" / "gen-0001-step-00000004.json").write_text(json.dumps(manifest))
    digests = {"weights_sha256": saved[4], "optimizer_sha256": "ee"}
    report = digests | {"world_sizes": sizes, "steps_replayed": 0}
    (run_dir / "report.json").write_text(json.dumps(report))


def test_the_table_says_what_is_equal_and_what_is_not(tmp_path: Path) -> None:
    leave_run(tmp_path / NAMES[0], [2.0, 1.5, 1.0, 0.5], [2], {2: "aa", 4: "bb"})
    leave_run(tmp_path / NAMES[1], [2.0, 1.5, 1.0, 0.5], [2, 2], {2: "aa", 3: "cc", 4: "bb"})
    leave_run(tmp_path / NAMES[2], [2.0, 1.5, 1.0, 0.51], [2, 3], {2: "aa", 4: "dd"})
    found = results(tmp_path)
    against = {name: found[name]["against_undisturbed"] for name in NAMES[1:]}
    assert "host" not in json.dumps(found)
    assert against[NAMES[1]] == {
        "epochs_compared": 2,
        "epochs_equal": 2,
        "snapshots_compared": 2,
        "snapshots_equal": 2,
        "steps_compared": 4,
        "max_abs_loss_difference": 0.0,
        "same_weights": True,
        "same_optimizer": True,
    }
    assert against[NAMES[2]]["snapshots_equal"] == 1
    assert against[NAMES[2]]["max_abs_loss_difference"] == pytest.approx(0.01)
    assert against[NAMES[2]]["epochs_equal"] == 2  # it shows the loss of each epoch's first step only
    assert not against[NAMES[2]]["same_weights"]
    lines = table(found).splitlines()
    assert "| ranks | 2 | 2 | 2→2 | 2→3 |" in lines
    assert "| snapshot files with the same bytes | – | – | 2 of 2 | 1 of 2 |" in lines
    assert "| same final weights and optimizer | – | – | yes | no |" in lines
    assert any(line.startswith("| test accuracy, last epoch | 73.05 % | 40.00 %") for line in lines)
    assert write_results(tmp_path, tmp_path) == table(found)
    assert (tmp_path / "series.png").stat().st_size > 10_000
    (tmp_path / "toy.json").write_text((REPO / "docs" / "series" / "toy.json").read_text())
    assert write_results(tmp_path, tmp_path) == (tmp_path / "series.md").read_text()
    with_toy = (tmp_path / "series.md").read_text()
    assert with_toy.startswith(table(found)) and "| steps done again | 136 | 136 | 136 | 120 | 136 |" in with_toy


def test_an_experiment_that_has_not_come_to_its_end_has_no_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not finished"):
        results(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--data-root DIR is missing"),
        (("--data-root", "x", "--other-ranks", "2"), "--other-ranks must differ from --ranks"),
        (("--data-root", "x", "--ranks", "0"), "must be at least 1"),
    ],
)
def test_a_command_that_makes_no_sense_is_one_line_and_2(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    done = launch([sys.executable, PYTHON, "--run-dir", str(tmp_path / "runs"), *options], 60)
    assert done.returncode == 2
    assert says in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_the_page_shows_what_the_committed_record_says() -> None:
    folder = REPO / "docs" / "series"
    page = (folder / "README.md").read_text()
    assert table(json.loads((folder / "series.json").read_text())) in page
    assert toy.table(json.loads((folder / "toy.json").read_text())) in page
