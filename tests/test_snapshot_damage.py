"""Damage: every changed byte is noticed, the next older good snapshot is used, and nothing starts over in silence."""

import json
import os
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from snapshot_tools import Generation, everything, find, flip, found_name, start

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import BadSnapshot
from course_lib.engine.snapshots.records import seal, unseal_claim, unseal_manifest

OLD, NEW = "gen-0001-step-00000010", "gen-0001-step-00000020"


@pytest.fixture
def run(tmp_path: Path) -> Generation:
    """A run with two snapshots, OLD and NEW."""
    generation = start(tmp_path)
    generation.save(10)
    generation.save(20)
    return generation


def file(run_dir: Path, name: str, suffix: str = ".pt") -> Path:
    return run_dir / "snapshots" / f"{name}{suffix}"


def test_every_one_of_50_flipped_payload_bytes_is_noticed(run: Generation, tmp_path: Path) -> None:
    payload = file(tmp_path, NEW)
    size = payload.stat().st_size
    for position in random.Random(0).sample(range(size), 48) + [0, size - 1]:
        flip(payload, position, mask := 1 << random.randrange(8))
        found = find(tmp_path)
        assert found.manifest is not None and found.manifest.name == OLD and found.content["step"] == 10
        assert found.skipped == ((NEW, f"{NEW}.pt does not match its digest"),)
        flip(payload, position, mask)
    assert found_name(tmp_path) == NEW


def test_a_flipped_bit_of_a_manifest_or_a_claim_is_noticed_wherever_it_is(run: Generation, tmp_path: Path) -> None:
    manifest, claim = run.store.listing().manifests[1], run.claim
    readers = (lambda text: unseal_manifest(text, NEW)), (lambda text: unseal_claim(text, "gen-0001.claim"))
    for record, read in zip((manifest, claim), readers, strict=True):
        sealed = seal(record)
        for bit in range(8 * len(sealed)):
            changed = bytearray(sealed)
            changed[bit // 8] ^= 1 << bit % 8
            try:
                assert read(bytes(changed)) == record  # white space only: what it says is what it said
            except BadSnapshot:
                continue
            assert bytes(changed).split() == sealed.split()


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as opened:
        opened.truncate(size)


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def restamp(path: Path, **fields: object) -> None:
    """Edit a manifest and give it the digest that it then has to have."""
    body = json.loads(path.read_text()) | fields
    del body["digest"]
    digest = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(body | {"digest": digest}))


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "payload is empty": lambda pt, js: truncate(pt, 0),
    "payload lacks its last byte": lambda pt, js: truncate(pt, pt.stat().st_size - 1),
    "payload ends in a block of zeros": lambda pt, js: pt.write_bytes(pt.read_bytes()[:-512] + bytes(512)),
    "payload has a byte too many": lambda pt, js: pt.write_bytes(pt.read_bytes() + b"\0"),
    "payload is gone": lambda pt, js: pt.unlink(),
    "payload is a directory": lambda pt, js: replace_by_directory(pt),
    "payload is that of another": lambda pt, js: shutil.copy(pt.with_stem(OLD), pt),
    "manifest is empty": lambda pt, js: truncate(js, 0),
    "manifest is cut": lambda pt, js: truncate(js, 100),
    "manifest is noise": lambda pt, js: js.write_bytes(os.urandom(300)),
    "manifest is another JSON": lambda pt, js: js.write_text("[]"),
    "manifest is a directory": lambda pt, js: replace_by_directory(js),
    "manifest is that of another": lambda pt, js: shutil.copy(js.with_stem(OLD), js),
    "both are those of another": lambda pt, js: [shutil.copy(p.with_stem(OLD), p) for p in (pt, js)],
    "manifest was edited": lambda pt, js: edit(js, world_size=64),
    "manifest is edited to another step": lambda pt, js: restamp(js, step=30),
    "manifest has a text for a number": lambda pt, js: restamp(js, step="20"),
    "manifest has a field too many": lambda pt, js: restamp(js, colour="red"),
    "manifest is of a format of the future": lambda pt, js: restamp(js, format=99),
    "manifest is of no format": lambda pt, js: restamp(js, format=None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_is_reported_and_the_older_one_used(run: Generation, tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](file(tmp_path, NEW), file(tmp_path, NEW, ".json"))
    found = find(tmp_path)
    assert found.manifest is not None and found.manifest.name == OLD and found.content["step"] == 10
    assert [name for name, reason in found.skipped if reason] == [NEW]
    # The next generation can start from it, and publish the step again.
    after = start(tmp_path)
    after.save(20)
    assert found_name(tmp_path) == "gen-0002-step-00000020"


def test_swapped_payloads_are_both_noticed(run: Generation, tmp_path: Path) -> None:
    run.save(30)
    swap(file(tmp_path, NEW), file(tmp_path, "gen-0001-step-00000030"))
    found = find(tmp_path)
    assert found.manifest is not None and found.manifest.name == OLD
    assert [name for name, _ in found.skipped] == ["gen-0001-step-00000030", NEW]


@pytest.mark.parametrize("damage", DAMAGES)
def test_when_no_snapshot_is_good_nothing_starts_over(run: Generation, tmp_path: Path, damage: str) -> None:
    DAMAGES[damage](file(tmp_path, NEW), file(tmp_path, NEW, ".json"))
    for suffix in (".pt", ".json"):
        file(tmp_path, OLD, suffix).unlink()
    before = everything(tmp_path)
    with pytest.raises(UsageError) as caught:
        start(tmp_path)
    assert NEW in str(caught.value) and str(tmp_path / "snapshots") in str(caught.value)
    assert "--run-dir" in str(caught.value) and "\n" not in str(caught.value)
    assert everything(tmp_path) == before


def test_the_error_lists_the_snapshots_and_says_why_each_is_bad(run: Generation, tmp_path: Path) -> None:
    flip(file(tmp_path, OLD), 100)
    truncate(file(tmp_path, NEW), 5)
    with pytest.raises(UsageError) as caught:
        find(tmp_path)
    assert f"{OLD}: {OLD}.pt does not match its digest" in str(caught.value)
    assert f"{NEW}: {NEW}.pt has 5 bytes instead of" in str(caught.value)
