"""`prune` removes what no resume needs and never changes a resume, which `verify` predicts."""

import os
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from command_tools import NEW, OLD, SUPERSEDED, command, file, refusal, states, three_snapshots
from helpers import Running
from snapshot_tools import Generation, everything, find, flip, found_name, names, start, unreadable
from test_snapshot_damage import DAMAGES
from test_snapshot_live import holder

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import Heartbeat, Manifest, SnapshotStore, upkeep


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return three_snapshots(tmp_path / "run")


def random_run(run_dir: Path, dice: random.Random) -> list[Generation]:
    """Generations that start, save, wake up late and leave things half done, on a disk that damages files."""
    lives: list[Generation] = []
    for step in range(1, dice.randint(4, 13)):
        deed = dice.choice(["start", "save", "save", "late", "damage", "half"]) if lives else "start"
        if deed == "start":
            try:
                lives.append(start(run_dir, keep=9))
            except UsageError:  # none is good
                return lives
        elif deed in ("save", "late"):
            dice.choice(lives[:-1] or lives if deed == "late" else lives[-1:]).save(step)
        elif deed == "half":
            file(run_dir, f"gen-{len(lives):04d}-step-{step:08d}").write_bytes(b"its manifest never came")
            (run_dir / "snapshots" / f".gen-{len(lives):04d}-step-{step:08d}.pt.ab12.tmp").write_bytes(b"torn")
        elif whole := [name for name in names(run_dir) if file(run_dir, name, ".json").exists()]:
            # An old or a new one, but rarely all.
            victim = file(run_dir, dice.choice(whole[-2:] + whole[:1]))
            damage = dice.choice([*list(DAMAGES)[:5], "manifest is empty", "manifest was edited"])
            DAMAGES[damage](victim, victim.with_suffix(".json"))
    return lives


def outcome(run_dir: Path) -> tuple[str, Any]:
    """What a resume does: the snapshot it loads with its content, or None, or that it stops."""
    try:
        found = find(run_dir)
    except UsageError:
        return "would stop", None
    if found.manifest is None:
        return "would start afresh", None
    return f"would load {found.manifest.name}", found.content["step"]


@pytest.mark.parametrize("seed", range(60))
def test_verify_predicts_the_resume_and_prune_never_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # durability is another test's
    dice = random.Random(seed)
    random_run(tmp_path, dice)
    try:
        _, output = command("verify", tmp_path)
    except UsageError as error:
        assert "there are no snapshots" in str(error) and names(tmp_path) == []
        return
    before, table = outcome(tmp_path), states(output)
    assert before[0] in output.splitlines()[-1]
    line = [name for name, (in_line, _) in table.items() if in_line == "yes"]
    good = [name for name in line if table[name][1] == "good"]
    keep = dice.randint(1, 4)
    content = everything(tmp_path)

    if not good:
        assert "nothing was removed" in refusal("prune", tmp_path, "--keep", keep)
        assert everything(tmp_path) == content
        return
    code, planned = command("prune", tmp_path, "--keep", keep, "--dry-run")
    assert code == 0 and everything(tmp_path) == content
    code, done = command("prune", tmp_path, "--keep", keep)
    assert code == 0 and done.splitlines()[:-1] == planned.splitlines()[:-1]

    after = everything(tmp_path)
    gone = {Path(name).name for name in content.keys() - after.keys()}
    assert gone == set(done.splitlines()[:-1]) and after == {name: content[name] for name in after}
    unread = {name for name, (in_line, _) in table.items() if in_line == "?"}
    newer = line[: line.index(good[keep - 1]) + 1] if len(good) >= keep else line
    left = {Path(name).stem for name in after if Path(name).suffix in (".pt", ".json") and "claim" not in name}
    assert left == {*newer, *unread} and names(tmp_path, ".tmp") == []
    assert outcome(tmp_path) == before
    # Each of the kept ones is still a way back when the newer ones break.
    for position, name in enumerate(good[:keep]):
        assert outcome(tmp_path)[0] == f"would load {name}", position
        flip(file(tmp_path, name), 100)


def test_prune_removes_what_no_resume_needs_and_nothing_else(run_dir: Path) -> None:
    foreign = [f"{OLD}.onnx", f"{OLD}.pt.bak", "best.pt", "gen-1.pt", ".notes.tmp", ".gen-0009-step-00000003.pt.a.tmp"]
    foreign += ["gen-0009-step-00000003.pt", "gen-0009.beat"]  # of somebody who is newer than all that can be seen
    for name in [*foreign, ".gen-0001-step-00000003.pt.ab12.tmp", "gen-0001.beat", "gen-0001-step-00000005.pt"]:
        (run_dir / "snapshots" / name).write_bytes(b"7\n")
    code, output = command("prune", run_dir, "--keep", 1)
    assert code == 0 and output.splitlines() == [
        f"{OLD}.json",
        f"{SUPERSEDED}.json",
        "gen-0001-step-00000005.pt",
        f"{OLD}.pt",
        f"{SUPERSEDED}.pt",
        ".gen-0001-step-00000003.pt.ab12.tmp",
        "gen-0001.beat",
        "files removed: 7",
    ]
    left = {path.name for path in (run_dir / "snapshots").iterdir()}
    assert left == {*foreign, f"{NEW}.pt", f"{NEW}.json", "gen-0001.claim.json", "gen-0002.claim.json"}
    assert command("prune", run_dir, "--keep", 1) == (0, "files removed: 0\n")
    start(run_dir).save(30)


def test_prune_counts_good_ones_only(tmp_path: Path) -> None:
    generation = start(tmp_path, keep=9)
    for step in range(1, 7):
        generation.save(step)
    for step in (4, 6):
        flip(file(tmp_path, f"gen-0001-step-0000000{step}"), 100)
    command("prune", tmp_path, "--keep", 2)
    assert names(tmp_path) == [f"gen-0001-step-0000000{step}" for step in (3, 4, 5, 6)]
    flip(file(tmp_path, "gen-0001-step-00000005"), 100)
    assert found_name(tmp_path) == "gen-0001-step-00000003"


def test_prune_refuses_beside_a_live_job(
    running: Callable[..., AbstractContextManager[Running]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with holder(running, run_dir) as process:
        assert f"{run_dir} is in use by a live job" in refusal("prune", run_dir, "--keep", 1)
        assert command("list", run_dir)[0] == command("verify", run_dir)[0] == 0  # these are for a live job, too
        process.popen.kill()
        process.popen.wait(30)
        assert command("prune", run_dir, "--keep", 1) == (0, "gen-0001.beat\nfiles removed: 1\n")


def test_prune_refuses_beside_a_live_job_whose_claim_is_damaged(run_dir: Path) -> None:
    store = SnapshotStore(run_dir)
    claim = store.listing().claims[-1]
    beat = Heartbeat(store.directory, claim)
    try:
        file(run_dir, "gen-0002.claim", ".json").write_bytes(b"")
        assert "in use by a live job" in refusal("prune", run_dir)
    finally:
        beat.stop()


def test_prune_refuses_when_a_job_starts_meanwhile(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = upkeep.check

    def check(store: SnapshotStore, manifest: Manifest) -> str | None:
        if len(store.listing().claims) == 2:
            start(run_dir)
        return real(store, manifest)

    monkeypatch.setattr(upkeep, "check", check)
    before = set(names(run_dir))
    assert "a job has started" in refusal("prune", run_dir, "--keep", 1)
    assert set(names(run_dir)) == before


def test_prune_refuses_when_it_is_not_known_what_the_line_is(tmp_path: Path) -> None:
    """Generation 2 grew from step 10. While its claim can't be read, step 20 of generation 1 looks like the newest."""
    first = start(tmp_path)
    first.save(10)
    start(tmp_path)
    first.save(20)
    claim = file(tmp_path, "gen-0002.claim", ".json")
    content = claim.read_bytes()
    claim.write_bytes(b"")
    before = everything(tmp_path)
    assert "not known which" in refusal("prune", tmp_path, "--keep", 1)
    assert everything(tmp_path) == before
    claim.write_bytes(content)
    command("prune", tmp_path, "--keep", 1)
    assert names(tmp_path) == [OLD] and found_name(tmp_path) == OLD


def test_prune_settles_after_the_next_start(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.save(10)
    start(tmp_path)
    file(tmp_path, "gen-0002.claim", ".json").write_bytes(b"")
    assert "The job's next start settles it" in refusal("prune", tmp_path)
    start(tmp_path)
    assert command("prune", tmp_path)[0] == 0 and found_name(tmp_path) == OLD


def test_prune_keeps_a_manifest_that_cannot_be_read_just_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = start(tmp_path)
    one, two = generation.save(1).name, generation.save(2).name
    with monkeypatch.context() as patch:
        unreadable(patch, f"{one}.json")
        assert command("prune", tmp_path, "--keep", 1) == (0, "files removed: 0\n")
    assert names(tmp_path) == [one, two] and find(tmp_path).skipped == ()


def test_prune_cut_off_anywhere_leaves_at_worst_a_payload_without_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = start(tmp_path / "whole", keep=9)
    for step in range(1, 5):
        generation.save(step)
    real = upkeep.withdraw
    for deeds in range(7):
        run_dir = tmp_path / str(deeds)
        shutil.copytree(tmp_path / "whole", run_dir)
        left = iter(range(deeds))

        def withdraw(path: Path, left: Any = left) -> None:
            next(left)  # power fails here
            real(path)

        monkeypatch.setattr(upkeep, "withdraw", withdraw)
        if deeds < 6:
            with pytest.raises(StopIteration):
                command("prune", run_dir, "--keep", 1)
        else:
            assert command("prune", run_dir, "--keep", 1)[1].endswith("files removed: 6\n")
        manifests = set(names(run_dir, ".json")) - {"gen-0001.claim"}
        assert manifests <= set(names(run_dir)) and found_name(run_dir) == "gen-0001-step-00000004"
        assert len(manifests) + len(names(run_dir)) == 8 - deeds
        monkeypatch.setattr(upkeep, "withdraw", real)
        command("prune", run_dir, "--keep", 1)
        assert names(run_dir) == ["gen-0001-step-00000004"]


def test_the_manifests_are_gone_for_good_before_a_payload_goes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deeds: list[str] = []
    for name in ("withdraw", "sync_directory"):
        real = getattr(upkeep, name)
        monkeypatch.setattr(upkeep, name, lambda path, real=real: (deeds.append(path.suffix or "sync"), real(path)))
    command("prune", run_dir, "--keep", 1)
    assert deeds == [".json", ".json", "sync", ".pt", ".pt"]
