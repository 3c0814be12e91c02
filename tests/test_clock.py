"""The clock jumps an hour either way at every look, and file times lie: that changes no decision about snapshots."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from snapshot_tools import Generation, find, flip, names, start
from toys import Toy, crash_at, events

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import Heartbeat, SnapshotStore
from course_lib.engine.snapshots.heartbeat import is_live


class Lying:
    """A clock that is an hour off, now this way and now that, and a disk that stamps its files at random."""

    def __init__(self, seed: int, run_dir: Path) -> None:
        self._draw, self._run_dir, self._true = random.Random(seed), run_dir, time.time
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self._true() + self._draw.choice([-3600, 3600])

    def stamp(self) -> None:
        for path in [self._run_dir, *self._run_dir.rglob("*")]:
            when = self() + self._draw.uniform(-3600, 3600)
            os.utime(path, (when, when))


@contextmanager
def lying(patch: pytest.MonkeyPatch, seed: int, run_dir: Path) -> Iterator[Lying]:
    clock = Lying(seed, run_dir)
    with patch.context() as inside:
        inside.setattr(time, "time", clock)
        inside.setattr(time, "time_ns", lambda: int(clock() * 1e9))
        yield clock


def decisions(run_dir: Path, clock: Lying | None) -> list[object]:
    """What a store decides in the course of a run: what is found, claimed, passed over, kept and removed."""
    decided: list[object] = []

    def note(generation: Generation | None = None) -> None:
        if clock is not None:
            clock.stamp()
        found = find(run_dir)
        decided.append((found.manifest and found.manifest.name, found.skipped, found.newest_generation))
        decided.append([names(run_dir, suffix) for suffix in (".pt", ".json", ".tmp", ".beat")])
        if generation is not None:
            decided.append((generation.claim.generation, generation.claim.parent))

    first = start(run_dir, keep=2)
    for step in (1, 2, 3, 4):
        first.save(step)
        note(first)
    second = start(run_dir, keep=3)
    note(second)
    first.save(9)  # which is not of the line any more
    for step in (5, 6):
        second.save(step)
        note(second)
    flip(run_dir / "snapshots/gen-0002-step-00000006.pt", 50)
    (run_dir / "snapshots/.gen-0002-step-00000007.pt.ab.tmp").write_bytes(b"left by a death")
    (run_dir / "snapshots/gen-0002-step-00000007.pt").write_bytes(b"and its manifest never came")
    note()
    third = start(run_dir, keep=1)
    note(third)
    for step in (6, 7, 8):
        third.save(step)
        note(third)
    return decided


@pytest.mark.parametrize("seed", range(3))
def test_the_store_decides_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    true = decisions(tmp_path / "true", None)
    with lying(monkeypatch, seed, tmp_path / "lying") as clock:
        assert decisions(tmp_path / "lying", clock) == true


def test_a_job_is_live_when_its_counter_moves_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    generation = start(tmp_path)
    generation.save(1)
    directory = generation.store.directory
    monkeypatch.setattr(os, "getpid", lambda: 1)  # the second job is another process
    with lying(monkeypatch, 0, tmp_path) as clock:
        beat = Heartbeat(directory, generation.claim)
        try:
            clock.stamp()
            assert is_live(directory, generation.claim, watch_s=60)
            with pytest.raises(UsageError, match="in use by a live job"):
                start(tmp_path)
        finally:
            beat.stop()
        (directory / "gen-0001.beat").write_text("7\n")  # it was killed, and the file stamped in the future or past
        clock.stamp()
        assert not is_live(directory, generation.claim)
    assert start(tmp_path).claim.generation == 2


@pytest.mark.parametrize("seed", range(2))
def test_a_job_trains_and_resumes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    def snapshots(run_dir: Path) -> list[tuple[str, str | None]]:
        return [(m.name, m.parent) for m in SnapshotStore(run_dir).listing().manifests]

    true = crash_at(tmp_path / "true", [4, 7, 8], Toy)
    with lying(monkeypatch, seed, tmp_path / "lying") as clock:

        def stamped(run_dir: Path) -> Toy:
            if run_dir.exists():
                clock.stamp()
            return Toy(run_dir)

        assert crash_at(tmp_path / "lying", [4, 7, 8], stamped).digests() == true.digests()
    assert snapshots(tmp_path / "lying") == snapshots(tmp_path / "true")
    loaded = [
        sorted((event["generation"], event["snapshot"]) for event in events(run_dir, "snapshot_loaded"))
        for run_dir in (tmp_path / "true", tmp_path / "lying")
    ]
    assert loaded[0] == loaded[1] and len(loaded[0]) == 4
