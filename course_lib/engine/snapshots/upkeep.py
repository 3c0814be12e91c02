"""Remove the snapshots that no resume needs, and take the weights out of one."""

import importlib
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots.files import publish, sync_directory, withdraw
from course_lib.engine.snapshots.heartbeat import is_live
from course_lib.engine.snapshots.records import BadSnapshot, Claim, Manifest, lineage, parse_name
from course_lib.engine.snapshots.store import Listing, SnapshotStore, left_over, open_payload
from course_lib.engine.snapshots.survey import check, list_snapshots

SAFETENSORS = "safetensors.torch"  # taken where it is installed; nothing here needs it


def prune(store: SnapshotStore, dry_run: bool) -> list[Path]:
    """Remove what is behind the newest `store.keep` good snapshots of the line or outside of it; returns the paths.

    And what dead generations left half done. A live job cleans up by itself, so beside one nothing is done:
    UsageError, as when no snapshot is good, when it is not known what the line is, or when the disk refuses.
    """
    seen = list_snapshots(store)
    newest = _newest_if_dead(store, seen)
    kept, good = set(), 0
    for manifest in lineage(seen.claims, seen.manifests):
        if good < store.keep:
            kept.add(manifest.name)
            good += check(store, manifest) is None
    if good == 0:
        raise UsageError(f"no snapshot in {store.directory} that a resume could load is good: nothing was removed")
    # What has a manifest that cannot be read just now stays, since it may be readable the next time. So does a payload
    # of a generation that nothing else tells of: it may be somebody's who is just starting.
    orphans = (name for name in seen.orphans if (parse_name(name) or (0,))[0] <= newest)
    unwanted = {*(m.name for m in seen.manifests), *orphans} - kept
    there = sorted(store.directory.iterdir())
    manifests = [path for path in there if path.suffix == ".json" and path.stem in unwanted]
    others = [path for path in there if path.suffix == ".pt" and path.stem in unwanted]
    others += sorted(left_over(store.directory, newest))
    # Listed before this look, so whatever is removed is older than what a job that starts now would grow from.
    if max(store.listing().generations(), default=0) > newest:
        raise UsageError(f"a job has started in {store.directory.parent} meanwhile: nothing was removed")
    if not dry_run:
        # The manifests first, and for good: whenever this is cut off, there is at worst a payload without one.
        _remove(manifests)
        sync_directory(store.directory)
        _remove(others)
    return manifests + others


def _newest_if_dead(store: SnapshotStore, seen: Listing) -> int:
    """The newest generation's number; UsageError when it lives, or when its records cannot be read."""
    newest = max(seen.generations(), default=0)
    unknown = Claim(newest, "", None, "", "", 0)
    claim = next((claim for claim in seen.claims if claim.generation == newest), unknown)
    if is_live(store.directory, claim):
        raise UsageError(f"the run directory {store.directory.parent} is in use by a live job: nothing was removed")
    # A manifest repeats what its claim says. Without either, it is not known from where the newest line grew.
    if claim is unknown and all(manifest.generation != newest for manifest in seen.manifests):
        raise UsageError(
            f"the records of the newest generation in {store.directory} cannot be read, so it is not known which "
            "snapshots a resume needs: nothing was removed. The job's next start settles it"
        )
    return newest


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        withdraw(path)
        if path.exists():
            raise UsageError(f"cannot remove {path}, and what comes after it stays, too")


def export(store: SnapshotStore, out: Path, name: str | None, kind: str | None) -> Manifest:
    """Write a model's weights to `out`, which must not exist yet, and return the manifest of their snapshot.

    It is the newest good one, or the one called `name`, verified in either case. `kind` is torch, for a plain state
    dict, or safetensors; None lets the suffix decide. Raises UsageError.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out} exists already: name another file")
    manifest, content = _newest_good(store, name)
    try:
        weights = dict(content["state"]["model"])
    except (KeyError, TypeError):
        raise UsageError(f"{manifest.name} holds no weights of a model, as a TrainState's would") from None
    kind = kind or ("safetensors" if out.suffix == ".safetensors" else "torch")
    try:
        publish(out, _encoded(weights, kind))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    return manifest


def _newest_good(store: SnapshotStore, name: str | None) -> tuple[Manifest, dict[str, Any]]:
    seen = list_snapshots(store)
    wanted = [m for m in seen.manifests if m.name == name] if name else lineage(seen.claims, seen.manifests)
    skipped = [f"{bad}: {why}" for bad, why in seen.rejected if name in (None, bad)]
    for manifest in wanted:
        try:
            content = open_payload(store.read(manifest))
        except BadSnapshot as error:
            skipped.append(f"{manifest.name}: {error}")
            continue
        for line in skipped:
            print(f"passed over {line}", file=sys.stderr)
        return manifest, content
    what = f"{store.directory} holds no good snapshot {name or 'that a resume could load'}"
    raise UsageError(f"{what} ({'; '.join(skipped[:5]) or 'list shows what there is'})")


def _encoded(weights: dict[str, Any], kind: str) -> bytes:
    if kind == "torch":
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        return buffer.getvalue()
    try:
        library = importlib.import_module(SAFETENSORS)
    except ImportError:
        raise UsageError("safetensors is not installed: install it, or say --format torch") from None
    try:
        # It refuses tensors that share memory, as tied ones do, so each gets its own.
        copies = {key: value.clone(memory_format=torch.contiguous_format) for key, value in weights.items()}
        return bytes(library.save(copies, metadata={"format": "pt"}))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise UsageError(f"safetensors cannot hold these weights ({why}): say --format torch") from None
