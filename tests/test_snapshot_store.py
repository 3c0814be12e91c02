"""One snapshot: published whole, durable, never over another; and a disk that says no."""

import errno
import io
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_tools import everything, find, found_name, names, start

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import Claim, SnapshotStore
from course_lib.engine.snapshots.files import publish
from course_lib.engine.snapshots.records import seal, unseal_manifest
from course_lib.engine.tree import digest


def test_a_snapshot_is_a_plain_torch_file_and_a_readable_manifest(tmp_path: Path) -> None:
    generation = start(tmp_path)
    content = {"model": {"weight": torch.rand(3, dtype=torch.bfloat16)}, "progress": {"epoch": 2, "loss": 0.1}}
    manifest = generation.store.save(generation.claim, content, step=40, epoch=2, world_size=3, config={"seed": 7})
    assert manifest.name == "gen-0001-step-00000040"
    path = tmp_path / "snapshots" / "gen-0001-step-00000040"
    assert digest(torch.load(path.with_suffix(".pt"), map_location="cpu", weights_only=True)) == digest(content)
    assert unseal_manifest(path.with_suffix(".json").read_bytes(), path.name) == manifest
    assert (manifest.step, manifest.epoch, manifest.world_size, manifest.config) == (40, 2, 3, {"seed": 7})
    found = find(tmp_path)
    assert found.manifest == manifest and digest(found.content) == digest(content)


@pytest.mark.parametrize("prepare", [lambda path: None, lambda path: (path / "snapshots").mkdir(parents=True)])
def test_an_empty_directory_is_a_fresh_start_and_looking_leaves_no_trace(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert found_name(tmp_path / "run") is None
    assert sorted(tmp_path.rglob("*")) == before


def test_numbers_decide_which_is_the_newest_and_neither_text_nor_time(tmp_path: Path) -> None:
    generation = start(tmp_path, keep=20)
    steps = [9, 10, 100, 99_999_999, 100_000_000]  # the last has a digit more than its name is padded to
    for count, step in enumerate(steps):
        generation.save(step)
        for suffix in (".pt", ".json"):
            age = 1e9 - 1000 * count  # the newest looks oldest, as after a copy
            os.utime(tmp_path / "snapshots" / f"gen-0001-step-{step:08d}{suffix}", (age, age))
    foreign = ["gen-0001-step-999999999.pt.bak", ".gen-0001-step-00000200.pt.ab12.tmp", "gen-zzz.json", "notes.json"]
    for name in [*foreign, "latest", "gen-0001-step-00000300.txt"]:
        (tmp_path / "snapshots" / name).write_text("{}")
    assert found_name(tmp_path) == "gen-0001-step-100000000"
    assert find(tmp_path).skipped == ()
    for step in reversed(steps[1:]):
        (tmp_path / "snapshots" / f"gen-0001-step-{step:08d}.json").unlink()
    assert found_name(tmp_path) == "gen-0001-step-00000009"


def test_generation_10_is_newer_than_generation_9(tmp_path: Path) -> None:
    generations = [start(tmp_path) for _ in range(10)]
    generations[8].save(500)
    generations[9].save(7)
    assert found_name(tmp_path) == "gen-0010-step-00000007"


def test_a_jumping_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: random.uniform(0, 4e9))
    generation = start(tmp_path)
    for step in range(1, 7):
        generation.save(step)
        if step % 2 == 0:
            generation = start(tmp_path)
            assert generation.found.content["step"] == step
    assert names(tmp_path) == [f"gen-000{g}-step-0000000{s}" for g, s in ((2, 4), (3, 5), (3, 6))]


def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    fsync, link = os.fsync, os.link

    def watched_fsync(file: int) -> None:
        did.append("directory" if Path(f"/proc/self/fd/{file}").readlink() == tmp_path else "file")
        fsync(file)

    def watched_link(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"content" and not target.exists()
        did.append("name")
        link(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "link", watched_link)
    publish(tmp_path / "a", b"content")
    assert did == ["file", "name", "directory"]


def hard_links_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("links", [lambda _: None, hard_links_are_missing], ids=["link", "rename"])
def test_publishing_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: Callable[[pytest.MonkeyPatch], None]
) -> None:
    links(monkeypatch)
    publish(tmp_path / "a", b"old")
    with pytest.raises(FileExistsError):
        publish(tmp_path / "a", b"new")
    assert everything(tmp_path) == {"a": b"old"}
    generation = start(tmp_path / "run")
    generation.save(1)
    before = everything(tmp_path)
    with pytest.raises(FileExistsError):
        generation.save(1, another="content")
    assert everything(tmp_path) == before
    assert found_name(tmp_path / "run") == "gen-0001-step-00000001"


def test_a_draft_that_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    generation = start(tmp_path / "run")
    before = everything(tmp_path)
    with pytest.raises(KeyboardInterrupt), generation.draft(1):
        raise KeyboardInterrupt
    assert everything(tmp_path) == before


def test_the_temporary_file_is_beside_its_target_whatever_tmpdir_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A directory that isn't there is harsher than one on another file system: any use of it fails.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    generation = start(tmp_path / "run")
    with generation.draft(1) as draft:
        seen = names(tmp_path / "run", ".tmp")
        generation.store.publish(draft)
    assert len(seen) == 1 and seen[0].startswith(".gen-0001-step-00000001.pt.")
    assert names(tmp_path / "run") == ["gen-0001-step-00000001"] and names(tmp_path / "run", ".tmp") == []


class Full(io.FileIO):
    """A file whose disk fills up in the middle of a write."""

    def write(self, data: Any, /) -> int:
        super().write(bytes(data)[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int, code: int) -> None:
    """Let the n-th call (from 1) of a function that writes fail with an errno, and the others through."""
    real, calls = getattr(owner, name), iter(range(1, 100))

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        reads = isinstance(args[0], Path) and args[0].suffix != ".tmp"
        if not reads and next(calls) == nth:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, sometimes)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("owner", "name", "calls"), [(Path, "open", 2), (os, "fsync", 4), (os, "link", 2)], ids=["open", "fsync", "link"]
)
def test_a_disk_that_fails_costs_the_snapshot_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int, code: int
) -> None:
    """Each call in the life of the payload, then of the manifest: file, its name, its directory."""
    generation = start(tmp_path, keep=9)
    generation.save(1)
    for nth in range(1, calls + 1):
        before = everything(tmp_path)
        with monkeypatch.context() as patch:
            failing(patch, owner, name, nth, code)
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                generation.save(nth + 1)
        assert caught.value.errno == code
        assert everything(tmp_path) == before
        assert found_name(tmp_path) == f"gen-0001-step-{nth:08d}"
        generation.save(nth + 1)  # the disk is well again, and nothing is in the way
        assert found_name(tmp_path) == f"gen-0001-step-{nth + 1:08d}"


def test_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = start(tmp_path)
    generation.save(1)
    before, real = everything(tmp_path), Path.open

    def opened(path: Path, mode: str = "r", **how: Any) -> Any:
        return Full(str(path), mode) if path.suffix == ".tmp" else real(path, mode, **how)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "open", opened)
        generation.save(2)
    assert everything(tmp_path) == before


def test_of_many_that_claim_a_generation_one_gets_it(tmp_path: Path) -> None:
    def claim(_: int) -> Claim | None:
        try:
            return SnapshotStore(tmp_path).claim(1, None)
        except FileExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [claim for claim in pool.map(claim, range(8)) if claim]
    assert len(winners) == 1
    assert SnapshotStore(tmp_path).listing().claims == (winners[0],)
    assert everything(tmp_path) == {"snapshots/gen-0001.claim.json": seal(winners[0])}


@pytest.mark.parametrize("blocked", ["run", "run/snapshots"])
def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "run").parent.mkdir(exist_ok=True)
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    (tmp_path / blocked).write_text("a file in the way")
    with pytest.raises(UsageError, match=rf"cannot write to the run directory {tmp_path / 'run'} .*--run-dir"):
        start(tmp_path / "run")


def test_a_read_only_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, Path, "open", 1, errno.EROFS)
    with pytest.raises(UsageError, match=r"Read-only file system.*--run-dir"):
        start(tmp_path)


def test_keeping_no_snapshot_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--keep must be at least 1, not 0"):
        SnapshotStore(tmp_path, keep=0)


def test_a_claim_is_written_once_though_every_node_records_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = start(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse)  # a disk that has become full
    generation.store.record(generation.claim)
    with pytest.raises(OSError):
        generation.store.record(replace(generation.claim, generation=2))


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_payloads_whose_manifests_are_gone_are_named(tmp_path: Path) -> None:
    generation = start(tmp_path)
    generation.save(1)
    (name,) = (Path(file).stem for file in names(tmp_path))
    (tmp_path / "snapshots" / f"{name}.json").unlink()
    assert find(tmp_path).skipped == ((name, "it has no manifest"),)
