"""Jobs of several nodes: each is lost, comes back, is added, paused or told to stop while the job trains.

After each, every sample counted once, the weights are those of an undisturbed run on one rank, and nothing is left.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import GRACE
from node_job import EVERY
from node_tools import cluster, finish, until

from course_lib.engine import UsageError, read_events
from course_lib.lab import claims, networks
from course_lib.lab.job import JobFailed
from course_lib.lab.networks import Loopback
from course_lib.lab.node_agents import TUNED
from course_lib.lab.nodes import Cluster

pytestmark = pytest.mark.matrix

KEEP_ALIVE_S = TUNED["keep_alive_interval"] * TUNED["keep_alive_max_attempt"]


def steps_of(run: Path, generation: int) -> list[int]:
    """The steps that a generation did, in order."""
    return sorted({e["step"] for e in read_events(run).named("step") if e["generation"] == generation})


def last_step(c: Cluster) -> int:
    return max(e["step"] for e in c.events if e["event"] == "step")


# --- nodes that go and come -----------------------------------------------------------------------------------------


def test_a_node_is_lost_and_comes_back_at_its_address(tmp_path: Path) -> None:
    """3 → 2 → 3 nodes."""
    with cluster(tmp_path) as c:
        c.start("a", "b", "c")
        c.wait_for(step=6, ranks=3)
        c.kill("b")
        lost = c.wait_for(ranks=2)
        assert c.report().splitlines()[1] == "node b: killed"
        c.start("b")
        back = c.wait_for(ranks=3, after=lost["generation"])
        report = finish(c)
    assert back["step"] == steps_of(c.run_dir, lost["generation"])[-1] + 1, "a join replays nothing"
    assert report["steps_replayed"] <= EVERY
    assert claims.world_sizes(c.run_dir)[-3:] == [3, 2, 3]


def test_the_node_of_rank_0_is_lost_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    """Two survivors, of which one becomes rank 0. The store is a process of its own, else they could not go on."""
    with cluster(tmp_path, nodes="2:3") as c:
        c.start("a", "b", "c")
        c.wait_for(step=6, ranks=3)
        assert set(c.workers("a")) == {0}
        c.kill("a")
        c.wait_for(ranks=2)
        assert (set(c.workers("b")), set(c.workers("c"))) == ({0}, {1})
        finish(c)


@pytest.mark.slow
def test_a_hot_spare_takes_over(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="2:2", environment={"LOGLEVEL": "INFO"}) as c:
        c.start("a", "b")
        first = c.wait_for(step=6, ranks=2)
        c.start("c")
        until(lambda: "starting workers" in c.output("c"), "the spare does not come up")
        c.wait_for(step=last_step(c) + 5)
        assert c.report().splitlines()[2] == "node c: waits, without a rank"
        c.kill("a")
        c.wait_for(ranks=2, after=first["generation"])
        assert (set(c.workers("b")), set(c.workers("c"))) == ({0}, {1})
        finish(c)


@pytest.mark.slow
def test_a_spare_that_was_never_needed_and_a_node_that_was_asked_to_leave_are_no_failures(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="1:2") as c:
        c.start("a", "b")
        first = c.wait_for(step=2, ranks=2)
        c.start("c")
        c.stop("b")  # the spare takes its place, and the next one is not needed
        c.wait_for(ranks=2, after=first["generation"])
        until(lambda: c.running() == ["a", "c"], "b does not leave")
        c.start("b")
        c.wait_for(step=last_step(c) + 5)
        assert c.report().splitlines()[1] == "node b: waits, without a rank"
        finish(c)


@pytest.mark.slow
def test_a_job_of_which_nobody_came_to_the_end_has_failed(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="2:2") as c:
        c.start("a", "b")
        c.wait_for(step=2, ranks=2)
        c.kill("a", "b")
        with pytest.raises(JobFailed, match="ended badly on node a, b"):
            c.wait(show=False)


@pytest.mark.slow
def test_a_node_joins_while_a_snapshot_is_being_written(tmp_path: Path) -> None:
    with cluster(tmp_path, "--slow 12", nodes="1:2") as c:
        c.start("a")
        first = c.wait_for(step=6, ranks=1)
        c.start("b")
        (tmp_path / "slow").touch()
        until((tmp_path / "writing").exists, "no snapshot")
        both = c.wait_for(ranks=2, after=first["generation"])
        assert both["step"] == steps_of(c.run_dir, first["generation"])[-1] + 1, "a join replays nothing"
        assert finish(c)["steps_replayed"] == 0


# --- the store's host -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_store_of_its_own_the_job_dies_with_its_first_node(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="1:2", rendezvous=False) as c:
        c.start("a", "b")
        c.wait_for(step=6, ranks=2)
        c.kill_store()
        with pytest.raises(JobFailed) as failed:
            c.wait(show=False)
    first, *nodes = str(failed.value).splitlines()[:3]
    assert first == (
        "the job ended badly on node b: the host of the rendezvous store is gone (node a, whose agent served it), and "
        "every agent ends with it"
    )
    assert nodes == ["node a: killed", "node b: ended with exit code 1: it lost the store"]
    with cluster(tmp_path, nodes="1:2") as again:  # nothing is lost but time
        again.start("b")
        finish(again)


@pytest.mark.slow
def test_the_loss_of_the_stores_own_process_is_said(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="1:1") as c:
        c.start("a")
        c.wait_for(step=6)
        c.kill_store()
        with pytest.raises(JobFailed, match=r"store is gone \(a process of its own\), and every agent ends with it\n"):
            c.wait(show=False)


# --- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param((0,), id="rank 0", marks=pytest.mark.slow),
        pytest.param((3,), id="the last rank", marks=pytest.mark.slow),
        pytest.param((1, 2), id="two at once", marks=pytest.mark.slow),
    ],
)
def test_workers_are_killed_on_two_nodes(tmp_path: Path, victims: tuple[int, ...]) -> None:
    with cluster(tmp_path, nodes="2:2", ranks=2) as c:
        c.start("a", "b")
        first = c.wait_for(step=6, ranks=4)
        workers = c.workers("a") | c.workers("b")
        for rank in victims:
            os.kill(workers[rank], signal.SIGKILL)
        c.wait_for(ranks=4, after=first["generation"])
        report = finish(c)
    assert report["steps_replayed"] <= EVERY


@pytest.mark.slow
def test_an_agent_is_killed_and_leaves_no_worker(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="1:2", ranks=2) as c:
        c.start("a", "b")
        c.wait_for(step=6, ranks=4)
        c.kill_agent("a")
        until(lambda: not c.node("a").processes(), "its workers train on", GRACE)
        c.wait_for(ranks=2)
        finish(c)


# --- pauses ---------------------------------------------------------------------------------------------------------


def test_a_node_that_was_paused_while_it_wrote_changes_nothing(tmp_path: Path) -> None:
    """Rank 0's machine freezes with a snapshot in its hand, and publishes it when it wakes up."""
    with cluster(tmp_path, "--slow 1 --collective-timeout 4", nodes="1:2") as c:
        c.start("a", "b")
        first = c.wait_for(step=6, ranks=2)
        (tmp_path / "slow").touch()
        until((tmp_path / "writing").exists, "no snapshot")
        c.pause("a")
        alone = c.wait_for(ranks=1, after=first["generation"])
        c.wait_for(step=alone["step"] + 3 * EVERY)
        assert not (tmp_path / "written").exists()
        c.resume("a")
        until((tmp_path / "written").exists, "the node that was paused does not publish")
        both = c.wait_for(ranks=2, after=alone["generation"])
        assert both["step"] == steps_of(c.run_dir, alone["generation"])[-1] + 1, "and nobody loaded it"
        finish(c)


@pytest.mark.slow
def test_an_agent_that_was_paused_while_its_group_broke_joins_the_next(tmp_path: Path) -> None:
    with cluster(tmp_path, "--collective-timeout 4", nodes="1:2") as c:
        c.start("a", "b")
        first = c.wait_for(step=6, ranks=2)
        c.pause("a", agent_only=True)
        os.kill(c.workers("b")[1], signal.SIGKILL)
        alone = c.wait_for(ranks=1, after=first["generation"])
        c.wait_for(step=alone["step"] + EVERY)
        c.resume("a")
        c.wait_for(ranks=2, after=alone["generation"])
        finish(c)


@pytest.mark.slow
def test_a_short_pause_costs_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="1:2") as c:
        c.start("a", "b")
        first = c.wait_for(step=6, ranks=2)
        c.pause("a")
        time.sleep(KEEP_ALIVE_S / 2)
        c.resume("a")
        c.wait_for(step=last_step(c) + 10)
        assert c.generation == first["generation"] and finish(c)["steps_replayed"] == 0


# --- a name that is taken -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_job_with_the_same_rdzv_id_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """torchrun takes its node for one more of the first job's."""
    name: dict[str, Any] = {"nodes": "2:3", "job_id": "taken"}
    with cluster(tmp_path, "--collective-timeout 6", **name) as c:
        c.start("a", "b")
        first = c.wait_for(step=6, ranks=2)
        with cluster(tmp_path, "--seed 1", run="other", rendezvous=c.endpoint, **name) as other:
            other.start("c")
            with pytest.raises(JobFailed, match="seed 0 there, 1 here"):
                other.wait(show=False)
        c.wait_for(ranks=2, after=first["generation"])
        finish(c)


# --- what the classroom refuses, and what it leaves -----------------------------------------------------------------

LEARNER = """
import sys, time
from course_lib.lab.node_agents import TUNED
from course_lib.lab.nodes import Cluster
from course_lib.lab.processes import kernel_mark, marked

with Cluster("run", "hang.py", "2:2") as c:
    c.start("a", "b")
    while sum(path.stat().st_size for path in c.run_dir.rglob("stdout.log")) < 6:
        time.sleep(0.05)
    print("up", flush=True)
    try:
        c.wait()
    except KeyboardInterrupt:
        print("interrupted, with", len(marked(kernel_mark())), "left", flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_kernel_leaves_nothing(
    running: Callable[..., Any], tmp_path: Path, signum: signal.Signals
) -> None:
    (tmp_path / "hang.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(300)")
    with running([sys.executable, "-c", LEARNER]) as process:
        process.wait_for("up")
        assert len(process.processes()) >= 6  # the kernel, its guard, the store, two agents, two workers
        os.kill(process.pid, signum)
        done = process.wait()
    if signum == signal.SIGINT:
        assert done.output.endswith("interrupted, with 0 left\n")


def test_bad_names_and_nodes_that_are_not_there(tmp_path: Path) -> None:
    with Cluster(tmp_path, "job.py", rendezvous="127.0.0.1:1") as c:
        with pytest.raises(UsageError, match="one letter from a to h, not 'ab'"):
            c.start("ab")
        with pytest.raises(UsageError, match="there is no node 'a' yet"):
            c.kill("a")


def test_an_address_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(address: str) -> int:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(networks, "free_port", lacking)
    with pytest.raises(UsageError, match="sudo ifconfig lo0 alias 127.0.0.3 up"):
        Loopback().address("b")
