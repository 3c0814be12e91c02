"""The campaigns: that their verdicts can be bad ones, and a short run of each."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from helpers import BENCH

Launch = Callable[..., helpers.Completed]


def step(number: int, generation: int, t: float, epoch: int = 0, low: int = 0, high: int = 0) -> dict[str, Any]:
    common = {"rank": 0, "world_size": 1, "generation": generation, "loss": 1.0 / (number + 1)}
    return {"t": t, "event": "step", "step": number, "epoch": epoch, "samples": [low, high], **common}


def loaded(generation: int, t: float) -> dict[str, Any]:
    return {"t": t, "event": "snapshot_loaded", "rank": 0, "world_size": 1, "generation": generation, "step": 0}


# Two epochs of ten samples, four a step; the rank is killed at 2.5 and step 1 is done again.
HISTORY = [
    loaded(1, 0.5),
    step(0, 1, 1.0, 0, 0, 4),
    step(1, 1, 2.0, 0, 4, 8),
    loaded(2, 3.0),
    step(1, 2, 4.0, 0, 4, 8),
    step(2, 2, 5.0, 0, 8, 10),
    step(3, 2, 6.0, 1, 0, 4),
    step(4, 2, 7.0, 1, 4, 8),
    step(5, 2, 8.0, 1, 8, 10),
]


def test_every_sample_once(bench: Callable[[str], Any]) -> None:
    assert bench("_verdict").exactly_once(HISTORY, 2, 10)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda h: h.pop(),  # the end is missing
        lambda h: h.pop(5),  # a step is missing
        lambda h: h[5].update(samples=[8, 9]),  # a sample is missing
        lambda h: h[5].update(samples=[7, 10]),  # a sample comes twice
        lambda h: h[6].update(epoch=0),  # an epoch that does not end
        lambda h: h.append(step(6, 2, 9.0, 2, 0, 4)),  # an epoch too many
        lambda h: h.clear(),
    ],
)
def test_not_every_sample_once(bench: Callable[[str], Any], spoil: Callable[[list[Any]], Any]) -> None:
    history = copy.deepcopy(HISTORY)
    spoil(history)
    assert not bench("_verdict").exactly_once(history, 2, 10)


def test_a_recovery_lasts_from_the_kill_to_the_next_generations_first_step(bench: Callable[[str], Any]) -> None:
    verdict = bench("_verdict")

    def kills(*times: float) -> list[Any]:
        return [verdict.Kill(t, 0, 0, n, 0.0) for n, t in enumerate(times)]

    assert verdict.recoveries(kills(1.5), HISTORY) == [2.5]  # the old generation's last step is no recovery
    assert verdict.recoveries(kills(1.5, 3.5), HISTORY) == []  # killed again before it had recovered, and never after
    assert verdict.recoveries(kills(0.1, 2.5), HISTORY) == [0.9, 1.5]


def write_run(directory: Path, history: list[dict[str, Any]], **changes: Any) -> Path:
    (directory / "events").mkdir(parents=True)
    (directory / "events" / "host-7.jsonl").write_text("".join(json.dumps(event) + "\n" for event in history))
    report = {"generations": 2, "steps": 6, "steps_replayed": 1, "weights_sha256": "w", "optimizer_sha256": "o"}
    (directory / "report.json").write_text(json.dumps(report | changes))
    return directory


ALL_WELL = {"exit_code": 0, "attempts": 2}


@pytest.mark.parametrize(
    ("outcome", "report", "loss", "broken"),
    [
        ({}, {}, None, set()),
        ({"exit_code": 1}, {}, None, {"exit code 0"}),
        ({"attempts": 3}, {}, None, {"as many restarts as kills"}),
        ({"attempts": 1}, {}, None, {"as many restarts as kills"}),
        ({}, {"generations": 3}, None, {"no extra generation"}),
        ({}, {"weights_sha256": "x"}, None, {"bit-identical"}),
        ({}, {"optimizer_sha256": "x"}, None, {"bit-identical"}),
        ({}, {}, 0.2 + 1e-12, {"the same losses"}),
    ],
)
def test_each_claim_of_a_campaign_can_fail(
    tmp_path: Path,
    bench: Callable[[str], Any],
    outcome: dict[str, Any],
    report: dict[str, Any],
    loss: float | None,
    broken: set[str],
) -> None:
    verdict = bench("_verdict")
    killed = copy.deepcopy(HISTORY)
    if loss is not None:
        killed[-2]["loss"] = loss
    calm = [event for event in HISTORY if event["generation"] == 2 or event["t"] < 2]
    directories = write_run(tmp_path / "killed", killed, **report), write_run(tmp_path / "reference", calm)
    kill = verdict.Kill(2.5, 0, 7, 0, 2.0)
    claims, figures = verdict.judge(*directories, ALL_WELL | {"kills": [kill]} | outcome, 2, 10)
    assert {name for name, holds in claims.items() if not holds} == broken
    assert figures["recovery_seconds"] == [1.5, 1.5, 1.5] and figures["killed while training"] == 1


def test_a_job_that_does_not_end_cleanly_is_told_apart(bench: Callable[[str], Any]) -> None:
    ends = bench("clean_ends")
    kinds = [ends.Ending(0, "\n"), ends.Ending(0, "a warning"), ends.Ending(1, "x"), ends.Ending(None, "")]
    assert [ending.clean for ending in kinds] == [True, False, False, False]
    result = ends.figures(kinds, 2, 1.0)
    assert (result["ends"], result["clean"], result["first unclean output"]) == (4, 1, ["a warning"])
    assert result["by kind"] == {"clean": 1, "exit code 0 with output": 1, "exit 1": 1, "no end": 1}


def test_ends_are_counted(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "ends.json"
    command = [sys.executable, BENCH / "clean_ends.py", "--ends", "1", "--ranks", "2", "--json", path]
    done = launch(command, env=helpers.torchrun_env())
    assert done.returncode == 0, done.tail()
    assert json.loads(path.read_text())["by kind"] == {"clean": 1}


def test_a_campaign_that_cannot_be_finished_in_time_fails_and_leaves_no_process(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    command = [sys.executable, BENCH / "restart_campaign.py", "--kills", "1", "--timeout", "2", "--json", path]
    done = launch(command, env=helpers.torchrun_env({"TMPDIR": str(tmp_path)}))
    result = json.loads(path.read_text())
    assert done.returncode == 1
    assert not result["passed"] and "did not end within 2 s" in result["failure"]


@pytest.mark.parametrize("name", ["restart_campaign.py", "clean_ends.py"])
def test_a_number_that_makes_no_sense_is_refused(launch: Launch, name: str) -> None:
    done = launch([sys.executable, BENCH / name, "--ranks", "0"], env=helpers.torchrun_env())
    assert (done.returncode, done.output.count("\n")) == (2, 1) and "--ranks must be at least 1" in done.output


def test_a_crash_campaign_that_finds_a_loss_says_so_and_fails(
    bench: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign, path = bench("crash_campaign"), tmp_path / "crashes.json"
    monkeypatch.setattr(campaign, "OURS", campaign.WAYS["and fsync"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # this process goes on
    monkeypatch.setattr(sys, "argv", ["crash_campaign.py", "--only", "images", "--every", "9", "--json", str(path)])
    with pytest.raises(SystemExit, match="1"):
        campaign.main()
    result, said = json.loads(path.read_text()), capsys.readouterr().out
    row = result["rows"]["machine dies"]
    assert not result["passed"] and row["failures"] > 0 and row["first failures"][0] in said
    assert "step 1 was published, and step 0 is found" in row["first failures"][0]


def test_what_a_killed_job_lost_is_told_from_its_events(bench: Callable[[str], Any]) -> None:
    job, kill = bench("_killed_job"), bench("_verdict").Kill(2.5, 0, 7, 0, 2.0)
    saved = loaded(1, 2.0) | {"event": "snapshot_saved", "step": 6}
    assert job.lost([saved, loaded(2, 3.0) | {"step": 6}], kill) is None
    assert job.lost([saved, loaded(2, 3.0) | {"step": 7}], kill) is None
    assert job.lost([saved, loaded(2, 3.0) | {"step": 5}], kill) == "step 6 was published, and step 5 was loaded"
    assert job.lost([saved, loaded(1, 0.5)], kill) == "no generation came after it"


def test_a_number_of_crashes_that_makes_no_sense_is_refused(launch: Launch) -> None:
    done = launch([sys.executable, BENCH / "crash_campaign.py", "--job-kills", "0"], env=helpers.torchrun_env())
    assert (done.returncode, done.output.count("\n")) == (2, 1) and "--job-kills must be at least 1" in done.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_killed_while_it_saves_loses_nothing(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    command = [sys.executable, BENCH / "crash_campaign.py", "--only", "job", "--job-kills", "3", "--json", path]
    done = launch(command, timeout=880, env=helpers.torchrun_env({"TMPDIR": str(tmp_path)}))
    assert done.returncode == 0, done.tail()
    row = json.loads(path.read_text())["rows"]["killed ranks of a job"]
    assert (row["tried"], row["failures"]) == (9, 0) and row["counts"]["steps"] >= 160


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_short_campaign_loses_nothing(launch: Launch, tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "campaign.json"
    command = [sys.executable, BENCH / "restart_campaign.py", "--kills", "3", "--ranks", str(ranks), "--json", path]
    done = launch(command, timeout=280, env=helpers.torchrun_env({"TMPDIR": str(tmp_path)}))
    assert done.returncode == 0, done.tail()
    result = json.loads(path.read_text())
    assert result["passed"] and (result["kills"], result["restarts"]) == (3, 3)
