"""What a person wants to know of a run's snapshots: each with its state, and what a resume would do with them."""

import contextlib
import time
from dataclasses import dataclass

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots.records import BadSnapshot, Manifest, lineage, parse_name
from course_lib.engine.snapshots.store import Listing, SnapshotStore, open_payload

NO_MANIFEST = "it has no manifest"


@dataclass(frozen=True)
class Row:
    """A snapshot. `problem` is why a resume would pass over it; None when nothing that was looked at speaks against it.

    `in_line` is whether the newest claim may load it; None, unknown, when its manifest cannot be read. `bytes` and
    `age_s` are those of the payload on the disk.
    """

    snapshot: str
    step: int
    epoch: int | None
    generation: int
    world_size: int | None
    bytes: int | None
    age_s: float | None
    in_line: bool | None
    problem: str | None


@dataclass(frozen=True)
class Survey:
    """All snapshots, newest first; the one that a resume would load; and the claims that cannot be read, with why."""

    snapshots: tuple[Row, ...]
    resume: str | None
    bad_claims: dict[str, str]

    def outlook(self) -> str:
        """What a resume would do, by the rule of `find_snapshot`."""
        if self.resume is not None:
            return f"a resume would load {self.resume}"
        if any(row.in_line is not False for row in self.snapshots):
            return "a resume would stop with an error, since no snapshot that it may load is good"
        return "a resume would start afresh, since no snapshot here is of the newest generation's line"


def list_snapshots(store: SnapshotStore) -> Listing:
    """The store's listing; UsageError when it holds no snapshot, or cannot be had."""
    try:
        next(store.directory.iterdir(), None)  # the listing takes a directory that it may not read for an empty one
    except OSError as error:
        hint = "RUN_DIR is the directory that the job had as --run-dir"
        raise UsageError(f"cannot list {store.directory} ({error.strerror}): {hint}") from None
    seen = store.listing()
    if not (seen.manifests or seen.orphans or any(parse_name(name) for name, _ in seen.rejected)):
        raise UsageError(f"there are no snapshots in {store.directory}")
    return seen


def survey(store: SnapshotStore, read: bool) -> Survey:
    """Look at every snapshot, and `read` all of its bytes or only its size; writes nothing."""
    seen = list_snapshots(store)
    line, look = lineage(seen.claims, seen.manifests), check if read else glance
    rows = [_row(store, m.name, m in line, look(store, m), m) for m in seen.manifests]
    rows += [_row(store, name, None, reason) for name, reason in seen.rejected if parse_name(name)]
    rows += [_row(store, name, False, NO_MANIFEST) for name in seen.orphans]
    # Meanwhile a live job may have retired what looks bad, or completed what had no manifest yet.
    after = store.listing()
    there = {m.name for m in after.manifests} | {name for name, _ in after.rejected}
    rows = [r for r in rows if not r.problem or r.snapshot in (after.orphans if r.problem == NO_MANIFEST else there)]
    rows.sort(key=lambda row: (row.generation, row.step), reverse=True)
    resume = next((row.snapshot for row in rows if row.in_line and not row.problem), None)
    return Survey(tuple(rows), resume, {name: why for name, why in seen.rejected if not parse_name(name)})


def check(store: SnapshotStore, manifest: Manifest) -> str | None:
    """What is wrong with a payload, after every byte was read and the state in it opened; None when it is good."""
    try:
        open_payload(store.read(manifest))
    except BadSnapshot as error:
        return str(error)
    return None


def glance(store: SnapshotStore, manifest: Manifest) -> str | None:
    """What is wrong with a payload, as far as it shows without reading."""
    path = store.directory / f"{manifest.name}.pt"
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if size == manifest.bytes else f"{path.name} has {size} bytes instead of {manifest.bytes}"


def _row(
    store: SnapshotStore, name: str, in_line: bool | None, problem: str | None, manifest: Manifest | None = None
) -> Row:
    size = age = None
    with contextlib.suppress(OSError):  # gone or out of reach, which `problem` says
        stat = (store.directory / f"{name}.pt").stat()
        size, age = stat.st_size, max(0.0, time.time() - stat.st_mtime)
    generation, step = parse_name(name) or (0, 0)
    epoch, world_size = (manifest.epoch, manifest.world_size) if manifest else (None, None)
    return Row(name, step, epoch, generation, world_size, size, age, in_line, problem)
