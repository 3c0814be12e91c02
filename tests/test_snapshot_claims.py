"""Saves that are killed at a byte, and what the claims of notebook 05 rest on."""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import test_claims
import torch
from helpers import launch

from course_lib.engine import SnapshotStore, UsageError
from course_lib.engine.tree import digest
from course_lib.lab import snapshot_claims, torn
from course_lib.lab.claims import BrokenRecord
from course_lib.lab.fallback import flip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a notebook: threads that wait for each other take many times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- killed saves -------------------------------------------------------------------------------------------------


def test_saves_are_killed_at_the_byte_and_the_claims_rest_on_what_is_left(tmp_path: Path) -> None:
    done = launch([sys.executable, "-m", "course_lib.lab.torn", "--folder", tmp_path, "0", "-1"], timeout=120)
    assert done.returncode == 0, done.output
    found = snapshot_claims.deaths(tmp_path)
    assert [(death.way, death.signal, death.step) for death in found] == [
        ("in place", 9, None),
        ("beside", 9, 1),
        ("in place", 9, None),
        ("beside", 9, 1),
    ]
    whole = found[1].left["snapshot.pt"]
    assert [death.byte for death in found] == [0, 0, whole - 1, whole - 1] and whole > 12 * torn.PARAMETERS
    assert found[2].left == {"snapshot.pt": whole - 1}
    assert found[3].left == {"snapshot.new": whole - 1, "snapshot.pt": whole}

    changes = {
        "a death left out": found[1:],
        "a byte moved": [*found[:2], replace(found[2], byte=40000000), found[3]],
        "another signal": [replace(found[0], signal=0), *found[1:]],
        "a step": [replace(found[0], step=1), *found[1:]],
        "nothing": [],
    }
    for what, changed in changes.items():
        (tmp_path / "deaths.json").write_text(json.dumps([asdict(death) for death in changed]))
        with pytest.raises(BrokenRecord):
            print(what, snapshot_claims.deaths(tmp_path))
    (tmp_path / "deaths.json").write_text(json.dumps([asdict(death) for death in found]))
    (tmp_path / "snapshot.new").write_bytes(b"")
    with pytest.raises(BrokenRecord, match="other files than the last death left"):
        snapshot_claims.deaths(tmp_path)


def test_a_byte_that_no_save_comes_to_is_refused_in_one_line(tmp_path: Path) -> None:
    done = launch([sys.executable, "-m", "course_lib.lab.torn", "--folder", tmp_path / "x", "80000005"], timeout=60)
    assert done.returncode == 2 and not (tmp_path / "x").exists()
    assert done.output.startswith("error: killed at byte '80000005': give a number from 0 to 80,000,004")
    assert done.output.count("\n") == 1
    for text in ("many", "--1", "1.5", "", "-80000005"):
        with pytest.raises(UsageError, match="give a number"):
            torn._byte(text)
    assert torn.parse(["--folder", "x", "0", "-1", "5"]).bytes == [0, -1, 5]


def test_no_piece_of_a_snapshot_opens() -> None:
    """However many bytes are missing, the list of what is in the file, at its end, is missing, too."""
    torch.save({"weight": torch.rand(100), "step": 7}, file := io.BytesIO())
    content = file.getvalue()
    opened = []
    for size in range(len(content) + 1):
        try:
            torch.load(io.BytesIO(content[:size]), map_location="cpu", weights_only=True)
            opened.append(size)
        except Exception:  # whatever the loader makes of it
            continue
    assert opened == [len(content)]


# --- claims about a run's snapshots -------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of six steps with snapshots after 2, 4 and 6 of them."""
    store = SnapshotStore(tmp_path / "run")
    claim = store.claim(1, None)
    lines = [line | {"generation": 1} for line in test_claims.calm_run()["h-1"]]
    for step in (2, 4, 6):
        made = store.save(claim, {"weight": torch.ones(4) * step}, step=step, epoch=0, world_size=1, config={})
        told = {"t": 1.0, "event": "snapshot_saved", "rank": 0, "world_size": 1, "generation": 1}
        lines.append(told | {"step": step, "bytes": made.bytes})
    return test_claims.write(tmp_path / "run", {"h-1": lines})


def test_where_a_resume_begins_when_snapshots_are_damaged(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert snapshot_claims.snapshots(run) == [2, 4, 6]
    assert snapshot_claims.resume_points(run) == {0: 6, 1: 4, 2: 2, 3: None}
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert digest(snapshot_claims.restore(run).content) == digest({"weight": torch.ones(4) * 6})


def test_a_record_that_contradicts_the_snapshots_is_no_claim(run: Path) -> None:
    events = run / "events" / "h-1.jsonl"
    sound = events.read_text()

    def broken(match: str) -> None:
        with pytest.raises(BrokenRecord, match=match):
            snapshot_claims.resume_points(run)
        events.write_text(sound)

    lines = sound.splitlines(keepends=True)
    events.write_text("".join(line for line in lines if '"step": 3' not in line or '"loss"' not in line))
    broken("step 3 is missing")
    events.write_text(sound.replace("[4, 8]", "[5, 9]", 1))
    broken("did not use each sample once")
    events.write_text(sound.replace('"step": 4, "bytes": ', '"step": 4, "bytes": 1'))
    broken("no event tells that gen-0001-step-00000004")
    (run / "snapshots" / "gen-0001-step-00000006.json").rename(run / "aside")
    broken("the newest snapshot that an event tells of, after step 6, isn't there")
    (run / "aside").rename(run / "snapshots" / "gen-0001-step-00000006.json")
    payload = run / "snapshots" / "gen-0001-step-00000004.pt"
    flip(payload, 100)
    broken("does not match its digest")
    for path in run.glob("snapshots/*.pt"):
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="none of the snapshots"):
        snapshot_claims.restore(run)
