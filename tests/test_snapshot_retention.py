"""What is removed, and what never is."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from snapshot_tools import Generation, everything, find, flip, found_name, names, start, unreadable

from course_lib.engine.snapshots import SnapshotStore
from course_lib.engine.snapshots.files import give_name, read_pieces


def stems(generation: int, *steps: int) -> list[str]:
    return [f"gen-{generation:04d}-step-{step:08d}" for step in steps]


@pytest.mark.parametrize("keep", [1, 2, 3, 10])
def test_the_newest_ones_are_kept(tmp_path: Path, keep: int) -> None:
    generation = start(tmp_path, keep)
    for step in range(1, 7):
        generation.save(step)
        assert names(tmp_path) == stems(1, *range(max(1, step - keep + 1), step + 1))
    assert names(tmp_path, ".json")[:-1] == names(tmp_path)
    assert names(tmp_path, ".json")[-1] == "gen-0001.claim"


def test_corrupted_ones_do_not_count(tmp_path: Path) -> None:
    generation = start(tmp_path, keep=9)
    for step in range(1, 6):
        generation.save(step)
    for step in (3, 5):
        flip(tmp_path / "snapshots" / f"gen-0001-step-0000000{step}.pt", 50)
    second = start(tmp_path, keep=2)
    assert second.found.manifest is not None and second.found.manifest.step == 4
    second.save(5)
    # Good are generation 2's and step 4; the corrupted step 5 was never of its line, and 3 is older than both.
    assert names(tmp_path) == stems(1, 4) + stems(2, 5)


def test_a_corrupted_one_between_good_ones_takes_no_place(tmp_path: Path) -> None:
    for step in range(1, 4):
        start(tmp_path, keep=9).save(step)  # each by a process of its own
    flip(tmp_path / "snapshots/gen-0002-step-00000002.pt", 50)
    start(tmp_path, keep=3).save(4)
    assert names(tmp_path) == stems(1, 1) + stems(2, 2) + stems(3, 3) + stems(4, 4)


def test_the_last_good_one_stays_when_the_disk_spoils_all_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = start(tmp_path, keep=1)
    generation.save(1)

    def spoil(temporary: Path, path: Path) -> None:
        if path.suffix == ".pt":
            temporary.write_bytes(bytes(temporary.stat().st_size - 1))
        give_name(temporary, path)

    with monkeypatch.context() as patch:
        patch.setattr("course_lib.engine.snapshots.files.give_name", spoil)
        for step in range(2, 5):
            generation.save(step)
            assert found_name(tmp_path) == stems(1, 1)[0]
        # Now nothing that this generation could load is good: then it removes nothing, so that somebody may help.
        flip(tmp_path / "snapshots" / f"{stems(1, 1)[0]}.pt", 50)
        (orphan := tmp_path / "snapshots" / f"{stems(1, 9)[0]}.pt").write_bytes(b"what is left of another one")
        fresh = Generation(SnapshotStore(tmp_path, keep=1), generation.claim, generation.found)  # nothing remembered
        fresh.save(5)
        assert orphan.exists() and names(tmp_path) == stems(1, 1, 2, 3, 4, 5, 9)
    generation.save(6)
    assert names(tmp_path) == stems(1, 6)


def test_each_file_is_read_once_and_never_by_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is just written comes out of the memory, not from the disk; what another process wrote is read."""
    read: list[str] = []

    def pieces(path: Path, most: int) -> Iterator[bytes]:
        read.extend([path.stem] * (path.suffix == ".pt"))
        return read_pieces(path, most)

    monkeypatch.setattr("course_lib.engine.snapshots.files.read_pieces", pieces)
    first = start(tmp_path, keep=9)
    for step in (1, 2, 3):
        first.save(step)
    assert read == []
    second = start(tmp_path, keep=3)
    assert read == stems(1, 3)
    for step in (4, 5, 6):
        second.save(step)
    assert sorted(read) == stems(1, 1, 2, 3)  # the first two when it first looked what may go


def test_what_has_changed_since_it_was_written_is_read_again(tmp_path: Path) -> None:
    generation = start(tmp_path, keep=1)
    generation.save(1)
    generation.save(2)
    path = tmp_path / "snapshots" / f"{stems(1, 2)[0]}.pt"
    whole, times = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-1] + b"?")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert not generation.store._is_good(generation.store.listing().manifests[0])
    path.write_bytes(whole)
    assert generation.store._is_good(manifest := generation.store.listing().manifests[0])
    assert not generation.store._is_good(replace(manifest, sha256="0" * 64))  # somebody's, in its place


def test_an_older_generation_that_wakes_up_removes_nothing_and_changes_nothing(tmp_path: Path) -> None:
    old = start(tmp_path, keep=1)
    old.save(10)
    new = start(tmp_path, keep=3)
    for step in (11, 12):
        new.save(step)
    before = everything(tmp_path)
    for step in (11, 12, 50):
        old.save(step)
        after = everything(tmp_path)
        assert {name: after[name] for name in before} == before
        found = find(tmp_path)
        assert found.manifest is not None and (found.manifest.generation, found.content["generation"]) == (2, 2)
        assert found.manifest.step == 12
    # What it left behind goes with the newer one's next save.
    new.save(13)
    assert names(tmp_path) == stems(2, 11, 12, 13)


def test_a_generation_that_was_superseded_before_the_newer_one_saved_removes_nothing(tmp_path: Path) -> None:
    old = start(tmp_path, keep=1)
    old.save(10)
    new = start(tmp_path, keep=1)
    old.save(20)
    assert set(stems(1, 10, 20)) <= set(names(tmp_path))
    assert found_name(tmp_path) == new.claim.parent == "gen-0001-step-00000010"


def test_a_newer_generation_that_cannot_be_read_is_still_a_newer_generation(tmp_path: Path) -> None:
    old = start(tmp_path, keep=1)
    old.save(10)
    start(tmp_path)
    (tmp_path / "snapshots/gen-0002.claim.json").write_bytes(b"")
    old.save(20)
    assert names(tmp_path) == stems(1, 10, 20)


def test_what_dead_generations_left_half_done_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")  # a restart of one's own job watches no heartbeat
    first = start(tmp_path)
    first.save(1)
    directory = tmp_path / "snapshots"
    (directory / "gen-0001-step-00000002.pt").write_bytes(b"its manifest never came")
    (directory / ".gen-0001-step-00000003.pt.ab12.tmp").write_bytes(b"never published")
    (directory / "gen-0001.beat").write_text("7\n")
    (directory / ".gen-0009-step-00000003.pt.ab12.tmp").write_bytes(b"of somebody who is newer")
    assert found_name(tmp_path) == stems(1, 1)[0]
    second = start(tmp_path)
    assert names(tmp_path, ".tmp") == [".gen-0009-step-00000003.pt.ab12"] and names(tmp_path, ".beat") == []
    second.save(2)
    assert names(tmp_path) == stems(1, 1) + stems(2, 2)


def test_foreign_files_stay_and_so_does_what_a_newer_generation_writes(tmp_path: Path) -> None:
    foreign = ["gen-0001-step-00000001.onnx", "gen-0001-step-00000001.pt.bak", "best.pt", "gen-1.pt", "notes.json"]
    generation = start(tmp_path, keep=1)
    for name in [*foreign, "gen-0002-step-00000001.pt"]:
        (tmp_path / "snapshots" / name).write_text("{}")
    for step in range(1, 4):
        generation.save(step)
    left = {path.name for path in (tmp_path / "snapshots").iterdir()}
    assert left == {*foreign, "gen-0002-step-00000001.pt", "gen-0001.claim.json"} | {
        f"{stems(1, 3)[0]}{suffix}" for suffix in (".pt", ".json")
    }


def test_a_manifest_that_cannot_be_read_just_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = start(tmp_path, keep=1)
    generation.save(1)
    with monkeypatch.context() as patch:
        unreadable(patch, f"{stems(1, 1)[0]}.json")
        generation.save(2)
    assert names(tmp_path) == stems(1, 1, 2)
    generation.save(3)
    assert names(tmp_path) == stems(1, 3)


def test_a_snapshot_is_published_although_the_old_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = start(tmp_path, keep=1)
    generation.save(1)

    def refuse(*_: Any) -> Any:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", refuse)
        assert generation.save(2).step == 2
    assert found_name(tmp_path) == stems(1, 2)[0]


def test_disk_use_is_bounded_over_many_saves_generations_and_deaths(tmp_path: Path) -> None:
    step = 0
    zombies: list[Generation] = []
    sizes: list[int] = []
    for number in range(1, 7):
        generation = start(tmp_path, keep=2)
        (tmp_path / "snapshots" / f".gen-{number:04d}-step-00000999.pt.aa.tmp").write_bytes(b"died in a save")
        for _ in range(8):
            step += 1
            generation.save(step)
            sizes.append(sum(map(len, everything(tmp_path).values())))
        for zombie in zombies:
            zombie.save(step * 1000)
        zombies.append(generation)
    assert len(names(tmp_path)) <= 2 + len(zombies)
    last = start(tmp_path, keep=2)
    last.save(step + 1)
    assert names(tmp_path) == [*stems(6, step), *stems(7, step + 1)]
    assert names(tmp_path, ".tmp") == []
    # Beyond the two snapshots there is a claim of a few hundred bytes for each generation.
    assert sizes[-1] < sizes[2] + 6 * 1000
