"""What deaths leave half done goes in time, and nothing goes that somebody alive still needs."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from snapshot_tools import everything, find, found_name, names, start

from course_lib.engine.snapshots import SnapshotStore
from course_lib.engine.snapshots import files as store_files


class Dead(BaseException):
    """The process is killed; nothing catches it."""


def die(*_: Any) -> Any:
    raise Dead


def test_a_payload_that_was_left_without_its_manifest_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, keep=2).save(1)
    for number in range(6):
        generation = start(tmp_path, keep=2)
        with monkeypatch.context() as patch, suppress(Dead):
            patch.setattr(store_files, "publish", die)
            generation.save(2 + number)
        assert len(names(tmp_path)) == 2 and found_name(tmp_path) == "gen-0001-step-00000001"


def test_what_could_not_be_retired_before_a_death_goes_before_the_next_payload_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 7):
        generation = start(tmp_path, keep=1)
        with generation.draft(step) as draft, monkeypatch.context() as patch, suppress(Dead):
            assert len(names(tmp_path)) <= 1  # there is room for this one before it is written
            patch.setattr(SnapshotStore, "_retire", die)
            generation.store.publish(draft)
        assert len(names(tmp_path)) <= 2 and find(tmp_path).content["step"] == step


def test_a_draft_of_ones_own_generation_survives_a_rival_and_a_second_claim(tmp_path: Path) -> None:
    generation = start(tmp_path)
    with generation.draft(1) as draft:
        with pytest.raises(FileExistsError):
            SnapshotStore(tmp_path).claim(1, None)
        SnapshotStore(tmp_path).record(generation.claim)  # as each node does
        assert draft.temporary.exists()
        generation.store.publish(draft)
    assert found_name(tmp_path) == "gen-0001-step-00000001"


def test_an_older_generation_loses_its_draft_to_a_newer_one_and_harms_nothing(tmp_path: Path) -> None:
    old = start(tmp_path)
    old.save(1)
    with old.draft(2) as draft:
        new = start(tmp_path)
        new.save(2)
        assert not draft.temporary.exists()
        before = everything(tmp_path)
        with pytest.raises(FileNotFoundError):
            old.store.publish(draft)
    assert everything(tmp_path) == before


def test_a_claim_stands_although_the_left_overs_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path).save(1)

    def refuse(*_: Any) -> Any:
        raise OSError(5, os.strerror(5))

    with monkeypatch.context() as patch:
        patch.setattr("course_lib.engine.snapshots.store.left_over", refuse)
        generation = start(tmp_path)
    assert generation.claim.generation == 2
    generation.save(2)
    assert found_name(tmp_path) == "gen-0002-step-00000002"


def test_a_folder_that_vanished_is_made_again_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = start(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    synced: list[Path] = []
    whole = store_files.sync_directory

    def note(path: Path) -> None:
        synced.append(path)
        whole(path)

    monkeypatch.setattr(store_files, "sync_directory", note)
    generation.save(1)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "snapshots"} <= set(synced)
