"""Every kind of death at every point of a step: recovered under a plain torchrun, and bit-identical."""

from pathlib import Path

import pytest
from helpers import Completed, torchrun
from jobs import (
    BATCH,
    SAMPLES,
    SCRIPT,
    SHORT,
    assert_same_result,
    assert_snapshots_finite,
    job,
    undisturbed,
)

from course_lib.engine import Plan, read_events

KINDS = ("kill", "exit", "exception", "segfault", "nan")
POINTS = ("start", "load", "data", "forward", "backward", "optimizer", "snapshot", "eval")
FIRST, MIDDLE, LAST_OF_EPOCH = 0, 3, 2
STEPS_HIT = (FIRST, LAST_OF_EPOCH, MIDDLE)

# Each point, each kind and each step appears here several times; the slow test goes through all combinations.
CHOSEN = [
    ("kill", "start", FIRST, 1),
    ("segfault", "load", FIRST, 0),
    ("exit", "data", LAST_OF_EPOCH, 0),
    ("exception", "forward", LAST_OF_EPOCH, 0),
    ("segfault", "backward", MIDDLE, 1),
    ("kill", "optimizer", MIDDLE, 0),
    ("kill", "snapshot", MIDDLE, 0),
    ("kill", "eval", LAST_OF_EPOCH, 1),
    ("nan", "backward", MIDDLE, 1),
    ("nan", "snapshot", MIDDLE, 0),
    ("nan", "eval", LAST_OF_EPOCH, 1),
]
ALL = [(kind, at, step, rank) for kind in KINDS for at in POINTS for step in STEPS_HIT for rank in (0, 1)]


def check(run_dir: Path, kind: str, at: str, step: int, rank: int) -> None:
    done = job(run_dir, "--fault", f"{kind}:rank={rank},step={step},at={at}", max_restarts=2)
    assert done.returncode == 0, done.tail()
    mine = assert_same_result(run_dir, undisturbed())
    faults = read_events(run_dir).named("fault")
    assert [(fault["kind"], fault["at"], fault["rank"]) for fault in faults] == [(kind, at, rank)]
    assert_snapshots_finite(run_dir)
    # A death before the ranks had claimed a generation leaves none behind; a NaN is found a step later.
    assert mine["generations"] == 1 + (at != "start" or kind == "nan")


@pytest.mark.parametrize(("kind", "at", "step", "rank"), CHOSEN)
def test_a_death_costs_nothing(tmp_path: Path, kind: str, at: str, step: int, rank: int) -> None:
    check(tmp_path / "run", kind, at, step, rank)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "at", "step", "rank"), ALL)
def test_a_death_costs_nothing_anywhere(tmp_path: Path, kind: str, at: str, step: int, rank: int) -> None:
    check(tmp_path / "run", kind, at, step, rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_are_exact_as_well(tmp_path: Path, ranks: int) -> None:
    run_dir = tmp_path / "run"
    done = job(run_dir, "--fault", "kill:rank=0,step=3", ranks=ranks, max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert_same_result(run_dir, undisturbed(ranks=ranks))


def test_a_death_in_each_of_two_generations(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = job(run_dir, "--fault", "kill:rank=1,step=3,times=2", max_restarts=3)
    assert done.returncode == 0, done.tail()
    mine = assert_same_result(run_dir, undisturbed())
    assert mine["generations"] == 3 and mine["steps_replayed"] >= 2


def test_a_step_that_kills_three_generations_stops_the_job_and_a_new_start_tries_it_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    poison = ("--fault", "kill:rank=1,step=4,times=4")
    same_job = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "poisoned")

    def start(restarts: int) -> Completed:
        words = (*SHORT, *poison)
        return torchrun(
            *words, script=SCRIPT, max_restarts=restarts, run_dir=run_dir, standalone=False, agent_args=same_job
        )

    done = start(9)
    assert done.returncode == 1
    (line,) = {line for line in done.output.splitlines() if line.startswith("error: ")}
    assert "the last 3 generations have all died in step 4, on the samples" in line
    (told,) = [e for e in read_events(run_dir).named("no_progress") if e["rank"] == 0]
    order = Plan(SAMPLES, BATCH).permutation(1)
    assert (told["generation"], told["step"], told["indices"]) == (4, 4, order[BATCH : 2 * BATCH].tolist())
    # Somebody has looked at it and starts the job again, under its old name: one more death, and all is well.
    done = start(1)
    assert done.returncode == 0, done.tail()
    assert_same_result(run_dir, undisturbed())


def test_nan_without_restarts_stops_with_one_clear_line_and_no_poisoned_snapshot(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = job(run_dir, "--fault", "nan:rank=1,step=2,at=backward")
    assert done.returncode == 1
    (line,) = {line for line in done.output.splitlines() if line.startswith("rank 0, after step")}
    assert "NonFiniteError" in line and "the loss of step 3 is nan" in line
    assert_snapshots_finite(run_dir)
    again = job(run_dir)
    assert again.returncode == 0, again.tail()
    assert_same_result(run_dir, undisturbed())


def test_killed_before_the_first_snapshot_starts_again_from_step_0(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = job(run_dir, "--fault", "kill:rank=1,step=1", max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert_same_result(run_dir, undisturbed())
    assert [event["step"] for event in read_events(run_dir).named("snapshot_loaded") if event["rank"] == 0] == [0, 0]


def test_without_max_restarts_nothing_restarts_and_a_relaunch_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert job(run_dir, "--fault", "kill:rank=0,step=3").returncode == 1
    done = job(run_dir)
    assert done.returncode == 0, done.tail()
    assert "resumed from gen-0001-step-00000002" in done.output
    assert_same_result(run_dir, undisturbed())


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert job(run_dir).returncode == 0
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    done = job(run_dir, max_restarts=2)
    assert done.returncode == 0
    assert "nothing to do: this run has finished 2 of 2 epochs" in done.output
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    # A process may have died between the last snapshot and the report.
    (run_dir / "report.json").unlink()
    assert job(run_dir).returncode == 0
    assert_same_result(run_dir, undisturbed())
