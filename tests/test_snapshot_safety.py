"""Payloads that match their digests and are still not to be opened: nothing in them runs, and they are passed over."""

import os
import pickle
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_tools import ALONE, Generation, find, forge, found_name, on_ranks, start

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import BadSnapshot, SnapshotStore, claim_generation, find_snapshot, open_payload

OLD, NEW = "gen-0001-step-00000010", "gen-0001-step-00000020"


class Call:
    """Whoever unpickles this calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def run(tmp_path: Path) -> Generation:
    generation = start(tmp_path / "run")
    generation.save(10)
    generation.save(20)
    return generation


def payloads(marker: Path) -> dict[str, Any]:
    """Contents (or the raw bytes of a payload) that would create `marker`, or break a careless reader."""
    return {
        "a shell command": {"model": Call(os.system, f"touch {marker}")},
        "a process": {"model": {"weight": Call(subprocess.check_call, ["touch", str(marker)])}},
        "an expression": {"model": Call(eval, f"open({str(marker)!r}, 'w')")},
        "a bare pickle": pickle.dumps(Call(os.mkdir, str(marker)), protocol=2),
        "an unsafe key": {Call(os.mkdir, str(marker)): 1},
        "a type of somebody's own": {"model": deque([1])},
        "a tensor": torch.ones(2),
        "a number": pickle.dumps(3, protocol=2),
        "noise": os.urandom(1000),
        "nothing": b"",
    }


@pytest.mark.parametrize("kind", payloads(Path()))
def test_nothing_runs_and_the_older_snapshot_is_used(run: Generation, tmp_path: Path, kind: str) -> None:
    forge(tmp_path / "run", run.store.listing().manifests[1], payloads(tmp_path / "marker")[kind])
    found = find(tmp_path / "run")
    assert found.manifest is not None and found.manifest.name == OLD
    ((name, reason),) = found.skipped
    assert name == NEW and reason.startswith("its payload cannot be opened safely: ") and "\n" not in reason
    assert not (tmp_path / "marker").exists()


def test_a_forged_payload_alone_stops_the_run_with_one_line(run: Generation, tmp_path: Path) -> None:
    for manifest in run.store.listing().manifests:
        forge(tmp_path / "run", manifest, {"model": Call(os.mkdir, str(tmp_path / "marker"))})
    with pytest.raises(UsageError, match=f"{NEW}: its payload cannot be opened safely: posix.mkdir in it"):
        start(tmp_path / "run")
    assert not (tmp_path / "marker").exists()


def test_all_ranks_pass_over_what_one_of_them_cannot_open(
    run: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another torch build may refuse what this one opens: then nobody uses it, and nobody waits for anybody."""

    def older_build(content: bytes) -> dict[str, Any]:
        state = open_payload(content)
        opened.append(state["step"])
        if state["step"] == 20 and len(opened) == 2:  # the second rank to come here
            raise BadSnapshot("its payload is not known here")
        return state

    opened: list[int] = []
    monkeypatch.setattr("course_lib.engine.snapshots.agreement.open_payload", older_build)
    views = on_ranks(lambda world: find_snapshot(SnapshotStore(tmp_path / "run"), world), 3)
    for view in views:
        assert not isinstance(view, Exception), view
        assert view.manifest is not None and (view.manifest.name, view.content["step"]) == (OLD, 10)
        assert view.skipped == ((NEW, "its payload is not known here"),)


def test_a_lack_of_memory_says_nothing_about_the_snapshot(
    run: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(MemoryError):
        find(tmp_path / "run")


DAMAGED = [b"", b"{", b"[]", b'{"digest": "0"}']


@pytest.mark.parametrize("content", DAMAGED, ids=repr)
def test_a_damaged_claim_is_reported_and_costs_no_snapshot(run: Generation, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run/snapshots/gen-0001.claim.json").write_bytes(content)
    found = find(tmp_path / "run")
    assert found.manifest is not None and found.manifest.name == NEW
    assert [name for name, _ in found.skipped] == ["gen-0001.claim"]
    after = start(tmp_path / "run")
    assert after.claim.generation == 2 and after.claim.parent == NEW
    # The running generation goes on, and tidies up: its own claim is damaged, but nobody has a newer one.
    run.save(30)
    assert found_name(tmp_path / "run") == NEW


@pytest.mark.parametrize("content", DAMAGED, ids=repr)
def test_the_number_of_a_damaged_claim_is_not_given_again(run: Generation, tmp_path: Path, content: bytes) -> None:
    """The newest claim is unreadable: what it grew from is unknown, and the newest readable line is used."""
    second = start(tmp_path / "run")
    (tmp_path / "run/snapshots/gen-0002.claim.json").write_bytes(content)
    third = start(tmp_path / "run")
    assert (third.claim.generation, third.claim.parent) == (3, NEW)
    second.save(21)
    assert found_name(tmp_path / "run") == NEW
    third.save(22)
    assert found_name(tmp_path / "run") == "gen-0003-step-00000022"


def test_a_snapshot_repeats_what_its_writers_claim_said(run: Generation, tmp_path: Path) -> None:
    second = start(tmp_path / "run")
    second.save(21)
    run.save(30)
    (tmp_path / "run/snapshots/gen-0002.claim.json").write_bytes(b"")
    assert found_name(tmp_path / "run") == "gen-0002-step-00000021"
    (tmp_path / "run/snapshots/gen-0002-step-00000021.pt").unlink()
    assert found_name(tmp_path / "run") == NEW  # and not the late one of the older generation


def test_a_damaged_claim_without_any_snapshot_is_a_fresh_start(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "snapshots/gen-0001.claim.json").write_bytes(b"")
    store = SnapshotStore(tmp_path)
    found = find_snapshot(store, ALONE)
    assert found.manifest is None and [name for name, _ in found.skipped] == ["gen-0001.claim"]
    assert claim_generation(store, ALONE, found).generation == 2


def test_a_generation_whose_own_claim_is_damaged_still_saves_and_retires(tmp_path: Path) -> None:
    generation = start(tmp_path, keep=2)
    (tmp_path / "snapshots/gen-0001.claim.json").write_bytes(b"")
    for step in range(1, 6):
        generation.save(step)
    assert [path.stem for path in sorted((tmp_path / "snapshots").glob("*.pt"))] == [
        "gen-0001-step-00000004",
        "gen-0001-step-00000005",
    ]
