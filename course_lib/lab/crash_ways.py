"""Ways of saving a state again and again: ours, and what else is done. Each is tried by the same crashes."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from course_lib.engine.snapshots import (
    BadSnapshot,
    SnapshotStore,
    claim_generation,
    find_snapshot,
)
from course_lib.engine.snapshots.files import sync_directory
from course_lib.engine.snapshots.records import Manifest, lineage
from course_lib.engine.world import World

Save = Callable[[int], object]
ALONE = World(0, 0, 1, torch.device("cpu"))


class WrongBits(Exception):
    """What was loaded is not what was saved."""


@dataclass(frozen=True)
class Found:
    """What a process that starts would load: the snapshot after `step` steps (0: none), one of `good` good ones."""

    step: int
    good: int


@dataclass(frozen=True)
class Way:
    """`start(run_dir, numbers, keep)` is what a process does first: where it goes on from, and how it saves a step.

    `find(run_dir, numbers)` looks what a process that starts would load, raises when it would fail, and writes nothing.
    """

    start: Callable[[Path, int, int], tuple[int, Save]]
    find: Callable[[Path, int], Found]


def state(step: int, numbers: int) -> dict[str, Any]:
    """Two tensors of `numbers` values each; every four bytes in them tell the step and the place."""
    weights = {str(n): torch.arange(step + n, step + n + numbers, dtype=torch.int32) for n in range(2)}
    return {"step": step, "weights": weights}


def step_of(content: dict[str, Any], numbers: int) -> int:
    """The step whose state this is, bit for bit; raises WrongBits for what is no step's."""
    step = int(content["step"])
    expected = state(step, numbers)["weights"]
    if not all(torch.equal(content["weights"][name], tensor) for name, tensor in expected.items()):
        raise WrongBits(f"what is loaded as step {step} is something else")
    return step


def _start_store(run_dir: Path, numbers: int, keep: int) -> tuple[int, Save]:
    store = SnapshotStore(run_dir, keep)
    found = find_snapshot(store, ALONE)
    claim = claim_generation(store, ALONE, found)

    def save(step: int) -> None:
        store.save(claim, state(step, numbers), step=step, epoch=0, world_size=1, config={})

    return found.manifest.step if found.manifest else 0, save


def _find_store(run_dir: Path, numbers: int) -> Found:
    store = SnapshotStore(run_dir)
    found = find_snapshot(store, ALONE)
    if found.manifest is None:
        return Found(0, 0)
    if step_of(found.content, numbers) != found.manifest.step:
        raise WrongBits(f"{found.manifest.name} holds step {found.content['step']}")
    seen = store.listing()
    older = (m for m in lineage(seen.claims, seen.manifests) if m != found.manifest)
    return Found(found.manifest.step, 1 + sum(_is_good(store, manifest) for manifest in older))


def _is_good(store: SnapshotStore, manifest: Manifest) -> bool:
    with contextlib.suppress(BadSnapshot):
        return bool(store.read(manifest))
    return False


NAME = "snapshot.pt"


def _start_file(put: Callable[[dict[str, Any], Path], object], run_dir: Path, numbers: int, _: int) -> tuple[int, Save]:
    run_dir.mkdir(parents=True, exist_ok=True)
    for folder in (run_dir.parent, run_dir.parent.parent):
        sync_directory(folder)  # it is not the folder that these ways are to fail by
    step = _find_file(run_dir, numbers).step
    return step, lambda new: put(state(new, numbers), run_dir / NAME)


def _find_file(run_dir: Path, numbers: int) -> Found:
    if not (run_dir / NAME).exists():
        return Found(0, 0)
    return Found(step_of(torch.load(run_dir / NAME, map_location="cpu", weights_only=True), numbers), 1)


def _in_place(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)


def _renamed(content: dict[str, Any], path: Path, sync: bool = False) -> None:
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(content, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)


def _durable(content: dict[str, Any], path: Path) -> None:
    _renamed(content, path, sync=True)
    sync_directory(path.parent)


_FILES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "torch.save": _in_place,
    "and rename": _renamed,
    "and fsync": partial(_renamed, sync=True),
    "and fsync the folder": _durable,
}
WAYS = {"store": Way(_start_store, _find_store)}
WAYS |= {name: Way(partial(_start_file, put), _find_file) for name, put in _FILES.items()}
