"""Snapshots of format 1, as they were first written, are read by every later version.

`tests/golden/format-1` holds what a small job had left when it died: two generations with a snapshot each, their
claims, and the digests of what is in them. `make` below wrote it, with the names of the machine taken out:

    PYTHONPATH=.:tests python -c "import test_golden; test_golden.make('tests/golden/format-1')"

It is not to be made anew: that would only show that this version reads what it writes.
"""

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from snapshot_tools import find
from torch import nn
from toys import Points, Toy, events

from course_lib.engine import Best, UsageError
from course_lib.engine.snapshots import SnapshotStore, open_payload
from course_lib.engine.snapshots.records import seal
from course_lib.engine.tree import digest

GOLDEN = Path(__file__).parent / "golden" / "format-1"
OLD, NEW = "gen-0001-step-00000003", "gen-0002-step-00000006"


def job(run_dir: Path) -> Toy:
    """The job; what stands here must stay, since a snapshot of another one is refused."""
    torch.manual_seed(0)
    return Toy(
        run_dir,
        model=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        extra={"best": Best(larger_is_better=False)},
        dataset=Points(40),
        epochs=2,
        global_batch_size=8,
        seed=5,
        snapshot_every=3,
        keep=2,
    )


def make(directory: str | Path) -> None:
    """Write the golden directory, which must not exist yet."""
    run_dir = Path(directory)
    run_dir.mkdir(parents=True)
    for token, died_at in (("1" * 32, 4), ("2" * 32, 7)):
        with patch("course_lib.engine.snapshots.store.secrets.token_hex", lambda _, token=token: token):
            job(run_dir).run(until=died_at)
    shutil.rmtree(run_dir / "events")
    store = SnapshotStore(run_dir)
    seen = store.listing()
    for claim in seen.claims:
        neutral = replace(claim, host="a-machine", pid=1)
        (store.directory / f"{claim.name}.claim.json").write_bytes(seal(neutral))
    for manifest in seen.manifests:
        machine = {"host": "a-machine", "cpu": "a processor"}
        (store.directory / f"{manifest.name}.json").write_bytes(seal(replace(manifest, machine=machine)))
    digests = {m.name: digest(open_payload(store.read(m))) for m in store.listing().manifests}
    (run_dir / "digests.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A copy, since a job that resumes writes."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def recorded() -> dict[str, str]:
    return dict(json.loads((GOLDEN / "digests.json").read_text()))


def test_the_newest_snapshot_and_the_one_before_hold_what_they_held(run_dir: Path) -> None:
    found = find(run_dir)
    assert found.manifest is not None and found.manifest.name == NEW and found.skipped == ()
    assert digest(found.content) == recorded()[NEW]
    (run_dir / "snapshots" / f"{NEW}.pt").write_bytes(b"")
    found = find(run_dir)
    assert found.manifest is not None and found.manifest.name == OLD
    assert digest(found.content) == recorded()[OLD]


@pytest.mark.parametrize("name", [OLD, NEW])
def test_a_payload_is_a_plain_torch_file(name: str) -> None:
    path = GOLDEN / "snapshots" / f"{name}.pt"
    content = torch.load(path, map_location="cpu", weights_only=True)
    assert digest(content) == recorded()[name]
    assert set(content) == {"state", "progress", "identity", "settings"}
    assert set(content["state"]) == {"model", "optimizer", "scheduler", "extra.best", "configured_lrs"}
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest["sha256"] == sha256(path.read_bytes()).hexdigest() and manifest["format"] == 1


def test_a_job_resumes_from_it(run_dir: Path) -> None:
    state = find(run_dir).content["state"]
    toy = job(run_dir).run(until=6)
    assert digest(toy.state.state_dict()) == digest(state)
    assert toy.trainer.progress.position.step == 6 and len(toy.trainer.progress.history) == 1
    assert [event["snapshot"] for event in events(run_dir, "snapshot_loaded")] == [NEW]
    assert sorted(job(run_dir).run().losses) == [6, 7, 8, 9]


def test_a_format_of_the_future_is_named_and_the_older_snapshot_used(run_dir: Path) -> None:
    store = SnapshotStore(run_dir)
    old, new = store.listing().manifests
    path = store.directory / f"{new.name}.json"
    path.write_bytes(seal(replace(new, format=2)))
    found = find(run_dir)
    assert found.manifest == old
    assert found.skipped == ((NEW, "format 2 is not known to this version, which reads up to 1"),)
    (store.directory / f"{old.name}.json").write_bytes(seal(replace(old, format=2)))
    with pytest.raises(UsageError, match=f"{NEW}: format 2 is not known to this version, which reads up to 1"):
        job(run_dir).run()


def test_it_is_small_and_names_no_machine() -> None:
    contents = {path.name: path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
    assert len(contents) == 7 and sum(map(len, contents.values())) < 40_000
    records = [json.loads(content) for name, content in contents.items() if name.startswith("gen-") and "json" in name]
    assert [record.get("host") or record["machine"]["host"] for record in records] == ["a-machine"] * 4
    for place in (b"/home/", b"/root/", b"/tmp/", b"pid:["):
        assert not any(place in content for content in contents.values())


def test_what_is_written_today_has_the_same_fields(tmp_path: Path) -> None:
    """Or else it is another format, which needs a number and a golden directory of its own."""
    make(tmp_path / "today")
    for path in sorted(GOLDEN.glob("snapshots/*.json")):
        then, now = (json.loads(p.read_text()) for p in (path, tmp_path / "today" / path.relative_to(GOLDEN)))
        assert set(now) == set(then) and now.get("format") == then.get("format")
    for name in (OLD, NEW):
        then, now = (
            torch.load(root / "snapshots" / f"{name}.pt", map_location="cpu", weights_only=True)
            for root in (GOLDEN, tmp_path / "today")
        )
        assert now.keys() == then.keys() and now["identity"].keys() == then["identity"].keys()
        assert now["progress"].keys() == then["progress"].keys()
