"""Nodes whose network is cut, for longer and for shorter than the rendezvous takes a silent node for a lost one."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_job import EVERY
from node_tools import cluster, finish

from course_lib.engine import UsageError, read_events
from course_lib.lab.netns import Namespaces
from course_lib.lab.node_agents import TUNED

pytestmark = pytest.mark.matrix

KEEP_ALIVE_S = TUNED["keep_alive_interval"] * TUNED["keep_alive_max_attempt"]


@pytest.fixture
def network() -> Iterator[Namespaces]:
    try:
        made = Namespaces("abc")
    except UsageError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.mark.slow
def test_a_node_that_is_cut_off_for_long_is_left_behind_and_comes_back(network: Namespaces, tmp_path: Path) -> None:
    """MIN is above MAX/2, so the node alone makes no group of its own; its agent tries to join for as long."""
    with cluster(tmp_path, "--collective-timeout 4", nodes="2:3", network=network) as c:
        c.start("a", "b", "c")
        first = c.wait_for(step=6, ranks=3)
        network.cut("a")  # rank 0's, which writes the snapshots
        two = c.wait_for(ranks=2, after=first["generation"])
        c.wait_for(step=two["step"] + 2 * EVERY)
        assert (set(c.workers("b")), set(c.workers("c"))) == ({0}, {1})
        network.heal("a")
        three = c.wait_for(ranks=3, after=two["generation"])
        finish(c)
    done = {e["step"] for e in read_events(c.run_dir).named("step") if e["generation"] == two["generation"]}
    assert three["step"] == max(done) + 1, "its return replays nothing"


@pytest.mark.slow
def test_a_short_cut_costs_nothing(network: Namespaces, tmp_path: Path) -> None:
    with cluster(tmp_path, nodes="2:3", network=network) as c:
        c.start("a", "b", "c")
        first = c.wait_for(step=6, ranks=3)
        network.cut("b")
        time.sleep(KEEP_ALIVE_S / 2)
        network.heal("b")
        c.wait_for(step=max(e["step"] for e in c.events if e["event"] == "step") + EVERY)
        assert c.generation == first["generation"]
        assert finish(c)["steps_replayed"] == 0
