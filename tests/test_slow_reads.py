"""A snapshot on a slow disk may take longer to read than any collective waits; who dies or hangs is noticed anyhow."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import snapshot_tools
import torch
from ranks import fine, on_ranks
from snapshot_tools import flip, start

from course_lib.engine import SnapshotStore, World
from course_lib.engine.errors import PeerLost
from course_lib.engine.snapshots import Restored, agreement, files, find_snapshot
from course_lib.engine.tree import digest

TIMEOUT_S, PIECES, PAUSE_S = 2.0, 10, 0.5
WEIGHTS = torch.arange(1000)


def slow_disk(pause: Callable[[], object]) -> None:
    """From now on a payload of this process comes in about PIECES pieces, with a `pause` before each."""
    whole = files.read_pieces

    def pieces(path: Path, most: int) -> Iterator[bytes]:
        files._PIECE = 1 + most // PIECES
        for piece in whole(path, most):
            if path.suffix == ".pt":
                pause()
            yield piece

    files.read_pieces = pieces


def find_slowly(world: World, run_dir: Path, slow: list[int]) -> tuple[float, str]:
    if world.rank in slow:
        slow_disk(lambda: time.sleep(PAUSE_S))
    started = time.monotonic()
    found = find_snapshot(SnapshotStore(run_dir), world)
    return time.monotonic() - started, digest(found.content)


@pytest.mark.parametrize("slow", [[0], [1]], ids=str)
def test_reading_may_take_longer_than_a_collective(tmp_path: Path, slow: list[int]) -> None:
    start(tmp_path).save(10, weights=WEIGHTS)
    expected = digest(snapshot_tools.find(tmp_path).content)
    results = fine(on_ranks(2, find_slowly, tmp_path, slow, collective_timeout_s=TIMEOUT_S))
    assert [content for _, content in results] == [expected, expected]
    assert min(seconds for seconds, _ in results) > 2 * TIMEOUT_S


def find_beside(world: World, run_dir: Path, fate: str) -> None:
    """Rank 0 reads for 5 s. Meanwhile rank 1 hangs, or fails alone."""
    if world.rank == 1 and fate == "hangs":
        time.sleep(4 * TIMEOUT_S)

    def fail() -> None:
        raise MemoryError("no room for it on this rank")

    slow_disk(fail if world.rank else lambda: time.sleep(PAUSE_S))
    find_snapshot(SnapshotStore(run_dir), world)


@pytest.mark.parametrize("fate", ["hangs", "fails"])
def test_a_rank_that_goes_while_another_reads_is_noticed(tmp_path: Path, fate: str) -> None:
    start(tmp_path).save(10, weights=WEIGHTS)
    first, other = on_ranks(2, find_beside, tmp_path, fate, collective_timeout_s=TIMEOUT_S)
    assert isinstance(first, PeerLost) and isinstance(other, PeerLost if fate == "hangs" else MemoryError)
    assert ("no answer for 2 s" in str(first)) == (fate == "hangs")


# --- who reads, and who is sent it ---------------------------------------------------------------------------------


class Noting(snapshot_tools.ThreadWorld):
    """A world that notes how much rank 0 sees being sent."""

    sent: list[int] = []

    def broadcast(self, value: Any, source: int = 0) -> Any:
        got = super().broadcast(value, source)
        if self.rank == 0:
            self.sent.append(len(got))
        return got


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(snapshot_tools, "ThreadWorld", Noting)
    monkeypatch.setattr(Noting, "sent", [])
    monkeypatch.setattr(agreement, "_PIECE", 1000)
    return Noting.sent


def contents(views: list[Restored | Exception]) -> list[str]:
    assert not [view for view in views if isinstance(view, Exception)], views
    return [digest(view.content) for view in views if isinstance(view, Restored)]


def test_what_every_rank_can_read_is_sent_to_nobody(tmp_path: Path, sent: list[int]) -> None:
    start(tmp_path).save(10, weights=WEIGHTS)
    views = snapshot_tools.on_ranks(lambda world: find_snapshot(SnapshotStore(tmp_path), world), 3)
    assert len(contents(views)) == 3 and sent == []


@pytest.mark.parametrize("lacking", [[0], [2], [0, 1], [1, 2]], ids=str)
def test_who_cannot_read_it_is_sent_it_in_pieces(tmp_path: Path, sent: list[int], lacking: list[int]) -> None:
    manifest = start(tmp_path / "whole").save(10, weights=WEIGHTS)
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    flip(tmp_path / "damaged" / "snapshots" / f"{manifest.name}.pt", 500)
    places = {0: "damaged", 1: "nothing", 2: "damaged"}

    def find(world: World) -> Restored:
        return find_snapshot(
            SnapshotStore(tmp_path / (places[world.rank] if world.rank in lacking else "whole")), world
        )

    views = snapshot_tools.on_ranks(find, 3, nodes=True)
    assert set(contents(views)) == {digest(snapshot_tools.find(tmp_path / "whole").content)}
    assert sum(sent) == manifest.bytes and max(sent) == 1000


def test_a_disk_that_gives_nothing_any_more_is_given_up(
    tmp_path: Path, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path).save(10, weights=WEIGHTS)
    monkeypatch.setattr(agreement, "_SILENCE_S", 0.5)
    back, whole = threading.Event(), SnapshotStore.read

    def read(store: SnapshotStore, manifest: Any, came: Callable[[], object] = lambda: None) -> bytes:
        if store.keep == 1:
            back.wait(60)
        return whole(store, manifest, came)

    monkeypatch.setattr(SnapshotStore, "read", read)

    def find(world: World, dead: list[int]) -> Restored:
        return find_snapshot(SnapshotStore(tmp_path, keep=1 if world.rank in dead else 3), world)

    try:
        assert len(contents(snapshot_tools.on_ranks(lambda world: find(world, [1]), 2))) == 2 and sent
        nobody = snapshot_tools.on_ranks(lambda world: find(world, [0, 1]), 2)
        assert all("the disk has given nothing for 0.5 s" in str(error) for error in nobody)
    finally:
        back.set()
