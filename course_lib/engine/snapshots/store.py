"""The directory of snapshots: what is there, what of it can be trusted, and one more."""

import hashlib
import io
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import files
from course_lib.engine.snapshots.draft import Draft, write_draft
from course_lib.engine.snapshots.heartbeat import this_machine
from course_lib.engine.snapshots.records import (
    BadSnapshot,
    Claim,
    Manifest,
    lineage,
    parse_name,
    seal,
    unseal_claim,
    unseal_manifest,
)

_RECORD_LIMIT = 2**24  # bytes; a manifest has about a thousand


@dataclass(frozen=True)
class Listing:
    """What one rank sees in its directory: claims, readable manifests, and names with the reason they are not."""

    claims: tuple[Claim, ...]
    manifests: tuple[Manifest, ...]
    rejected: tuple[tuple[str, str], ...]
    orphans: tuple[str, ...] = ()  # payloads without a manifest: their writer died in between, or it was removed

    def generations(self) -> list[int]:
        """The numbers that are taken, also by records that can't be read."""
        known = [claim.generation for claim in self.claims] + [m.generation for m in self.manifests]
        return known + [int(name.split("-")[1].split(".")[0]) for name, _ in self.rejected]


class SnapshotStore:
    """Snapshots of one run, in `run_dir`/snapshots.

    A snapshot is a payload (`NAME.pt`) and a manifest (`NAME.json`), published in this order, each at once and
    never over another. It exists when both are there, and is used when they match their digests and each other.
    """

    def __init__(self, run_dir: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"--keep must be at least 1, not {keep}")
        self.directory = Path(run_dir) / "snapshots"
        self.keep = keep
        self._good: dict[str, files.Mark] = {}  # by its digest, the file that this process has read or written

    def listing(self) -> Listing:
        """What is in the directory now; reads manifests and claims, no payloads, and writes nothing."""
        claims: list[Claim] = []
        manifests: list[Manifest] = []
        rejected: list[tuple[str, str]] = []
        for path in sorted(self.directory.glob("gen-*.json")):
            name = path.stem
            if not re.fullmatch(r"gen-\d+(\.claim|-step-\d+)", name):
                continue  # somebody's own file
            try:
                if name.endswith(".claim"):
                    claims.append(unseal_claim(files.read_file(path, _RECORD_LIMIT), name))
                else:
                    manifests.append(unseal_manifest(files.read_file(path, _RECORD_LIMIT), name))
            except (BadSnapshot, OSError) as error:
                rejected.append((name, str(error)))
        known = {m.name for m in manifests} | {name for name, _ in rejected}
        payloads = (path.stem for path in sorted(self.directory.glob("gen-*-step-*.pt")))
        orphans = tuple(name for name in payloads if name not in known and parse_name(name))
        return Listing(tuple(claims), tuple(manifests), tuple(rejected), orphans)

    def read(self, manifest: Manifest, came: Callable[[], object] = lambda: None) -> bytes:
        """The payload, after every byte of it has been checked; calls `came` for each piece; raises BadSnapshot."""
        content = io.BytesIO()
        self._check(manifest, lambda piece: (content.write(piece), came()))
        return content.getvalue()

    def _check(self, manifest: Manifest, take: Callable[[bytes], object]) -> None:
        """Read a payload, piece by piece, and remember that it is good; raises BadSnapshot."""
        path = self._payload(manifest)
        hasher, size = hashlib.sha256(), 0
        try:
            found = files.mark(path.stat())
            for piece in files.read_pieces(path, manifest.bytes):
                hasher.update(piece)
                size += len(piece)
                take(piece)
        except OSError as error:
            raise BadSnapshot(f"{path.name} cannot be read: {error.strerror}") from None
        if size != manifest.bytes:
            raise BadSnapshot(f"{path.name} has {size} bytes instead of {manifest.bytes}")
        if hasher.hexdigest() != manifest.sha256:
            raise BadSnapshot(f"{path.name} does not match its digest")
        self._good[manifest.sha256] = found

    def _payload(self, manifest: Manifest) -> Path:
        return self.directory / f"{manifest.name}.pt"

    def claim(self, generation: int, parent: str | None) -> Claim:
        """Claim `generation`; raises FileExistsError when somebody has it, UsageError when nothing can be written."""
        claim = Claim(generation, secrets.token_hex(16), parent, _run_id(), this_machine(), os.getpid())
        try:
            self.record(claim)
        except OSError as error:
            if isinstance(error, FileExistsError) and self.directory.is_dir():
                raise
            raise UsageError(
                f"cannot write to the run directory {self.directory.parent} ({error.strerror}): "
                "free it, or give another --run-dir"
            ) from None
        with suppress(OSError):
            # The generation is claimed, whatever becomes of what others have left: they can publish nothing of use now.
            for path in left_over(self.directory, generation - 1):
                files.withdraw(path)
        return claim

    def record(self, claim: Claim) -> bool:
        """Write a claim into this node's directory; whether it was there already, as on a shared disk."""
        path = self.directory / f"{claim.name}.claim.json"
        if path.exists() and path.read_bytes() == seal(claim):
            return True
        files.make_directory(self.directory)
        try:
            files.publish(path, seal(claim))
        except FileExistsError:
            # A network file system may remember for a while that a file was not there.
            if path.read_bytes() != seal(claim):
                raise
            return True
        return False

    def draft(self, claim: Claim, content: Mapping[str, Any], **facts: Any) -> AbstractContextManager[Draft]:
        """`content` on the disk, ready to be published; takes what `write_draft` takes."""
        with suppress(OSError):
            self._retire(claim.generation)  # one that died before it could has left more than there may be room for
        return write_draft(self.directory, claim, content, **facts)

    def publish(self, draft: Draft) -> None:
        """Give a draft its name and its manifest, and retire old snapshots; OSErrors pass through."""
        files.give_name(draft.temporary, draft.path)
        self._good[draft.manifest.sha256] = draft.mark
        try:
            files.publish(draft.path.with_suffix(".json"), seal(draft.manifest))
        except OSError:
            files.withdraw(draft.path)  # or it would be in the way of another try
            raise
        with suppress(OSError):
            self._retire(draft.manifest.generation)  # the snapshot is published, whatever becomes of the old ones

    def save(self, claim: Claim, content: Mapping[str, Any], **facts: Any) -> Manifest:
        """A draft, published at once."""
        with self.draft(claim, content, **facts) as draft:
            self.publish(draft)
        return draft.manifest

    def _retire(self, generation: int) -> None:
        """Remove what is older than the newest `keep` verified snapshots of the line.

        Only the newest generation removes anything: an older one that wakes up sees the newer claim and keeps its
        hands off. The list is made before that look, so whatever it removes is older than what anybody has grown
        from: a newer generation starts from the newest good snapshot, and `keep` of those stay.
        """
        seen = self.listing()
        line = lineage(seen.claims, seen.manifests)
        # A manifest that could not be read just now may be readable the next time.
        kept, good = {name for name, _ in seen.rejected}, 0
        for manifest in line:
            if good < self.keep:
                kept.add(manifest.name)
                good += self._is_good(manifest)
        if good == 0 or max(self.listing().generations(), default=0) > generation:
            return
        for path in sorted(self.directory.glob("gen-*-step-*")):
            place = parse_name(path.stem)
            # An older generation's payload whose manifest never came is left over from its death.
            mine = place is not None and place[0] <= generation and path.suffix in (".pt", ".json")
            if mine and path.stem not in kept:
                files.withdraw(path)

    def _is_good(self, manifest: Manifest) -> bool:
        """Whether a snapshot is sound. A process reads each once, and not at all what it has written itself.

        To read that back so soon would find the memory's copy, not the disk's, which has reported no error.
        """
        with suppress(OSError, BadSnapshot):
            if self._good.get(manifest.sha256) != files.mark(self._payload(manifest).stat()):
                self._check(manifest, len)
            return True
        return False


def left_over(directory: Path, generation: int) -> list[Path]:
    """What generations up to this one have left half done: temporary files, and the counters of who died."""
    numbered = (
        (re.fullmatch(r"\.gen-(\d+)\D.*\.tmp|gen-(\d+)\.beat", path.name), path) for path in directory.iterdir()
    )
    return [path for match, path in numbered if match and int(match[1] or match[2]) <= generation]


def open_payload(content: bytes) -> dict[str, Any]:
    """The state in a payload's bytes, on the CPU, by the loader that runs no code; BadSnapshot when it refuses."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            if sum(part.file_size for part in parts.infolist()) > len(content):
                raise BadSnapshot("its payload is compressed, which torch.save never does: it may fill the memory")
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except (MemoryError, BadSnapshot):
        raise  # the first says nothing about the snapshot
    except Exception as error:  # the loader raises whatever the bytes lead it to
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        why = f"{forbidden[1]} in it is not plain data" if forbidden else type(error).__name__
        raise BadSnapshot(f"its payload cannot be opened safely: {why}") from None


def _run_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "none")
