"""Without a shared disk, a job of which two halves could both go on does not start."""

from collections.abc import Callable
from pathlib import Path

import helpers
import pytest
from jobs import SCRIPT, SHORT
from snapshot_tools import on_ranks

from course_lib.engine import UsageError, halves
from course_lib.engine.snapshots import SnapshotStore, claim_generation, find_snapshot


@pytest.mark.parametrize(
    ("words", "variable", "nodes"),
    [
        ("torchrun --nnodes 1:3 job.py", "", (1, 3)),
        ("torchrun --nnodes=2:3 job.py --nnodes 9", "", (2, 3)),
        ("torchrun --nnodes 2 job.py", "1:4", (2, 2)),  # the command line has the last word
        ("torchrun job.py", "1:4", (1, 4)),
        ("torchrun job.py", "", None),
        ("torchrun --nnodes many job.py", "", None),
        ("", "", None),
    ],
)
def test_what_the_agent_was_told(
    monkeypatch: pytest.MonkeyPatch, words: str, variable: str, nodes: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(halves, "command_line", lambda pid: words.split())
    monkeypatch.setenv("PET_NNODES", variable)
    assert halves.node_range() == nodes
    assert halves.may_grow() == (nodes is not None and nodes[0] != nodes[1])


@pytest.mark.parametrize("nodes", [(1, 2), (1, 3), (2, 4), (1, 4)])
def test_two_halves_that_could_both_go_on_are_refused(nodes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=f"{nodes[1] // 2 + 1}:{nodes[1]}"):
        halves.refuse_halves(nodes)


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (2, 3), (3, 4), None])
def test_where_only_one_half_can_go_on_it_may(nodes: tuple[int, int] | None) -> None:
    halves.refuse_halves(nodes)


@pytest.mark.parametrize("shared", [True, False])
def test_only_a_disk_that_is_not_shared_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr(halves, "command_line", lambda pid: ["--nnodes", "1:2"])

    def begin(world: object) -> object:
        store = SnapshotStore(tmp_path if shared else tmp_path / str(world.rank))  # type: ignore[attr-defined]
        return claim_generation(store, world, find_snapshot(store, world))  # type: ignore[arg-type]

    results = on_ranks(begin, 2, nodes=True)
    assert [isinstance(result, UsageError) for result in results] == [not shared] * 2


def test_a_real_job_of_two_nodes_with_disks_of_their_own(
    tmp_path: Path, running: Callable[..., helpers.Running]
) -> None:
    endpoint = f"127.0.0.1:{helpers.free_port()}"
    rendezvous = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=halves"]
    conf = ["--rdzv-conf=last_call_timeout=4"]

    def node(name: str, address: str) -> list[str]:
        agent = [*rendezvous, *conf, f"--local-addr={address}"]
        return helpers.torchrun_cmd(
            *SHORT, script=SCRIPT, nproc=1, run_dir=tmp_path / name, standalone=False, agent_args=agent
        )

    env = helpers.torchrun_env()
    with running(node("a", "127.0.0.1"), env=env) as a, running(node("b", "127.0.0.2"), env=env) as b:
        ends = [process.wait() for process in (a, b)]
    assert [end.returncode for end in ends] == [1, 1]  # torchrun's
    for end in ends:
        assert end.output.count("error: --nnodes 1:2: the nodes share no disk") == 1, end.tail()
    # A bare torchrun shares its store over all rounds, and then nobody can join.
    assert sum(end.output.count("a node that joins will end this job") for end in ends) >= 1
