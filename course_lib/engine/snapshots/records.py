"""The small files beside the snapshots: a manifest for each, and a claim for each generation."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

FORMAT = 1
_NAME = re.compile(r"gen-(\d+)-step-(\d+)")
Record = TypeVar("Record", "Claim", "Manifest")


class BadSnapshot(Exception):
    """A snapshot that cannot be trusted; the message says why."""


@dataclass(frozen=True)
class Claim:
    """Generation `generation` of the run belongs to the process group with this token, and grew from `parent`."""

    generation: int
    token: str
    parent: str | None
    run_id: str
    host: str
    pid: int

    @property
    def name(self) -> str:
        return f"gen-{self.generation:04d}"


@dataclass(frozen=True)
class Manifest:
    """What a snapshot file must be: size, digest, where it stands, and which claim wrote it."""

    step: int
    epoch: int
    generation: int
    token: str
    parent: str | None
    sha256: str
    bytes: int
    world_size: int
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def name(self) -> str:
        return f"gen-{self.generation:04d}-step-{self.step:08d}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(generation, step) of a snapshot's name, or None for a foreign one. Numbers, never text, decide the order."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def seal(record: Claim | Manifest) -> bytes:
    """The record as JSON with a digest of its own, since a flipped bit in a manifest is as bad as one in a tensor."""
    body = asdict(record)
    return json.dumps(body | {"digest": _digest(body)}, indent=1, sort_keys=True).encode()


def unseal_manifest(text: bytes, name: str) -> Manifest:
    """The manifest in `text`; raises BadSnapshot when it is damaged, foreign, or of a format not known here."""
    body = _unseal(text)
    if body.get("format") not in range(1, FORMAT + 1):
        raise BadSnapshot(f"format {body.get('format')} is not known to this version, which reads up to {FORMAT}")
    return _record(Manifest, body, name)


def unseal_claim(text: bytes, name: str) -> Claim:
    """The claim in `text`; raises BadSnapshot when it is damaged, or of another generation than its file's name."""
    return _record(Claim, _unseal(text), name.removesuffix(".claim"))


def _unseal(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
        stated, actual = body.pop("digest"), _digest(body)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise BadSnapshot("its manifest is not readable") from None
    if stated != actual:
        raise BadSnapshot("its manifest does not match its own digest")
    return dict(body)


def _record(kind: type[Record], body: dict[str, Any], name: str) -> Record:
    """The record, if each field holds what its annotation says and the file has the record's name."""
    try:
        record = kind(**body)
    except TypeError as error:
        raise BadSnapshot(f"its record has the wrong fields ({error})") from None
    for part in fields(kind):
        allowed = get_args(part.type) if isinstance(part.type, UnionType) else (get_origin(part.type) or part.type,)
        if type(getattr(record, part.name)) not in allowed:
            raise BadSnapshot(f"its {part.name} is of the wrong type")
    if record.name != name:
        raise BadSnapshot(f"its record is that of {record.name}")
    return record


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def lineage(claims: Iterable[Claim], manifests: Iterable[Manifest]) -> list[Manifest]:
    """The snapshots that the newest claim may load, newest first.

    Those are its own, then its parent and what its parent's generation wrote up to there, and so on. What an
    older generation published after a newer one had grown from it is not in the line: it changes nothing.
    """
    newest_first = sorted(manifests, key=lambda m: (m.generation, m.step), reverse=True)
    # A manifest repeats what its claim says, which helps when a claim was damaged or not copied along.
    by_generation = {m.generation: Claim(m.generation, m.token, m.parent, "", "", 0) for m in newest_first}
    by_generation |= {claim.generation: claim for claim in claims}
    line: list[Manifest] = []
    generation, limit = max(by_generation, default=0), float("inf")
    while (claim := by_generation.get(generation)) is not None:
        mine = (m for m in newest_first if m.generation == generation and m.token == claim.token)
        line += [m for m in mine if m.step <= limit]
        parent = parse_name(claim.parent) if claim.parent else None
        # A parent is older by construction; anything else would be a forged record and could loop.
        if parent is None or parent[0] >= generation:
            break
        generation, limit = parent
    return line
