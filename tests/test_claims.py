"""Claims: right about a sound record, and never silent about one that was changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course_lib.lab import claims
from course_lib.lab.claims import BrokenRecord

LOSSES = [2.0, 1.5, 1.25, 0.7, 0.6, 0.55]  # two epochs of three steps
SPANS = [[0, 4], [4, 8], [8, 10]] * 2
Lines = dict[str, list[dict[str, Any]]]


def step(number: int, rank: int, generation: int | None, world_size: int = 2) -> dict[str, Any]:
    """The record of a step."""
    who = {"rank": rank, "world_size": world_size, "generation": generation}
    what = {"step": number, "epoch": number // 3, "loss": LOSSES[number], "samples": SPANS[number], "lr": 0.1}
    return {"event": "step", "t": 100.0 * (generation or 0) + number, **who, **what}


def epoch(number: int, rank: int, generation: int | None, world_size: int = 2) -> dict[str, Any]:
    """The record of an epoch, with the mean of its steps' losses."""
    mean = sum(LOSSES[n] * (SPANS[n][1] - SPANS[n][0]) for n in range(3 * number, 3 * number + 3)) / 10
    who = {"rank": rank, "world_size": world_size, "generation": generation}
    t = 100.0 * (generation or 0) + 3 * number + 2.5
    return {"event": "epoch", "t": t, "epoch": number, "steps": 3, "train_loss": mean, "test_accuracy": 0.97, **who}


def crashed_run() -> Lines:
    """Two ranks; rank 1 dies in step 4, the next start goes on from the snapshot after step 2."""
    files: Lines = {}
    for rank in (0, 1):
        load = {"event": "snapshot_loaded", "rank": rank, "world_size": 2}
        last = 4 + (rank == 0)  # rank 0 had done step 4
        files[f"h-1{rank}"] = [
            {**load, "generation": 1, "t": 99, "step": 0},
            *(step(n, rank, 1) for n in range(last)),
            epoch(0, rank, 1),
        ]
        files[f"h-2{rank}"] = [
            {**load, "generation": 2, "t": 199, "step": 3},
            *(step(n, rank, 2) for n in range(3, 6)),
            epoch(1, rank, 2),
            {"event": "finish", "t": 210, "rank": rank, "world_size": 2, "generation": 2},
        ]
    return files


def calm_run() -> Lines:
    """One process without snapshots."""
    common = {"t": 10, "rank": 0, "world_size": 1, "generation": None}
    lines = [*(step(n, 0, None, 1) for n in range(6)), epoch(0, 0, None, 1), epoch(1, 0, None, 1)]
    return {"h-1": [*lines, {"event": "finish", **common}]}


def write(run: Path, files: Lines, **report: Any) -> Path:
    """Write a run directory."""
    (run / "events").mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (run / "events" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "report.json").write_text(json.dumps({"steps": 6, "weights_sha256": "abc"} | report))
    return run


@pytest.fixture
def calm(tmp_path: Path) -> Path:
    return write(tmp_path / "calm", calm_run())


def printed(run: Path, calm: Path) -> dict[str, str]:
    """What a cell with each claim shows."""
    cells: dict[str, Callable[[], object]] = {
        "restarts": lambda: claims.restarts(run),
        "replayed": lambda: claims.replayed(run),
        "world_sizes": lambda: claims.world_sizes(run),
        "max_difference": lambda: claims.max_difference(calm, run),
        "replay_difference": lambda: claims.replay_difference(run),
        "times_finished": lambda: claims.times_finished(run),
        "same_weights": lambda: claims.same_weights(calm, run),
        "every_sample_once": lambda: claims.every_sample_once(run),
        "accuracy": lambda: claims.accuracy(run) > 0.95,
    }
    shown = {}
    for name, cell in cells.items():
        try:
            shown[name] = str(cell())
        except BrokenRecord as error:
            shown[name] = f"error: {error}"
    return shown


RIGHT = {
    "restarts": "1",
    "replayed": "2",
    "world_sizes": "[2, 2]",
    "max_difference": "0.0",
    "replay_difference": "0.0",
    "times_finished": "{0: 1, 1: 1}",
    "same_weights": "True",
    "every_sample_once": "True",
    "accuracy": "True",
}


def test_a_sound_record(tmp_path: Path, calm: Path) -> None:
    assert printed(write(tmp_path / "run", crashed_run()), calm) == RIGHT
    assert printed(calm, calm) == RIGHT | {
        "restarts": "0",
        "replayed": "0",
        "world_sizes": "[]",
        "replay_difference": "inf",
    }


@pytest.mark.parametrize("name", ["h-10", "h-11", "h-20", "h-21"])
@pytest.mark.parametrize("number", range(6))
def test_a_lost_step_turns_every_claim_red(name: str, number: int, tmp_path: Path, calm: Path) -> None:
    files = crashed_run()
    kept = [line for line in files[name] if line.get("step") != number or line["event"] != "step"]
    counts = number >= 3 if name.startswith("h-2") else number < 3
    if len(kept) == len(files[name]) or not counts:
        return  # it wasn't there, or it was lost to the crash anyway
    shown = printed(write(tmp_path / "run", files | {name: kept}), calm)
    assert all(text.startswith("error") and f"step {number}" in text for text in shown.values()), shown


@pytest.mark.parametrize("number", range(6))
def test_a_step_that_all_ranks_lost_turns_every_claim_red(number: int, tmp_path: Path, calm: Path) -> None:
    files = {
        name: [line for line in lines if line["event"] != "step" or line["step"] != number]
        for name, lines in crashed_run().items()
    }
    shown = printed(write(tmp_path / "run", files), calm)
    assert all(text.startswith("error") for text in shown.values()), shown


def test_a_lost_step_that_an_earlier_start_had_done_turns_every_claim_red(tmp_path: Path, calm: Path) -> None:
    files = crashed_run()
    for name in ("h-20", "h-21"):
        files[name] = [line for line in files[name] if line["event"] != "step" or line["step"] != 3]
    shown = printed(write(tmp_path / "run", files), calm)
    assert all("step 3 is missing from the record of generation 2" in text for text in shown.values()), shown


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("number", range(6))
def test_a_loss_moved_by_a_millionth_turns_every_claim_red(
    number: int, everywhere: bool, tmp_path: Path, calm: Path
) -> None:
    files = crashed_run()
    for name in files if everywhere else ["h-10" if number < 3 else "h-20"]:
        for line in files[name]:
            if line["event"] == "step" and line["step"] == number:
                line["loss"] += 1e-6
    shown = printed(write(tmp_path / "run", files), calm)
    assert all(text.startswith("error") for text in shown.values()), shown


def test_other_changes_are_told_too(tmp_path: Path, calm: Path) -> None:
    files = crashed_run()
    files["h-20"][1]["samples"] = [0, 3]
    assert "different values of samples for step 3" in printed(write(tmp_path / "a", files), calm)["restarts"]
    for line in (files := crashed_run())["h-20"] + files["h-21"]:
        if line["event"] == "step" and line["step"] == 4:
            line["samples"] = [3, 8]
    assert "do not add up" in printed(write(tmp_path / "b", files), calm)["every_sample_once"]
    assert "report counts 7 steps" in printed(write(tmp_path / "c", crashed_run(), steps=7), calm)["restarts"]
    other = printed(write(tmp_path / "d", crashed_run(), weights_sha256="abd"), calm)
    assert other == RIGHT | {"same_weights": "False"}


def test_a_run_that_goes_on_and_one_without_a_record(tmp_path: Path, calm: Path) -> None:
    files = crashed_run()
    files = {name: [e for e in lines if e["event"] != "finish"] for name, lines in files.items()}
    files["h-21"] = [e for e in files["h-21"] if e["event"] != "epoch" and e.get("step") != 5]
    files["h-20"] = [e for e in files["h-20"] if e["event"] != "epoch"]
    run = write(tmp_path / "run", files)
    assert claims.restarts(run) == 1  # rank 1 may be a step behind while the job runs
    (tmp_path / "empty").mkdir()
    with pytest.raises(BrokenRecord, match="run the cell that trains first"):
        claims.restarts(tmp_path / "empty")
    (calm / "report.json").unlink()
    with pytest.raises(BrokenRecord, match="has no report"):
        claims.same_weights(calm, calm)


def test_samples_that_are_not_used_once(tmp_path: Path) -> None:
    """A record that agrees with itself, of a job that did the wrong thing."""

    def run(spans: list[list[int]]) -> Path:
        lines = calm_run()["h-1"]
        for line in lines:
            if line["event"] == "step":
                line["samples"] = spans[line["step"]]
            if line["event"] == "epoch":
                mine = range(3 * line["epoch"], 3 * line["epoch"] + 3)
                sizes = [spans[n][1] - spans[n][0] for n in mine]
                line["train_loss"] = sum(LOSSES[n] * size for n, size in zip(mine, sizes, strict=True)) / sum(sizes)
        return write(tmp_path / str(spans), {"h-1": lines})

    whole = [[0, 4], [4, 8], [8, 10]]
    assert claims.every_sample_once(run(whole * 2))
    assert not claims.every_sample_once(run([*whole, [0, 4], [4, 8], [8, 9]]))  # a tail dropped
    assert not claims.every_sample_once(run([*whole, [0, 4], [3, 8], [8, 10]]))  # one twice
    assert not claims.every_sample_once(run([*whole, [0, 4], [5, 8], [8, 10]]))  # one never
    assert not claims.every_sample_once(run([*whole, [1, 4], [4, 8], [8, 10]]))  # the first never


def test_what_the_ranks_observed_is_their_own_record(tmp_path: Path) -> None:
    with pytest.raises(BrokenRecord, match="has no evidence that can be read"):
        claims.observed(tmp_path, "sum")
    gathered = {"sum": [{"got": 3.0}, {"got": 3.0}], "sampler": [[0, 2], [1]]}
    own = {
        f"h-{rank}": [
            {
                "event": "scene",
                "t": 1,
                "rank": rank,
                "world_size": 2,
                "generation": None,
                "name": name,
                "seen": seen[rank],
            }
            for name, seen in gathered.items()
        ]
        for rank in (0, 1)
    }
    run = write(tmp_path / "run", own)
    (run / "evidence.json").write_text(json.dumps(gathered))
    assert claims.observed(run, "sum") == gathered["sum"] and claims.observed(run, "sampler") == [[0, 2], [1]]
    with pytest.raises(BrokenRecord, match="scene 'nonesuch'"):
        claims.observed(run, "nonesuch")
    for lines in (own["h-1"][:1], [own["h-1"][0], own["h-1"][1] | {"seen": [2]}]):
        write(run, own | {"h-1": lines})
        with pytest.raises(
            BrokenRecord, match="rank 1's own record of the scene 'sampler' is not what rank 0 gathered"
        ):
            claims.observed(run, "sum")  # one scene that is wrong makes the record one that nothing can rest on
