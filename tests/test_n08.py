"""What notebook 08 tells of runs that were killed, and of recorded jobs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import REPO
from test_claims import epoch, step, write

from course_lib.engine import UsageError
from course_lib.lab import goodput_claims as claims
from course_lib.lab.claims import BrokenRecord
from course_lib.lab.exercises import n08
from course_lib.lab.goodput_cases import evidence, read_cases
from course_lib.lab.story import tell

RECORD = REPO / "notebooks" / "recorded" / "goodput.json"
Event = dict[str, Any]
PACE, STEP = 1.0, 0.75  # seconds


def killed_run() -> dict[str, list[Event]]:
    """Two ranks and two epochs of three steps; killed in step 4, at 105.0; the second life begins with step 3."""
    files: dict[str, list[Event]] = {}
    for rank in (0, 1):
        files[f"h-1{rank}"] = _life(rank, 1, 97.0, range(4))
        files[f"h-2{rank}"] = [*_life(rank, 2, 106.0, range(3, 6)), _event("finish", 112.5, rank, 2)]
    files["h-10"].insert(-1, _event("snapshot_saved", 103.6, 0, 1, step=3, stall_s=0.125, write_s=0.5))
    return files


def _life(rank: int, generation: int, born: float, steps: range) -> list[Event]:
    told = [
        _event("process_start", born, rank, None),
        _event("imported", born + 1, rank, None),
        _event("group_ready", born + 1.5, rank, None, joined=born + 1.25),
        _event("snapshot_loaded", born + 2, rank, generation, step=steps[0]),
        _event("warm_up", born + 2.25, rank, generation, step=steps[0]),
    ]
    for place, number in enumerate(steps):
        stall = 0.125 if generation == 1 and number > 2 else 0.0
        at = born + 3 + PACE * (place + 1) + stall
        told.append(step(number, rank, generation) | {"t": at, "seconds": STEP})
        if number % 3 == 2:
            told.append(epoch(number // 3, rank, generation) | {"t": at + 0.125})
    return told


def _event(name: str, t: float, rank: int, generation: int | None, **more: Any) -> Event:
    return {"event": name, "t": t, "rank": rank, "world_size": 2, "generation": generation} | more


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write(tmp_path / "run", killed_run())
    tell(folder, "kill", "rank 1")
    path = folder / "logs" / "story.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"t": 105.0}) + "\n")
    return folder


def test_the_ledger_and_the_phases_of_a_killed_run_add_up(run: Path) -> None:
    assert claims.adds_up(run) and claims.phases_add_up(run) == [True] and claims.counts_the_same_steps(run)
    assert claims.report_of(run).ledger.steps == {"productive": 6, "replayed": 1}
    assert claims.kill_times(run) == [105.0]


def test_the_constants_are_those_of_the_run(run: Path) -> None:
    found = claims.constants(run)
    assert (found.pace_s, found.stall_s, found.write_s) == (PACE, 0.125, 0.375)
    assert found.step_share == STEP and found.recovery_s == pytest.approx(110.0 - 105.0 - PACE)


def test_the_parts_measured_and_predicted_are_all_the_time(run: Path) -> None:
    measured, predicted = claims.measured_parts(run), claims.predicted_parts(run, claims.constants(run), every=3)
    assert list(measured) == list(predicted) == list(claims.PARTS)
    assert sum(measured.values()) == pytest.approx(1) and sum(predicted.values()) == pytest.approx(1)
    window = 112.0 - (101.0 - STEP)
    assert measured["steps that count"] == pytest.approx(6 * STEP / window) == claims.goodput_of(run)
    assert measured["done again"] == pytest.approx(STEP / window, abs=0.01)
    assert claims.mtbf_of(run) == pytest.approx(window)


def test_a_run_that_nobody_struck_has_no_time_between_kills(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", killed_run())
    assert claims.kill_times(folder) == []
    with pytest.raises(BrokenRecord, match="nobody was killed"):
        claims.mtbf_of(folder)


@pytest.mark.parametrize(
    "claim", [claims.adds_up, claims.phases_add_up, claims.counts_the_same_steps, claims.constants, claims.goodput_of]
)
def test_no_claim_is_made_of_a_broken_record(run: Path, claim: Callable[[Path], object]) -> None:
    path = run / "events" / "h-21.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"step": 4' not in line))
    with pytest.raises(BrokenRecord):
        claim(run)


# --- the recorded jobs --------------------------------------------------------------------------------------------


def test_the_recorded_jobs_show_what_the_exercise_asks_for() -> None:
    jobs = read_cases(RECORD)["jobs"]

    def largest(letter: str) -> str:
        seconds = jobs[letter]["seconds"]
        return max(set(seconds) - {"productive"}, key=lambda kind: float(seconds[kind]))

    def phase(letter: str) -> str:
        longest = max(jobs[letter]["recoveries"], key=lambda phases: sum(phases.values()))
        return str(max(longest, key=lambda name: float(longest[name])))

    assert set(jobs) == set(n08.causes.solution)
    assert largest("A") == "recovering" and "detection" in phase("A")
    assert largest("B") == "replayed" and largest("C") == "idle"
    assert largest("D") == "recovering" and phase("D") == "first batch"
    for job in jobs.values():
        assert sum(job["seconds"].values()) == pytest.approx(job["wall_s"])


def test_the_evidence_is_a_table_with_a_column_for_each_job() -> None:
    lines = evidence(read_cases(RECORD)).splitlines()
    assert lines[0].split()[-4:] == ["A", "B", "C", "D"] and max(map(len, lines)) <= 80
    assert {"replayed", "idle", "detection", "snapshot"} <= {line.split()[0] for line in lines if line.strip()}
    assert not any(cause in "\n".join(lines) for cause in n08.causes.solution.values())


@pytest.mark.parametrize("content", [None, "{", '{"jobs": {"A": 1}}', "[]"])
def test_a_record_that_is_none_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "goodput.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="goodput.json is no record"):
        read_cases(path)


# --- the plan -----------------------------------------------------------------------------------------------------


def test_a_plan_is_judged_by_the_simulator_and_is_told_what_it_lacks() -> None:
    told = {
        (22, 2): "waiting for nodes",
        (5, 8): "is saving",
        (240, 8): "doing work again",
        (22, 9): "you have been given 8",
        (0, 8): "minutes",
    }
    for (minutes, spares), words in told.items():
        assert words in n08.plan.verdict({"minutes": minutes, "spares": spares})
    for spares in (math.inf, math.nan, -1, 1.5):
        assert "spares" in n08.plan.verdict({"minutes": 22, "spares": spares})
    for plan in ({"minutes": 20, "spares": 7}, {"minutes": 30, "spares": 8}):
        assert n08.plan.verdict(plan).startswith("solved")
        assert n08.planned(plan).mean > n08.TARGET
