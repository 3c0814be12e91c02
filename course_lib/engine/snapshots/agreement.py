"""The ranks agree on one snapshot, the newest good one that any of them holds, and on the next generation."""

import os
from dataclasses import dataclass
from typing import Any

from course_lib.engine.errors import UsageError
from course_lib.engine.halves import node_range, refuse_halves
from course_lib.engine.snapshots.heartbeat import is_live, this_machine
from course_lib.engine.snapshots.records import BadSnapshot, Claim, Manifest, lineage, parse_name
from course_lib.engine.snapshots.store import Listing, SnapshotStore, open_payload
from course_lib.engine.world import World, shared


@dataclass(frozen=True)
class Restored:
    """What the ranks agreed on: the snapshot (None: start afresh), its content, and those that were passed over."""

    manifest: Manifest | None
    content: dict[str, Any]
    skipped: tuple[tuple[str, str], ...]
    newest_generation: int
    claims: tuple[Claim, ...] = ()


def find_snapshot(store: SnapshotStore, world: World) -> Restored:
    """The newest good snapshot of the line that any rank can read, sent to all; writes nothing.

    No rank trusts its own view of a shared directory, which a network file system may serve stale: the views are
    put together, and the lowest rank that sees a snapshot reads it for all. Raises UsageError on every rank when
    another live job holds the directory, or when there are snapshots and none of them is good.
    """
    views = world.gather(store.listing())
    claims = {claim.token: claim for view in views for claim in view.claims}
    manifests = {(m.name, m.token): m for view in views for m in view.manifests}
    newest = max(claims.values(), key=lambda claim: claim.generation, default=None)
    world.agree(lambda: _refuse_live(store, newest) if world.rank == 0 else None)
    skipped = dict(rejected for view in views for rejected in view.rejected)
    # On a shared disk a generation has one owner, so this is a file of another run that was put here.
    owners = {claim.generation: claim.token for claim in claims.values()}
    foreign = (m.name for m in manifests.values() if owners.get(m.generation, m.token) != m.token)
    skipped |= dict.fromkeys(foreign, "it is of another job than its generation's claim")
    numbered = max((number for view in views for number in view.generations()), default=0)
    for manifest in lineage(claims.values(), manifests.values()):
        content, reason = _load_for_all(store, world, views, manifest)
        if content is not None:
            skipped.pop(manifest.name, None)  # bad on one node's disk, good on another's
            return Restored(manifest, content, tuple(skipped.items()), numbered, tuple(claims.values()))
        skipped[manifest.name] = reason
    # A damaged claim alone is no snapshot that could be lost.
    if any(parse_name(name) for name in skipped):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:5])
        raise shared(
            UsageError(
                f"none of the snapshots in {store.directory} can be trusted ({reasons}): restore one from a copy, "
                "or start afresh with another --run-dir"
            )
        )
    skipped |= {name: "it has no manifest" for view in views for name in view.orphans}
    return Restored(None, {}, tuple(skipped.items()), numbered, tuple(claims.values()))


def claim_generation(store: SnapshotStore, world: World, restored: Restored) -> Claim:
    """The next generation, claimed by rank 0 and written down on every node.

    Raises RuntimeError on every rank when another job took it, and UsageError when the nodes share no disk and two
    halves of them could both go on.
    """
    parent = restored.manifest.name if restored.manifest else None
    claim = world.agree(lambda: store.claim(restored.newest_generation + 1, parent) if world.rank == 0 else None)
    claim = world.broadcast(claim)
    assert claim is not None
    # Without a shared disk each node needs the claim, or its old snapshots would still look like the newest line.
    there = world.agree(lambda: world.local_rank != 0 or store.record(claim))
    if not all(world.gather(there)):
        world.agree(lambda: refuse_halves(node_range()))
    return claim


def _refuse_live(store: SnapshotStore, newest: Claim | None) -> None:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if newest is None or (newest.run_id == run_id and run_id != "none"):
        return  # one's own job: a restarted generation supersedes the older one
    if (newest.host, newest.pid) == (this_machine(), os.getpid()):
        return  # this very process, as when a notebook's cell is run again
    if is_live(store.directory, newest):
        raise UsageError(
            f"the run directory {store.directory.parent} is in use by a live job (process {newest.pid} on "
            f"{newest.host.split()[0]}): wait for it, stop it, or give another --run-dir"
        )


def _load_for_all(
    store: SnapshotStore, world: World, views: list[Listing], manifest: Manifest
) -> tuple[dict[str, Any] | None, str]:
    """The snapshot's content on every rank, or why there is none."""
    payload, reason = _read_for_all(store, world, views, manifest)
    if payload is None:
        return None, reason
    content: dict[str, Any] | None = None
    try:
        content = open_payload(payload)
    except BadSnapshot as error:
        reason = str(error)
    # Another torch build may refuse what this one opens, and all ranks must go the same way.
    reason = next(filter(None, world.gather(reason)), "")
    return (None, reason) if reason else (content, "")


def _read_for_all(
    store: SnapshotStore, world: World, views: list[Listing], manifest: Manifest
) -> tuple[bytes | None, str]:
    """The verified payload, read by the first rank that sees the snapshot and can, on every rank; else why not."""
    reason = ""
    for rank, view in enumerate(views):
        if manifest not in view.manifests:
            continue
        answer: tuple[bytes | None, str] = (None, "")
        if world.rank == rank:
            try:
                answer = store.read(manifest), ""
            except BadSnapshot as error:
                answer = None, str(error)
        content, reason = world.broadcast(answer, source=rank)
        if content is not None:
            return content, ""
    return None, reason
