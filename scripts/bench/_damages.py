"""What can become of the files of a run's snapshots: the damages of `mutations.py`, each of a kind."""

import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

Files = Mapping[str, bytes]
BLOCK = 512  # bytes: what a disk loses at once


@dataclass(frozen=True)
class Damage:
    """What becomes of one file: other bytes, or something else in its place, which a text names.

    `bad` are the snapshots that nobody may load any more, `reported` the names under which it must be reported.
    """

    kind: str
    file: str
    change: Callable[[bytes], bytes] | str
    bad: tuple[str, ...]
    reported: tuple[str, ...]

    def apply(self, folder: Path, files: Files) -> None:
        path = folder / self.file
        if isinstance(self.change, str):
            path.unlink()
            IN_ITS_PLACE[self.change](path)
        else:
            path.write_bytes(self.change(files[self.file]))

    def undo(self, folder: Path, files: Files) -> None:
        path = folder / self.file
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(files[self.file])


IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of zeros": lambda path: [path.touch(), os.truncate(path, 2**40)],  # which takes no room on the disk
}

# No record, though JSON (or nearly): a type that nobody expects, or too much of it.
WRONG_JSON = [
    b"[]",
    b"{}",
    b"null",
    b"true",
    b"0",
    b'"text"',
    b"NaN",
    b"-Infinity",
    b"9" * 5000,
    b"\xff" * 40,
    b"{" * 40,
]
WRONG_JSON += [
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"digest":' * 5000 + b"0" + b"}" * 5000,
    b'{"digest": []}',
]
WRONG_TYPES: list[Any] = [[], {}, [[1]], True, 1.0, float("nan"), float("-inf")]


def payload_damages(files: Files, foreign: Files, snapshot: str) -> Iterator[Damage]:
    """Of a snapshot's payload: a flip in every third byte, cuts at and around each block, and so on."""
    file = f"{snapshot}.pt"
    content = files[file]
    named = partial(Damage, file=file, bad=(snapshot,), reported=(snapshot,))
    regions = _regions(content)
    for at in range(0, len(content), 3):
        yield named(f"payload: a bit of its {regions[at]}", change=partial(_flip, at=at))
    blocks = range(0, len(content), BLOCK)
    for size in sorted({at + off for at in blocks for off in (-1, 0, 1)} & set(range(len(content)))):
        yield named("payload: cut", change=partial(_cut, size=size))
    for at in blocks:
        yield named("payload: a block of zeros", change=partial(_blank, low=at, high=at + BLOCK))
    for tail in (b"\0", b"\n", bytes(BLOCK), content):
        yield named("payload: bytes too many", change=partial(_extend, tail=tail))
    for other in files:
        if other.endswith(".pt") and other != file:
            yield named("payload: another snapshot's", change=_to(files[other]))
    yield named("payload: another run's", change=_to(foreign[file]))
    for what in IN_ITS_PLACE:
        yield named(f"payload: {what}", change=what)


def manifest_damages(files: Files, foreign: Files, snapshot: str) -> Iterator[Damage]:
    """Of a snapshot's manifest; most of what is done to a claim, too."""
    file = f"{snapshot}.json"
    said = partial(_damage, "manifest", file, files[file], (snapshot,), (snapshot,))
    yield from _record_damages(said, files[file])
    for other in files:
        if other.endswith(".json") and other != file:
            yield said("another record of the run", _to(files[other]))
    yield said("another run's", _to(foreign[file]))
    body = json.loads(files[file])
    wrong: dict[str, list[Any]] = {"step": [body["step"] + 1, -1, 10**400], "generation": [9, 0, 10**400]}
    wrong |= {"bytes": [0, -1, 10**18, 10**400], "sha256": ["0" * 64, ""], "token": ["0" * 32], "format": [0, 2, 99]}
    for field, values in wrong.items():
        for value in values:
            yield said("sealed, with a wrong value", _to(_sealed(body | {field: value})))


def claim_damages(files: Files, foreign: Files, file: str) -> Iterator[Damage]:
    """Of a claim: the manifests repeat what it says, so it costs no snapshot. Only another run's contradicts them."""
    name = file.removesuffix(".json")
    said = partial(_damage, "claim", file, files[file], (), (name,))
    yield from _record_damages(said, files[file])
    for other in files:
        if other.endswith(".json") and other != file:
            yield said("another record of the run", _to(files[other]))
    body = json.loads(files[file])
    for value in (9, 0, -1, 10**400):
        yield said("sealed, with a wrong value", _to(_sealed(body | {"generation": value})))
    own = tuple(other.removesuffix(".pt") for other in files if other.startswith(name[:8]) and other.endswith(".pt"))
    yield _damage("claim", file, files[file], own, own, "another run's", _to(foreign[file]))


def _record_damages(said: Callable[..., Damage], content: bytes) -> Iterator[Damage]:
    for at in range(len(content)):
        yield said("a bit", partial(_flip, at=at))
        yield said("cut", partial(_cut, size=at))
    for low in range(0, len(content), 64):
        yield said("a block of zeros", partial(_blank, low=low, high=low + 64))
    for tail in (b"\0", b"}", b"{}", content, b"\n", b"  \t\r\n"):
        yield said("bytes too many", partial(_extend, tail=tail))
    for text in WRONG_JSON:
        yield said("another JSON", _to(text))
    body = json.loads(content)
    del body["digest"]
    for field, value in body.items():
        for other in WRONG_TYPES:
            if type(other) is not type(value):
                yield said("sealed, with a wrong type", _to(_sealed(body | {field: other})))
        rest = {key: body[key] for key in body if key != field}
        if field not in ("versions", "machine", "config", "format"):  # those have defaults
            yield said("sealed, a field short", _to(_sealed(rest)))
    yield said("sealed, a field too many", _to(_sealed(body | {"colour": "red"})))
    for what in list(IN_ITS_PLACE)[1:]:  # a record that is gone leaves nothing to report
        yield said(what, what)


def _damage(
    record: str,
    file: str,
    content: bytes,
    bad: tuple[str, ...],
    reported: tuple[str, ...],
    kind: str,
    change: Callable[[bytes], bytes] | str,
) -> Damage:
    """A damage of a record; of no consequence when only its white space is another."""
    if not isinstance(change, str) and _says(change(content)) == _says(content):
        return Damage(f"{record}: other white space", file, change, (), ())
    return Damage(f"{record}: {kind}", file, change, bad, reported)


def _says(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sealed(body: Mapping[str, Any]) -> bytes:
    """A record with the digest that it then has to have, as a careless program would write it."""
    body = {key: value for key, value in body.items() if key != "digest"}
    digest = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body | {"digest": digest}).encode()


def _regions(content: bytes) -> list[str]:
    """For each byte of a payload, the part of the zip file that it is in."""
    regions = ["zip headers"] * len(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        ends = [info.header_offset for info in archive.infolist()[1:]] + [archive.start_dir]
        for info, end in zip(archive.infolist(), ends, strict=True):
            start = content.index(archive.read(info), info.header_offset + 30 + len(info.filename), end)
            inside = "pickle" if info.filename.endswith(".pkl") else "tensors" if "/data/" in info.filename else "notes"
            regions[start : start + info.file_size] = [inside] * info.file_size
        regions[archive.start_dir :] = ["central directory"] * (len(content) - archive.start_dir)
    return regions


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << at * 5 % 8]) + content[at + 1 :]


def _cut(content: bytes, size: int) -> bytes:
    return content[:size]


def _blank(content: bytes, low: int, high: int) -> bytes:
    return content[:low] + bytes(len(content[low:high])) + content[high:]


def _extend(content: bytes, tail: bytes) -> bytes:
    return content + tail


def _to(other: bytes) -> Callable[[bytes], bytes]:
    return lambda content: other
