"""All ranks load the same snapshot and claim the same generation, whatever each of them sees of the disk."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from helpers import REPO, Completed
from hypothesis import given
from hypothesis import strategies as st
from snapshot_tools import flip, names, on_ranks, start
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import spawn

from course_lib.engine import UsageError, World, open_world
from course_lib.engine.snapshots import Claim, Restored, SnapshotStore, claim_generation, find_snapshot
from course_lib.engine.snapshots.store import Listing
from course_lib.engine.tree import digest

T = TypeVar("T")
NOTHING = Listing((), (), ())


class Stale(SnapshotStore):
    """A store whose directory listing comes out of a network file system's cache."""

    def __init__(self, run_dir: Path, stale: Listing) -> None:
        super().__init__(run_dir)
        self.stale = stale

    def listing(self) -> Listing:
        return self.stale


def begin(store: SnapshotStore, world: World) -> tuple[Restored, Claim]:
    found = find_snapshot(store, world)
    return found, claim_generation(store, world, found)


def all_equal(results: list[tuple[Restored, Claim] | Exception]) -> tuple[Restored, Claim]:
    """The first rank's result, once all ranks are known to have the same."""
    for result in results:
        assert not isinstance(result, Exception), result
    good = [result for result in results if not isinstance(result, Exception)]
    for found, claim in good:
        assert (found.manifest, found.skipped, claim) == (good[0][0].manifest, good[0][0].skipped, good[0][1])
        assert digest(found.content) == digest(good[0][0].content)
    return good[0]


@pytest.mark.parametrize("blind", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}], ids=str)
def test_ranks_that_see_an_old_listing_load_what_the_others_see(tmp_path: Path, blind: set[int]) -> None:
    generation = start(tmp_path)
    generation.save(10)
    old = generation.store.listing()
    start(tmp_path).save(20)
    found, claim = all_equal(
        on_ranks(lambda w: begin(Stale(tmp_path, old) if w.rank in blind else SnapshotStore(tmp_path), w), 3)
    )
    assert found.manifest is not None and found.manifest.name == "gen-0002-step-00000020"
    assert (claim.generation, claim.parent) == (3, found.manifest.name)


@given(data=st.data())
def test_the_newest_snapshot_that_any_rank_sees_is_used(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run_dir = tmp_path_factory.mktemp("views")
    generation = start(run_dir, keep=9)
    manifests = [generation.save(step) for step in range(1, 5)]
    seen = [data.draw(st.sets(st.sampled_from(range(4)))) for _ in range(3)]
    views = [Listing((generation.claim,), tuple(manifests[i] for i in sorted(subset)), ()) for subset in seen]
    found, _ = all_equal(on_ranks(lambda world: begin(Stale(run_dir, views[world.rank]), world), 3))
    newest = max(set().union(*seen), default=None)
    assert found.manifest == (None if newest is None else manifests[newest])


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_nodes_without_a_shared_disk_get_what_one_of_them_has(tmp_path: Path, holder: int) -> None:
    start(tmp_path / str(holder)).save(10)
    found, claim = all_equal(
        on_ranks(lambda world: begin(SnapshotStore(tmp_path / str(world.rank)), world), 3, nodes=True)
    )
    assert found.manifest is not None and found.content["step"] == 10
    for rank in range(3):  # or the old snapshots of a node would still look like the newest line
        assert claim in SnapshotStore(tmp_path / str(rank)).listing().claims
        assert names(tmp_path / str(rank)) == [found.manifest.name] * (rank == holder)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_copy_that_is_bad_on_one_nodes_disk_is_read_on_anothers(tmp_path: Path, suffix: str, broken: int) -> None:
    start(tmp_path / "0").save(10)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    flip(tmp_path / str(broken) / "snapshots" / f"gen-0001-step-00000010{suffix}", 60)
    found, _ = all_equal(on_ranks(lambda world: begin(SnapshotStore(tmp_path / str(world.rank)), world), 2, nodes=True))
    assert found.manifest is not None and found.content["step"] == 10
    assert found.skipped == ()  # nothing was passed over


def test_a_node_that_comes_back_with_later_steps_of_an_older_generation_changes_nothing(tmp_path: Path) -> None:
    lost = start(tmp_path / "0", keep=9)
    lost.save(20)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    lost.save(50)  # on its own disk, before it died; the others went on from step 20 without it
    after = start(tmp_path / "1")
    after.save(30)
    found, claim = all_equal(
        on_ranks(lambda world: begin(SnapshotStore(tmp_path / str(world.rank)), world), 2, nodes=True)
    )
    assert found.manifest is not None and found.manifest.name == "gen-0002-step-00000030"
    assert claim.generation == 3


def test_all_ranks_stop_when_no_snapshot_is_good(tmp_path: Path) -> None:
    manifest = start(tmp_path).save(10)
    flip(tmp_path / "snapshots" / f"{manifest.name}.pt", 60)
    views = on_ranks(lambda world: begin(SnapshotStore(tmp_path) if world.rank else Stale(tmp_path, NOTHING), world), 3)
    assert [type(view) for view in views] == [UsageError] * 3
    assert len({str(view) for view in views}) == 1 and manifest.name in str(views[0])


def test_all_ranks_learn_that_another_group_won_the_claim(tmp_path: Path) -> None:
    winner = start(tmp_path)
    views = on_ranks(lambda world: begin(Stale(tmp_path, NOTHING), world), 2)
    assert all(isinstance(view, RuntimeError) and "FileExistsError" in str(view) for view in views)
    assert SnapshotStore(tmp_path).listing().claims == (winner.claim,)


def spawned_rank(rank: int, master: tuple[str, int], run_dir: str) -> None:
    """One of two real processes; the second sees an empty directory, as through a stale cache."""
    with open_world("cpu", rank=rank, world_size=2, master=master) as world:
        store = Stale(Path(run_dir), NOTHING) if rank == 1 else SnapshotStore(run_dir)
        found, claim = begin(store, world)
        result = {"manifest": found.manifest and found.manifest.name, "content": digest(found.content)}
        Path(run_dir, f"rank-{rank}.json").write_text(json.dumps(result | {"token": claim.token}))


def spawn_two(run_dir: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = (("127.0.0.1", store.port), run_dir)
    spawn(spawned_rank, args=ranks, nprocs=2)  # type: ignore[no-untyped-call]  # torch gives it no types


def test_two_processes_agree_although_one_of_them_sees_nothing(
    launch: Callable[..., Completed], tmp_path: Path
) -> None:
    manifest = start(tmp_path).save(10)
    code = f"import test_snapshot_ranks; test_snapshot_ranks.spawn_two({str(tmp_path)!r})"
    env: dict[str, Any] = {"PYTHONPATH": f"{REPO}:{REPO / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = launch([sys.executable, "-c", code], env=env)
    assert done.returncode == 0, done.tail()
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == other and one["manifest"] == manifest.name
    assert one["content"] == digest(find_content(tmp_path))


def find_content(run_dir: Path) -> dict[str, Any]:
    """The content of the one snapshot there, read without the store."""
    (payload,) = (run_dir / "snapshots").glob("*.pt")
    return dict(torch.load(payload, map_location="cpu", weights_only=True))
