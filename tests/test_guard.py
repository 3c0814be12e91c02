"""A rank that hangs is killed from beside it, and the job goes on; nobody else is ever killed."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import helpers
import psutil
import pytest
from jobs import SCRIPT, SHORT, assert_same_result, job, undisturbed

from course_lib.engine import read_events

pytestmark = pytest.mark.matrix

TIMEOUT = ("--collective-timeout", 4)


@pytest.mark.parametrize(
    ("how", "rank"),
    [
        ("stop", 0),
        ("spin", 1),
        ("gil", 0),
        pytest.param("stop", 1, marks=pytest.mark.slow),
        pytest.param("spin", 0, marks=pytest.mark.slow),
        pytest.param("gil", 1, marks=pytest.mark.slow),
    ],
)
def test_a_hung_rank_is_replaced_long_before_the_agent_would(tmp_path: Path, how: str, rank: int) -> None:
    """The agent alone would wait 30 s for each of these after the collective timeout."""
    run_dir = tmp_path / "run"
    done = job(run_dir, *TIMEOUT, "--fault", f"hang:how={how},rank={rank},step=3", max_restarts=1)
    assert done.returncode == 0, done.tail()
    killed = [line for line in done.output.splitlines() if "its guard kills it" in line]
    assert len(killed) == 1 and f"rank {rank} (process " in killed[0]
    mine = assert_same_result(run_dir, undisturbed())
    assert mine["generations"] == 2


@pytest.mark.slow
def test_a_rank_that_is_alone_and_stopped(tmp_path: Path) -> None:
    """Nobody waits for it, so only its guard can see it."""
    fault = ("--fault", "hang:how=stop,rank=0,step=3")
    done = job(tmp_path, *TIMEOUT, *fault, ranks=1, max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert_same_result(tmp_path, undisturbed(ranks=1))


def test_a_loader_that_is_stuck(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fault = ("--num-workers", 1, "--fault", "hang:how=loader,rank=1,step=3")
    done = job(run_dir, *TIMEOUT, *fault, max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert_same_result(run_dir, undisturbed())


@pytest.mark.slow
def test_a_worker_that_is_stopped_for_a_moment_lives(tmp_path: Path) -> None:
    command = helpers.torchrun_cmd(*SHORT, "--epochs", 60, "--collective-timeout", 30, script=SCRIPT, run_dir=tmp_path)
    with helpers.running(command, env=helpers.torchrun_env()) as process:
        process.wait_for("epoch 2/60")
        (rank_1,) = workers(process.pid, 1)
        os.kill(rank_1, signal.SIGSTOP)
        time.sleep(2)
        os.kill(rank_1, signal.SIGCONT)
        process.wait_for("epoch 20/60")
        assert workers(process.pid, 1) == [rank_1]
    assert not read_events(tmp_path).named("fault")


def workers(agent: int, rank: int) -> list[int]:
    """The processes of a rank: the agent's own children, not their guards."""
    children = psutil.Process(agent).children()
    return [child.pid for child in children if child.environ().get("RANK") == str(rank)]


def test_no_guard_outlives_its_worker(tmp_path: Path) -> None:
    """`job` fails when a process of its own is left; here each guard's parent is killed the hard way."""
    command = helpers.torchrun_cmd(*SHORT, "--epochs", 60, script=SCRIPT, run_dir=tmp_path, max_restarts=0)
    with helpers.running(command, env=helpers.torchrun_env()) as process:
        process.wait_for("epoch 2/60")
        guards = [g for rank in (0, 1) for pid in workers(process.pid, rank) for g in psutil.Process(pid).children()]
        assert len(guards) == 2
        for pid in [pid for rank in (0, 1) for pid in workers(process.pid, rank)]:
            with suppress(ProcessLookupError):  # the agent may be faster with the second one
                os.kill(pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(guards, timeout=10)
        assert len(gone) == 2 and not alive
