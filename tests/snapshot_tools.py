"""What the tests of snapshots share: generations, damage, and ranks that are threads of one process."""

import errno
import io
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from course_lib.engine.snapshots import Claim, Draft, Manifest, Restored, SnapshotStore, claim_generation, find_snapshot
from course_lib.engine.snapshots.records import seal
from course_lib.engine.world import World

T = TypeVar("T")
ALONE = World(0, 0, 1, torch.device("cpu"))


@dataclass
class Generation:
    """One incarnation of a run: its store, its claim, and what it found at its start."""

    store: SnapshotStore
    claim: Claim
    found: Restored

    def draft(self, step: int, **content: Any) -> Draft:
        """A snapshot that names its step and generation, not yet published."""
        own = {"step": step, "generation": self.claim.generation, "weight": torch.full((4,), float(step))}
        return self.store.draft(self.claim, own | content, step=step, epoch=0, world_size=1, config={"seed": 1})

    def save(self, step: int, **content: Any) -> Manifest:
        """The same, published."""
        with self.draft(step, **content) as draft:
            self.store.publish(draft)
        return draft.manifest


def start(run_dir: Path, keep: int = 3) -> Generation:
    """What a process does first: find the snapshot to go on from, and claim the next generation."""
    store = SnapshotStore(run_dir, keep)
    found = find_snapshot(store, ALONE)
    return Generation(store, claim_generation(store, ALONE, found), found)


def find(run_dir: Path) -> Restored:
    """What a process that starts now would find; writes nothing."""
    return find_snapshot(SnapshotStore(run_dir), ALONE)


def found_name(run_dir: Path) -> str | None:
    """The name of the snapshot that a process starting now would load; None when it would start afresh."""
    manifest = find(run_dir).manifest
    return manifest.name if manifest else None


def names(run_dir: Path, suffix: str = ".pt") -> list[str]:
    """The names of the payloads (or what `suffix` says) in the directory, without the suffix."""
    return sorted(path.name[: -len(suffix)] for path in (run_dir / "snapshots").iterdir() if path.name.endswith(suffix))


def everything(run_dir: Path) -> dict[str, bytes]:
    """Each file below the directory, with its bytes."""
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def flip(path: Path, position: int, mask: int = 1) -> None:
    """Change a byte of a file in its place, as a bad disk does."""
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


def unreadable(patch: pytest.MonkeyPatch, name: str, code: int = errno.ESTALE) -> None:
    """The file `name` cannot be opened, wherever it is."""
    real = Path.open

    def opened(path: Path, *args: Any, **how: Any) -> Any:
        if path.name == name:
            raise OSError(code, os.strerror(code))
        return real(path, *args, **how)

    patch.setattr(Path, "open", opened)


def forge(run_dir: Path, manifest: Manifest, content: Any) -> None:
    """Put another content, or raw payload, into a snapshot with all digests right, as a malicious writer would."""
    buffer = io.BytesIO()
    if not isinstance(content, bytes):
        torch.save(content, buffer)
        content = buffer.getvalue()
    forged = replace(manifest, sha256=sha256(content).hexdigest(), bytes=len(content))
    (run_dir / "snapshots" / f"{manifest.name}.pt").write_bytes(content)
    (run_dir / "snapshots" / f"{manifest.name}.json").write_bytes(seal(forged))


class Meeting:
    """Where the threads of a world exchange values, pickled as between processes."""

    def __init__(self, size: int) -> None:
        self._boxes = [b""] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: T) -> list[T]:
        self._boxes[rank] = pickle.dumps(value)
        self._barrier.wait(30)
        values = [pickle.loads(box) for box in self._boxes]
        self._barrier.wait(30)
        return values

    def leave(self) -> None:
        """Let the others fail at once, as a lost peer does."""
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadWorld(World):
    """A World whose ranks are threads."""

    meeting: Meeting | None = None

    def gather(self, value: T) -> list[T]:
        assert self.meeting is not None
        return self.meeting.exchange(self.rank, value)

    def broadcast(self, value: T, source: int = 0) -> T:
        return self.gather(value)[source]


def on_ranks(work: Callable[[World], T], size: int, nodes: bool = False) -> list[T | Exception]:
    """What `work` returned, or raised, on each rank of a world of `size` threads, each its own node if `nodes`."""
    meeting = Meeting(size)

    def one(rank: int) -> T | Exception:
        try:
            return work(ThreadWorld(rank, 0 if nodes else rank, size, torch.device("cpu"), meeting=meeting))
        except Exception as error:
            if not getattr(error, "everywhere", False):
                meeting.leave()
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
