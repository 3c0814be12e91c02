"""`python -m course_lib.engine.snapshots list` and `verify`, bad input to all four, and the command as a process."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_tools import NEW, OLD, SUPERSEDED, command, file, load, refusal, states, three_snapshots
from helpers import Completed
from snapshot_tools import everything, find, flip, forge, found_name, names, start
from test_snapshot_damage import DAMAGES
from test_snapshot_safety import Call

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import Manifest, SnapshotStore, __main__, survey
from course_lib.engine.tree import digest

MODULE = "course_lib.engine.snapshots"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return three_snapshots(tmp_path / "run")


def test_list_shows_each_snapshot_and_which_one_a_resume_would_load(run_dir: Path) -> None:
    os.utime(file(run_dir, OLD), (0, 0))
    os.utime(file(run_dir, NEW), (4e9, 4e9))  # a clock that jumped: the age is nothing but shown
    code, output = command("list", run_dir)
    assert code == 0
    head, *rows, last = output.splitlines()
    size = f"{file(run_dir, OLD).stat().st_size:,}"
    assert head.split() == ["snapshot", "step", "epoch", "generation", "ranks", "bytes", "age", "in", "line", "state"]
    cells = [re.split("  +", row.strip()) for row in rows]
    assert [row[:6] for row in cells] == [
        [NEW, "20", "0", "2", "1", size],
        [SUPERSEDED, "99", "0", "1", "1", size],
        [OLD, "10", "0", "1", "1", size],
    ]
    assert cells[0][6] == "0:00:00" and re.fullmatch(r"\d{5,} days, \d+:\d\d:\d\d", cells[2][6])
    assert [row[7:] for row in cells] == [["yes", "right size"], ["no", "right size"], ["yes", "right size"]]
    assert last == f"a resume would load {found_name(run_dir)} (payloads were not read: verify reads them)"


def test_list_reads_no_payload_and_verify_reads_every_byte(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(file(run_dir, NEW), 100)
    assert states(command("list", run_dir)[1])[NEW] == ("yes", "right size")
    code, output = command("verify", run_dir)
    assert (code, states(output)[NEW]) == (1, ("yes", f"{NEW}.pt does not match its digest"))
    assert output.splitlines()[-1] == f"a resume would load {OLD}"

    def refuse(*_: Any) -> Any:
        raise AssertionError("a payload was read")

    monkeypatch.setattr(SnapshotStore, "read", refuse)
    assert command("list", run_dir)[0] == 0
    with pytest.raises(AssertionError):
        command("verify", run_dir)


def test_json_says_the_same(run_dir: Path) -> None:
    flip(file(run_dir, NEW), 100)
    for name, read, resume in (("list", False, NEW), ("verify", True, OLD)):
        code, output = command(name, run_dir, "--json")
        found = json.loads(output)
        assert (code, found["payloads_read"], found["resume"], found["bad_claims"]) == (int(read), read, resume, {})
        assert [(row["snapshot"], row["in_line"], row["problem"] is None) for row in found["snapshots"]] == [
            (NEW, True, not read),
            (SUPERSEDED, False, True),
            (OLD, True, True),
        ]
        row = found["snapshots"][2]
        assert (row["step"], row["epoch"], row["generation"], row["world_size"]) == (10, 0, 1, 1)
        assert row["bytes"] == file(run_dir, OLD).stat().st_size and 0 <= row["age_s"] < 600


def test_all_good(run_dir: Path) -> None:
    code, output = command("verify", run_dir)
    assert code == 0 and {state for _, state in states(output).values()} == {"good"}
    assert output.splitlines()[-1] == f"a resume would load {NEW}"


SEEN_WITHOUT_READING = re.compile("is empty|lacks|too many|gone|a directory|manifest|both")


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named_and_the_resume_is_the_real_one(tmp_path: Path, damage: str) -> None:
    generation = start(tmp_path)
    old, new = generation.save(10).name, generation.save(20).name
    DAMAGES[damage](file(tmp_path, new), file(tmp_path, new, ".json"))
    before = everything(tmp_path)
    code, output = command("verify", tmp_path)
    table = states(output)
    assert code == 1 and table[old] == ("yes", "good") and table[new][1] == dict(find(tmp_path).skipped)[new]
    assert output.splitlines()[-1] == f"a resume would load {old}" and found_name(tmp_path) == old
    code, output = command("list", tmp_path)
    assert code == 0 and (states(output)[new][1] == "right size") == (not SEEN_WITHOUT_READING.search(damage))
    assert everything(tmp_path) == before


def test_a_payload_whose_manifest_is_gone_and_a_payload_that_would_run_code(tmp_path: Path) -> None:
    generation = start(tmp_path)
    one, two, three = (generation.save(step) for step in (1, 2, 3))
    file(tmp_path, two.name, ".json").unlink()
    forge(tmp_path, three, {"model": Call(os.mkdir, str(tmp_path / "marker"))})
    code, output = command("verify", tmp_path)
    assert code == 1 and states(output) == {
        one.name: ("yes", "good"),
        two.name: ("no", "it has no manifest"),
        three.name: ("yes", "its payload cannot be opened safely: posix.mkdir in it is not plain data"),
    }
    assert not (tmp_path / "marker").exists()


def test_a_damaged_claim_is_shown(run_dir: Path) -> None:
    file(run_dir, "gen-0001.claim", ".json").write_bytes(b"{")
    code, output = command("verify", run_dir)
    assert code == 1 and "gen-0001.claim: its manifest is not readable" in output.splitlines()
    assert {state for _, state in states(output).values()} == {"good"} and f"would load {NEW}" in output


def test_none_is_good(tmp_path: Path) -> None:
    generation = start(tmp_path)
    for step in (1, 2):
        flip(file(tmp_path, generation.save(step).name), 100)
    code, output = command("verify", tmp_path)
    assert code == 3 and "would stop with an error" in output.splitlines()[-1]
    with pytest.raises(UsageError, match="can be trusted"):
        find(tmp_path)
    assert json.loads(command("verify", tmp_path, "--json")[1])["resume"] is None


def test_none_is_of_the_line(tmp_path: Path) -> None:
    first = start(tmp_path)
    start(tmp_path)
    first.save(10)
    code, output = command("verify", tmp_path)
    assert code == 3 and "would start afresh" in output.splitlines()[-1] and found_name(tmp_path) is None
    assert states(output) == {OLD: ("no", "good")}


def test_a_job_that_saves_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = start(tmp_path, keep=2)
    for step in (1, 2):
        generation.save(step)
    real = survey.check
    saves = iter([3])

    def check(store: SnapshotStore, manifest: Manifest) -> str | None:
        for step in saves:
            generation.save(step)  # retires the first, which is in the listing and about to be read
        return real(store, manifest)

    monkeypatch.setattr(survey, "check", check)
    code, output = command("verify", tmp_path)
    assert (code, list(states(output))) == (0, ["gen-0001-step-00000002"])

    # A payload is there before its manifest.
    away = file(tmp_path, "gen-0001-step-00000003", ".json")
    content = away.read_bytes()
    away.unlink()

    def complete(store: SnapshotStore, manifest: Manifest) -> str | None:
        away.write_bytes(content)
        return real(store, manifest)

    monkeypatch.setattr(survey, "check", complete)
    code, output = command("verify", tmp_path)
    assert (code, list(states(output))) == (0, ["gen-0001-step-00000002"])


def test_a_run_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty/snapshots").mkdir(parents=True)
    (tmp_path / "other/snapshots").mkdir(parents=True)
    (tmp_path / "other/snapshots/best.pt").write_text("x")
    start(tmp_path / "claimed")
    wrong = {"missing": "No such file", "file": "Not a directory", "file/below": "Not a directory"}
    wrong |= {name: "there are no snapshots in" for name in ("empty", "other", "claimed")}
    for name, why in wrong.items():
        for words in (["list"], ["verify", "--json"], ["prune"], ["prune", "--dry-run"], ["export"]):
            out = [tmp_path / "out.pt"] * (words[0] == "export")
            line = refusal(words[0], tmp_path / name, *out, *words[1:])
            assert why in line and str(tmp_path / name) in line
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "the following arguments are required"),
        (["list"], "the following arguments are required: RUN_DIR"),
        (["destroy", "x"], "invalid choice: 'destroy'"),
        (["prune", "x", "--keep", "0"], "--keep must be at least 1, not 0"),
        (["prune", "x", "--keep", "many"], "--keep"),
        (["export", "x"], "OUT"),
        (["export", "x", "y", "--format", "onnx"], "--format"),
        (["list", "x", "--keep", "3"], "--keep"),
    ],
)
def test_a_wrong_word_is_named_in_one_line(words: list[str], why: str) -> None:
    assert why in refusal(*words)


def test_the_help_explains_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["list"], ["verify"], ["prune"], ["export"]):
        with pytest.raises(SystemExit) as left:
            __main__.main([*words, "--help"])
        text = capsys.readouterr().out
        assert left.value.code == 0 and all(f"\n  {code}  " in text for code in range(4))


def test_too_little_memory_is_no_damage(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(torch, "load", full)
    assert "not enough memory" in refusal("verify", run_dir)


def shell(launch: Callable[..., Completed], line: str, run_dir: Path, prefix: str = "") -> Completed:
    """A line of bash, in which COMMAND stands for the command and RUN for the directory."""
    line = line.replace("COMMAND", f"{prefix} {sys.executable} -m {MODULE}").replace("RUN", str(run_dir))
    return launch(["bash", "-c", line])


def test_as_a_process_it_keeps_its_exit_codes_also_when_nobody_reads(
    launch: Callable[..., Completed], run_dir: Path
) -> None:
    flip(file(run_dir, NEW), 100)
    done = shell(launch, "COMMAND verify RUN", run_dir)
    assert done.returncode == 1 and f"a resume would load {OLD}" in done.output
    # The reader is gone before the first line is written.
    done = shell(launch, 'COMMAND verify RUN | true; exit "${PIPESTATUS[0]}"', run_dir)
    assert (done.returncode, done.output) == (1, "")
    done = shell(launch, "COMMAND list RUN > /dev/full", run_dir)
    assert done.returncode == 2 and done.output.startswith("error: ") and len(done.output.splitlines()) == 1
    done = shell(launch, "COMMAND list RUN/nowhere", run_dir)
    assert done.returncode == 2 and done.output.startswith("error: cannot list") and done.output.count("\n") == 1


def test_what_may_not_be_read(launch: Callable[..., Completed], run_dir: Path) -> None:
    """As a user who is not almighty: root is, unless it gives its capabilities away."""
    prefix = ""
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv")
        prefix = "setpriv --inh-caps=-all --bounding-set=-all"
    file(run_dir, NEW).chmod(0)
    done = shell(launch, "COMMAND verify RUN", run_dir, prefix)
    assert done.returncode == 1 and states(done.output)[NEW] == ("yes", f"{NEW}.pt cannot be read: Permission denied")
    file(run_dir, NEW).chmod(0o600)
    directory = run_dir / "snapshots"
    before = everything(run_dir)
    directory.chmod(0o500)
    done = shell(launch, "COMMAND prune --keep 1 RUN", run_dir, prefix)
    assert done.returncode == 2 and done.output.startswith("error: cannot remove") and everything(run_dir) == before
    directory.chmod(0)
    done = shell(launch, "COMMAND list RUN", run_dir, prefix)
    assert done.returncode == 2 and done.output.startswith(f"error: cannot list {directory} (Permission denied)")
    directory.chmod(0o700)


def test_on_a_real_run_that_was_killed(torchrun: Callable[..., Completed], tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "weights.pt"
    options = ("--global-batch-size", 256, "--snapshot-every", 2, "--run-dir", run_dir)

    def train(epochs: int, *extra: str) -> dict[str, Any]:
        done = torchrun("--epochs", epochs, *options, *extra, script="scripts/ddp_torchrun.py", max_restarts=3)
        assert done.returncode == 0, done.tail()
        report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
        return report

    report = train(1, "--fault", "kill:rank=1,step=3")
    code, output = command("verify", run_dir)
    table = states(output)
    # At most: the writer lets a snapshot go while it is busy with another.
    assert (code, report["generations"]) == (0, 2) and 1 <= len(table) <= 3
    assert set(table.values()) == {("yes", "good")}
    assert command("prune", run_dir, "--keep", 1)[0] == 0 and names(run_dir) == [max(table)]
    assert command("export", run_dir, out)[0] == 0
    weights = load(out)
    assert digest(weights) == report["weights_sha256"] and not any(key.startswith("module.") for key in weights)
    # And the job goes on from what was left.
    longer = train(2)
    assert (longer["steps"], longer["generations"]) == (2 * report["steps"], 3)
