"""What the files of notebook 05 prove; like `claims`, each function first checks what it rests on."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from course_lib.engine import SnapshotStore, UsageError, World, read_events
from course_lib.engine.snapshots import Restored, find_snapshot
from course_lib.engine.snapshots.survey import check
from course_lib.lab.claims import BrokenRecord, every_sample_once
from course_lib.lab.fallback import flip
from course_lib.lab.torn import WAYS, Death, read_deaths


def deaths(folder: Path | str) -> list[Death]:
    """The recorded deaths, of which the last left its files; BrokenRecord unless record and files agree."""
    found = read_deaths(folder)
    for death in found:
        unfinished = death.left.get("snapshot.pt" if death.way == "in place" else "snapshot.new")
        if death.signal != 9 or unfinished != death.byte or (death.step is None) != bool(death.error):
            raise BrokenRecord(f"{folder}: the record of the death {death.way} at byte {death.byte} contradicts itself")
    if {(death.way, death.byte) for death in found} != {(way, death.byte) for way in WAYS for death in found}:
        raise BrokenRecord(f"{folder}: a death is missing from the record")
    sizes = {path.name: path.stat().st_size for path in sorted(Path(folder).glob("snapshot.*"))}
    if not found or sizes != found[-1].left:
        raise BrokenRecord(f"{folder} holds other files than the last death left: run the cell that kills again")
    return found


def restore(run: Path | str) -> Restored:
    """What a job that starts in `run`, alone, would restore; raises UsageError when it would refuse to start."""
    return find_snapshot(SnapshotStore(run), World(0, 0, 1, torch.device("cpu")))


def snapshots(run: Path | str) -> list[int]:
    """The steps of the snapshots that a finished run has kept, oldest first; each is sound, and told of by an event."""
    if not every_sample_once(run):
        raise BrokenRecord(f"{run}: by its record, an epoch did not use each sample once")
    store = SnapshotStore(run)
    manifests = sorted(store.listing().manifests, key=lambda manifest: manifest.step)
    told = {(event["step"], event["bytes"]) for event in read_events(run).named("snapshot_saved")}
    for manifest in manifests:
        if (manifest.step, manifest.bytes) not in told:
            raise BrokenRecord(f"{run}: no event tells that {manifest.name} was saved")
        if (problem := check(store, manifest)) is not None:
            raise BrokenRecord(f"{run}: {manifest.name}: {problem}")
    newest = max((step for step, _ in told), default=None)
    if not manifests or manifests[-1].step != newest:
        raise BrokenRecord(f"{run}: the newest snapshot that an event tells of, after step {newest}, isn't there")
    return [manifest.step for manifest in manifests]


def resume_points(run: Path | str) -> dict[int, int | None]:
    """How many of a run's newest snapshots are damaged -> after how many steps a resume begins; None: it refuses.

    Tried with the engine's own search on copies, in whose payloads a bit is flipped.
    """
    steps = snapshots(run)
    points: dict[int, int | None] = {}
    for count in range(len(steps) + 1):
        with TemporaryDirectory() as name:
            shutil.copytree(Path(run) / "snapshots", Path(name) / "snapshots")
            payloads = sorted(Path(name).glob("snapshots/*.pt"))
            for payload in payloads[len(payloads) - count :]:
                flip(payload, payload.stat().st_size // 2)
            try:
                manifest = restore(name).manifest
                points[count] = 0 if manifest is None else manifest.step
            except UsageError:
                points[count] = None
    return points
