"""The ranks agree on one snapshot, the newest good one that any of them holds, and on the next generation."""

import io
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from course_lib.engine.errors import SnapshotError, UsageError
from course_lib.engine.halves import node_range, refuse_halves
from course_lib.engine.snapshots.heartbeat import is_live, this_machine
from course_lib.engine.snapshots.records import BadSnapshot, Claim, Manifest, lineage, parse_name
from course_lib.engine.snapshots.store import Listing, SnapshotStore, open_payload
from course_lib.engine.world import World, shared

T = TypeVar("T")
_SLICE_S, _SILENCE_S, _SILENT = 0.2, 300.0, "the disk has given nothing"
_PIECE = 2**26  # bytes


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
    put together. Raises UsageError on every rank when another live job holds the directory, or when there are
    snapshots and none of them is good.
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
            return Restored(manifest, content, _newest_first(skipped), numbered, tuple(claims.values()))
        skipped[manifest.name] = reason
    # A damaged claim alone is no snapshot that could be lost.
    if any(map(parse_name, skipped)):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in _newest_first(skipped)[:5])
        raise shared(
            UsageError(
                f"none of the snapshots in {store.directory} can be trusted ({reasons}): restore one from a copy, "
                "or start afresh with another --run-dir"
            )
        )
    skipped |= {name: "it has no manifest" for view in views for name in view.orphans}
    return Restored(None, {}, _newest_first(skipped), numbered, tuple(claims.values()))


def _newest_first(skipped: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Snapshots with the reasons why not, and claims after them."""
    return tuple(sorted(skipped.items(), key=lambda bad: parse_name(bad[0]) or (0, 0), reverse=True))


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
    """The snapshot's content on every rank, or why there is none.

    Each rank tries to read it, whatever its listing says. Those that cannot are sent it by the first that can.
    """
    payload, reasons = _by_all(world, lambda came: store.read(manifest, came), _SILENCE_S)
    readers = [rank for rank, reason in enumerate(reasons) if not reason]
    if not readers:
        if silent := [reason for reason in reasons if reason.startswith(_SILENT)]:
            # Not bad, as far as anybody knows: to go on from an older one would throw it away.
            raise shared(SnapshotError(f"snapshot {manifest.name} cannot be read now: {silent[0]}"))
        return None, next(why for why, view in zip(reasons, views, strict=True) if manifest in view.manifests)
    if len(readers) < world.world_size:
        payload = _sent(world, payload, manifest.bytes, readers[0])
    content, reasons = _by_all(world, lambda _: open_payload(payload or b""))
    # Another torch build may refuse what this one opens, and all ranks must go the same way.
    reason = next(filter(None, reasons), "")
    return (None, reason) if reason else (content, "")


def _by_all(
    world: World, work: Callable[[Callable[[], None]], T], silence_s: float = math.inf
) -> tuple[T | None, list[str]]:
    """What `work(came)` gives on this rank, and why it gives nothing on each of them (empty where it gives something).

    It has all the time that it needs, in a thread, while the ranks meet again and again: so none runs into the limit
    of a collective, and one that dies or hangs is still noticed. It calls `came` with each bit of progress; a rank
    on which there was none for `silence_s` seconds does without.
    """
    last = time.monotonic()

    def came() -> None:
        nonlocal last
        last = time.monotonic()

    answer: Future[T] = Future()

    def answer_it() -> None:
        try:
            answer.set_result(work(came))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=answer_it, daemon=True).start()  # a disk that is silent must not hold up the end
    reasons: list[str | None] = [None]
    while None in reasons:
        wait([answer], _SLICE_S)
        reason = None
        if answer.done():
            if (error := answer.exception()) and not isinstance(error, BadSnapshot):
                raise error
            reason = str(error or "")
        elif time.monotonic() - last > silence_s:
            reason = f"{_SILENT} for {silence_s:g} s"
        reasons = world.gather(reason)
    return (None if reason else answer.result()), [reason or "" for reason in reasons]


def _sent(world: World, payload: bytes | None, size: int, source: int) -> bytes:
    """The payload, to those who have none, by rank `source`: in pieces, so that no message takes long."""
    content = io.BytesIO()
    for low in range(0, size, _PIECE):
        piece = world.broadcast((payload or b"")[low : low + _PIECE], source)
        if payload is None:
            content.write(piece)
    return content.getvalue() if payload is None else payload
