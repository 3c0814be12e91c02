"""Crashes of every kind: what was published is found, whole, and disk use stays bounded.

The long campaign is scripts/bench/crash_campaign.py.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers import REPO

from course_lib.engine.snapshots import Draft, SnapshotStore
from course_lib.engine.snapshots import files as store_files
from course_lib.engine.snapshots.files import publish, withdraw
from course_lib.engine.snapshots.records import seal
from course_lib.lab.crash_trials import Found, Tally, Trial, machine_dies
from course_lib.lab.crash_ways import WAYS, WrongBits, state, step_of

SCRIPT = REPO / "scripts" / "bench" / "crash_campaign.py"
Launch = Callable[..., helpers.Completed]


def trial(way: str = "store", **changes: Any) -> Trial:
    return Trial(WAYS[way], **({"numbers": 600} | changes))


# --- the machine dies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"links": False}, {"keep": 2, "numbers": 200, "saves": 4}])
def test_nothing_is_lost_whatever_the_disk_holds_when_the_machine_died(tmp_path: Path, changes: dict[str, Any]) -> None:
    tally = machine_dies(trial(**changes), tmp_path)
    assert tally.failures == []
    assert tally.counts["moments"] > 45 and tally.counts["different states"] > 100
    assert tally.counts["gone on from"] >= 40


@pytest.mark.parametrize("before", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_nor_after_a_process_had_been_killed_and_another_one_had_begun(tmp_path: Path, before: int) -> None:
    tally = machine_dies(trial(saves=2, numbers=200), tmp_path, before)
    assert tally.failures == [] and tally.counts["moments"] > 100


@pytest.mark.parametrize("way", [way for way in WAYS if way != "store"])
def test_the_same_crashes_find_what_other_ways_lose(tmp_path: Path, way: str) -> None:
    failures = machine_dies(trial(way, saves=2), tmp_path, enough=1).failures
    # The last of these ways is right, as long as one snapshot is enough and no byte of it goes bad.
    assert (failures == []) == (way == "and fsync the folder")


def without_a_sync_of_the_bytes(patch: pytest.MonkeyPatch) -> None:
    def write(path: Path, content: Callable[[Any], object]) -> None:
        with path.open("xb") as file:
            content(file)

    patch.setattr(store_files, "write_durably", write)
    patch.setattr("course_lib.engine.snapshots.draft.write_durably", write)


def without_a_sync_of_the_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_files, "sync_directory", lambda path: None)


def without_a_sync_of_the_folders_above(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_files, "make_directory", lambda path: path.mkdir(parents=True, exist_ok=True))


def with_the_manifest_first(patch: pytest.MonkeyPatch) -> None:
    def backwards(self: SnapshotStore, draft: Draft) -> None:
        publish(draft.path.with_suffix(".json"), seal(draft.manifest))
        store_files.give_name(draft.temporary, draft.path)
        self._retire(draft.manifest.generation)

    patch.setattr(SnapshotStore, "publish", backwards)


def with_room_made_before_the_names_are_safe(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: SnapshotStore, draft: Draft) -> None:
        record = draft.path.with_suffix(".tmp")
        store_files.write_durably(record, lambda file: file.write(seal(draft.manifest)))
        os.link(draft.temporary, draft.path)
        os.link(record, draft.path.with_suffix(".json"))
        self._retire(draft.manifest.generation)
        store_files.sync_directory(self.directory)
        withdraw(record)

    patch.setattr(SnapshotStore, "publish", hasty)


def with_the_old_one_removed_first(patch: pytest.MonkeyPatch) -> None:
    whole = SnapshotStore.publish

    def greedy(self: SnapshotStore, draft: Draft) -> None:
        for old in sorted(self.directory.glob("gen-*-step-*")):
            withdraw(old)
        whole(self, draft)

    patch.setattr(SnapshotStore, "publish", greedy)


@pytest.mark.parametrize(
    "spoil",
    [
        without_a_sync_of_the_bytes,
        without_a_sync_of_the_names,
        without_a_sync_of_the_folders_above,
        with_the_manifest_first,
        with_room_made_before_the_names_are_safe,
        with_the_old_one_removed_first,
    ],
)
def test_each_step_of_a_publish_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    spoil(monkeypatch)
    assert machine_dies(trial(numbers=100, saves=2), tmp_path, enough=1).failures


# --- the verdicts -------------------------------------------------------------------------------------------------


def test_other_bits_are_noticed() -> None:
    content = state(7, 100)
    assert step_of(content, 100) == 7
    content["weights"]["1"][99] += 1
    with pytest.raises(WrongBits):
        step_of(content, 100)
    with pytest.raises(WrongBits):
        step_of(state(7, 99), 100)


@pytest.mark.parametrize(
    ("found", "published", "right"),
    [
        (Found(0, 0), 0, True),
        (Found(5, 2), 5, True),
        (Found(6, 2), 5, True),
        (Found(4, 2), 5, False),
        (Found(7, 2), 5, False),
        (Found(5, 1), 5, False),
        (Found(1, 1), 1, True),
        (Found(0, 0), 1, False),
    ],
)
def test_what_may_be_found(found: Found, published: int, right: bool) -> None:
    assert (trial(keep=2).wrong(found, published) is None) == right


def test_tallies_add_up() -> None:
    one, other = Tally(), Tally()
    one.note("here", None)
    other.note("there", "all gone")
    other.count("kills", 3)
    one.add(other)
    assert (one.tried, one.failures, one.counts) == (2, ["there: all gone"], {"kills": 3})


# --- processes die ------------------------------------------------------------------------------------------------


def campaign(launch: Launch, tmp_path: Path, *options: str | int, timeout: float = 200) -> dict[str, Any]:
    """The rows of a campaign that has to pass."""
    path = tmp_path / "campaign.json"
    environment = helpers.torchrun_env({"TMPDIR": str(tmp_path)})
    done = launch([sys.executable, SCRIPT, *map(str, options), "--json", path], timeout=timeout, env=environment)
    assert done.returncode == 0, done.tail()
    assert list(tmp_path.glob("crash-campaign-*")) == []
    result = json.loads(path.read_text())
    assert result["passed"]
    return dict(result["rows"])


def test_processes_that_are_killed_lose_nothing(launch: Launch, tmp_path: Path) -> None:
    rows = campaign(launch, tmp_path, "--only", "places", "random", "--kills", 36, "--every", 7)
    assert {row["failures"] for row in rows.values()} == {0}
    assert (rows["random kills, small"]["tried"], rows["random kills, 20 MB"]["tried"]) == (30, 6)
    assert rows["killed at a place"]["tried"] >= 8 and rows["killed at a place, no hard links"]["tried"] >= 8
    assert rows["killed after one was killed"]["tried"] >= 6


def test_disk_use_stays_bounded_when_all_die_at_the_same_place(launch: Launch, tmp_path: Path) -> None:
    rows = campaign(launch, tmp_path, "--only", "again", "--deaths", 6, "--every", 3)
    assert rows["6 deaths at one place"]["tried"] == 20


def test_system_calls_that_kill_or_fail_lose_nothing(launch: Launch, tmp_path: Path) -> None:
    rows = campaign(launch, tmp_path, "--only", "syscalls", "--every", 6)
    if not rows:
        pytest.skip("strace is not installed, or may not look into other processes")
    assert {row["failures"] for row in rows.values()} == {0}
    for name in ("killed at a system call", "EIO", "ENOSPC"):
        assert rows[name]["tried"] >= 12 and set(rows[name]["counts"]) >= {"write", "fsync", "link", "unlink"}
    assert rows["killed at a rename, no hard links"]["counts"]["rename"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_kills_at_more_places(launch: Launch, tmp_path: Path) -> None:
    options = ["--only", "places", "random", "again", "syscalls", "--kills", 300]
    rows = campaign(launch, tmp_path, *options, timeout=1700)
    assert {row["failures"] for row in rows.values()} == {0}


@pytest.mark.slow
def test_what_tutorials_do_loses_snapshots_in_the_same_campaign(launch: Launch, tmp_path: Path) -> None:
    rows = campaign(launch, tmp_path, "--only", "others", "--kills", 400)
    failures = {name: row["failures"] for name, row in rows.items()}
    assert failures["torch.save: killed at a place"] > 3 and failures["torch.save: random kills"] > 3
    assert failures["and rename: killed at a place"] == 0 and failures["and rename: machine dies"] > 100
