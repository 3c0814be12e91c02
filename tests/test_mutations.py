"""Ten thousand damaged files: each is noticed, the right older snapshot loaded, and nothing starts from scratch."""

import io
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BENCH, launch
from snapshot_tools import Generation, everything, find, flip, forge, found_name, start
from test_bad_input import alone, refused

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import Restored, SnapshotStore, find_snapshot
from course_lib.engine.snapshots.files import read_file
from course_lib.engine.snapshots.heartbeat import beat_path, is_live


@pytest.fixture
def mutations(bench: Callable[[str], Any]) -> Iterator[Any]:
    """The module scripts/bench/mutations.py, with one thread, as it runs by itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield bench("mutations")
    torch.set_num_threads(threads)


def test_a_few_hundred_damages_of_every_kind_are_noticed(mutations: Any, tmp_path: Path) -> None:
    figures = mutations.campaign(tmp_path, 500, seed=1)
    assert figures["failures"] == [] and figures["damaged"] == 500
    kinds = {kind.split(":")[0] for kind in figures["kinds"]}
    assert kinds == {"payload", "manifest", "claim"} and len(figures["kinds"]) > 50
    assert set(figures["outcomes"]) == {f"loaded, number {n} of the line" for n in range(1, 7)} | {
        "refused, none is good"
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_thousand_damages_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    done = launch([sys.executable, BENCH / "mutations.py", "--json", path], timeout=1400)
    assert done.returncode == 0, done.tail()
    figures = json.loads(path.read_text())
    assert figures["damaged"] == 10_000 and figures["failures"] == []


def without_digests(patch: pytest.MonkeyPatch) -> None:
    # It may well be a device without an end, so this much care it keeps.
    patch.setattr(SnapshotStore, "read", lambda store, m, *_: read_file(store.directory / f"{m.name}.pt", 2**20))


def without_seals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("course_lib.engine.snapshots.records._digest", lambda body: body.get("digest"))
    patch.setattr("course_lib.engine.snapshots.records._unseal", lambda text: _unsealed(text))


def _unsealed(text: bytes) -> dict[str, Any]:
    body = json.loads(text)
    del body["digest"]
    return dict(body)


def from_scratch(patch: pytest.MonkeyPatch) -> None:
    def find_or_start_over(*arguments: Any) -> Restored:
        try:
            return find_snapshot(*arguments)
        except UsageError:
            return Restored(None, {}, (), 0)

    patch.setattr("mutations.find_snapshot", find_or_start_over)


def in_silence(patch: pytest.MonkeyPatch) -> None:
    def find_and_say_nothing(*arguments: Any) -> Restored:
        found = find_snapshot(*arguments)
        return Restored(found.manifest, found.content, (), found.newest_generation)

    patch.setattr("mutations.find_snapshot", find_and_say_nothing)


@pytest.mark.parametrize("careless", [without_digests, without_seals, from_scratch, in_silence])
def test_a_careless_store_is_found_out(
    mutations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, careless: Callable[[pytest.MonkeyPatch], None]
) -> None:
    careless(monkeypatch)
    assert len(mutations.campaign(tmp_path, 100, seed=0)["failures"]) > 3


def test_what_was_not_noticed_is_no_success(
    mutations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_digests(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["mutations.py", "--files", "60", "--json", str(tmp_path / "figures.json")])
    with pytest.raises(SystemExit) as caught:
        mutations.main()
    assert caught.value.code == 1 and json.loads((tmp_path / "figures.json").read_text())["failures"]
    assert "payload: a bit of its pickle" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["mutations.py", "--files", "0"])
    with pytest.raises(UsageError, match="--files must be at least 1"):
        mutations.main()


@pytest.fixture
def run(tmp_path: Path) -> Generation:
    generation = start(tmp_path / "run")
    generation.save(10)
    generation.save(20)
    return generation


def test_the_records_of_two_runs_in_one_directory_stop_the_start(run: Generation, tmp_path: Path) -> None:
    """Somebody copied the claims of another run over these: no snapshot is of the generation that is claimed."""
    start(tmp_path / "other")
    shutil.copy(tmp_path / "other/snapshots/gen-0001.claim.json", tmp_path / "run/snapshots")
    before = everything(tmp_path)
    with pytest.raises(UsageError, match="gen-0001-step-00000020: it is of another job than its generation's claim"):
        start(tmp_path / "run")
    assert everything(tmp_path) == before


def test_a_claim_under_the_name_of_a_newer_one_does_not_block_the_next(run: Generation, tmp_path: Path) -> None:
    directory = tmp_path / "run/snapshots"
    shutil.copy(directory / "gen-0001.claim.json", directory / "gen-0002.claim.json")
    after = start(tmp_path / "run")
    assert (after.claim.generation, after.claim.parent) == (3, "gen-0001-step-00000020")
    assert dict(after.found.skipped) == {"gen-0002.claim": "its record is that of gen-0001"}


@pytest.mark.parametrize("place", [os.mkfifo, Path.mkdir, lambda path: path.write_bytes(b"\xff" * 99)])
def test_what_is_no_heartbeat_is_no_life(run: Generation, place: Callable[[Path], object]) -> None:
    path = beat_path(run.store.directory, run.claim)
    place(path)
    assert not is_live(run.store.directory, run.claim, watch_s=0.3)


def test_a_payload_that_would_unpack_to_more_than_it_is_is_not_opened(run: Generation, tmp_path: Path) -> None:
    plain, bomb = io.BytesIO(), io.BytesIO()
    torch.save({"step": 20, "weight": torch.zeros(100_000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in source.infolist():
            packed.writestr(part.filename, source.read(part))
    assert len(bomb.getvalue()) < 10_000
    newest = run.store.listing().manifests[1]
    forge(tmp_path / "run", newest, plain.getvalue())
    assert find(tmp_path / "run").content["step"] == 20
    forge(tmp_path / "run", newest, bomb.getvalue())
    found = find(tmp_path / "run")
    assert found.content["step"] == 10 and "compressed" in dict(found.skipped)[newest.name]


def test_the_real_script_refuses_to_start_over_and_goes_on_when_one_is_back(tmp_path: Path) -> None:
    """Exit code 2 and one line, whatever is wrong with each; nothing is changed by the try."""
    run_dir = tmp_path / "run"
    options = ("--run-dir", run_dir, "--keep", "4")
    assert alone(*options).returncode == 0
    payloads = sorted((run_dir / "snapshots").glob("*.pt"))
    names = [path.stem for path in payloads]
    good = payloads[2].read_bytes()
    flip(payloads[0], 5000)
    payloads[1].with_suffix(".json").write_text("[" * 100_000)
    payloads[2].unlink()
    os.mkfifo(payloads[2])
    before = everything(run_dir)
    refused(alone(*options), "none of the snapshots", "--run-dir", *names)
    assert everything(run_dir) == before

    payloads[2].unlink()
    payloads[2].write_bytes(good)
    assert found_name(run_dir) == names[2]
    done = alone(*options, "--epochs", "3")
    assert done.returncode == 0 and f"resumed from {names[2]}" in done.output, done.tail()
