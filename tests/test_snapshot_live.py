"""Another job in the run directory is refused when it lives, and only then."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import REPO, Running
from snapshot_tools import everything, find, on_ranks, start

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import Claim, Heartbeat, SnapshotStore, find_snapshot
from course_lib.engine.snapshots.heartbeat import beat_path, is_live

Start = Callable[..., AbstractContextManager[Running]]
IN_USE = "in use by a live job"


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def hold(directory: str) -> None:
    """A job that saves a snapshot and then trains on for ever."""
    generation = start(Path(directory))
    generation.save(10)
    Heartbeat(generation.store.directory, generation.claim)
    print("holding", flush=True)
    threading.Event().wait()


@contextmanager
def holder(running: Start, run_dir: Path, run_id: str | None = "job-a") -> Iterator[Running]:
    code = f"import test_snapshot_live; test_snapshot_live.hold({str(run_dir)!r})"
    env = {"PYTHONPATH": f"{REPO}:{REPO / 'tests'}", "TORCHELASTIC_RUN_ID": run_id}
    with running([sys.executable, "-c", code], env=env) as process:
        process.wait_for("holding")
        yield process


def test_a_live_job_is_refused_and_left_alone_and_a_dead_one_is_taken_over(
    running: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    with holder(running, run_dir) as process:
        for mine in ("none", "job-b"):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", mine)
            with pytest.raises(UsageError, match=rf"{run_dir} is {IN_USE} \(process {process.pid} on .*--run-dir"):
                start(run_dir)
        files = {name for name in everything(run_dir) if not name.endswith(".beat")}
        assert files == {
            f"snapshots/gen-0001{part}" for part in (".claim.json", *(f"-step-00000010{s}" for s in (".pt", ".json")))
        }
        # All ranks end together, with the same words.
        views = on_ranks(lambda world: find_snapshot(SnapshotStore(run_dir), world), 3)
        assert [type(view) for view in views] == [UsageError] * 3 and len({str(view) for view in views}) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.popen.wait(30)
        after = start(run_dir)
    assert (after.claim.generation, after.found.content["step"]) == (2, 10)


def test_a_restart_of_the_same_job_supersedes_itself(
    running: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-a")
    with holder(running, tmp_path / "run") as process:
        after = start(tmp_path / "run")
        assert process.popen.poll() is None
    assert (after.claim.generation, after.found.content["step"]) == (2, 10)


def test_two_plain_runs_are_not_the_same_job(running: Start, tmp_path: Path) -> None:
    """Without torchrun nothing names the job: a second start beside a live one is a mistake."""
    with holder(running, tmp_path / "run", run_id=None), pytest.raises(UsageError, match=IN_USE):
        start(tmp_path / "run")


def test_a_job_that_does_not_move_is_taken_over_although_its_process_exists(running: Start, tmp_path: Path) -> None:
    with holder(running, tmp_path / "run") as process:
        os.kill(process.pid, signal.SIGSTOP)
        while process.processes()[0].status() != "stopped":
            time.sleep(0.01)
        after = start(tmp_path / "run")
    assert after.claim.generation == 2


def test_a_jumping_clock_neither_hides_a_live_job_nor_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = start(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # the second job is another process
    jumps = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    beat = Heartbeat(generation.store.directory, generation.claim)
    try:
        with pytest.raises(UsageError, match=IN_USE):
            start(tmp_path)
    finally:
        beat.stop()
    beat_path(generation.store.directory, generation.claim).write_text("12\n")
    os.utime(beat_path(generation.store.directory, generation.claim), (4e9, 4e9))  # written in the future
    assert start(tmp_path).claim.generation == 2


def test_the_same_process_may_run_its_cell_again(tmp_path: Path) -> None:
    generation = start(tmp_path)
    beat = Heartbeat(generation.store.directory, generation.claim)
    try:
        assert start(tmp_path).claim.generation == 2
    finally:
        beat.stop()


def elsewhere(claim: Claim) -> Claim:
    return replace(claim, host="another-node 0000 pid:[1]", pid=2**22 + 1)


def test_on_another_machine_only_the_counter_tells(tmp_path: Path) -> None:
    claim = elsewhere(start(tmp_path).claim)
    directory = tmp_path / "snapshots"
    assert not is_live(directory, claim)  # it never counted, or has ended in order
    beat_path(directory, claim).write_text("5\n")
    assert not is_live(directory, claim, watch_s=0.3)
    beat = Heartbeat(directory, claim)  # it starts over from 1: a change is life, not a growth
    try:
        assert is_live(directory, claim, watch_s=60)
    finally:
        beat.stop()
    assert not beat_path(directory, claim).exists()


def test_a_dead_process_of_this_machine_is_dead_whatever_its_file_says(tmp_path: Path) -> None:
    claim = replace(start(tmp_path).claim, pid=2**22 + 1)  # above the largest pid that Linux gives
    beat = Heartbeat(tmp_path / "snapshots", claim)
    try:
        assert not is_live(tmp_path / "snapshots", claim)
    finally:
        beat.stop()


def test_a_heartbeat_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    claim = start(tmp_path).claim
    beat = Heartbeat(tmp_path / "gone", claim)
    beat.stop()
    assert not (tmp_path / "gone").exists()
    assert find(tmp_path).manifest is None
