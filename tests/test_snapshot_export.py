"""`export`: plain weights of a verified snapshot, and nothing of somebody's overwritten."""

import os
import sys
from pathlib import Path

import pytest
import torch
from command_tools import SUPERSEDED, command, file, load, refusal, three_snapshots
from snapshot_tools import everything, flip, start
from torch import nn
from toys import Toy, crash_at, net

from course_lib.engine.snapshots import __main__, upkeep
from course_lib.engine.tree import digest


def test_export_writes_the_plain_weights_of_the_newest_good_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "weights.pt"
    toy = crash_at(run_dir, [4], lambda path: Toy(path, keep=9))
    assert command("export", run_dir, out) == (0, f"{out}: the weights of gen-0002-step-00000010, after 10 steps\n")
    weights = load(out)
    assert type(weights) is dict and digest(weights) == toy.state.weights_digest()
    fresh = Toy(tmp_path / "fresh")
    fresh.model.load_state_dict(weights)
    assert fresh.state.weights_digest() == toy.state.weights_digest()

    # Of the one that is named; and, when the newest is bad, of the next older one, which is said.
    command("export", run_dir, tmp_path / "named.pt", "--snapshot", "gen-0001-step-00000003")
    early = Toy(tmp_path / "early").run(until=3).state.weights_digest()
    assert digest(load(tmp_path / "named.pt")) == early != digest(weights)
    flip(file(run_dir, "gen-0002-step-00000010"), 100)
    capsys.readouterr()
    __main__.main(["export", str(run_dir), str(tmp_path / "older.pt")])
    said = capsys.readouterr()
    assert "the weights of gen-0002-step-00000009" in said.out
    assert said.err == "passed over gen-0002-step-00000010: gen-0002-step-00000010.pt does not match its digest\n"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["named.pt", "older.pt", "weights.pt"]


def test_export_of_a_snapshot_that_is_bad_or_not_there(tmp_path: Path) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "weights.pt"
    Toy(run_dir).run()
    bad, lost, good = "gen-0001-step-00000009", "gen-0001-step-00000006", "gen-0001-step-00000010"
    flip(file(run_dir, bad), 100)
    file(run_dir, lost, ".json").write_bytes(b"")
    assert f"no good snapshot {bad} ({bad}: {bad}.pt does not match" in refusal(
        "export", run_dir, out, "--snapshot", bad
    )
    assert "its manifest is not readable" in refusal("export", run_dir, out, "--snapshot", lost)
    assert "no good snapshot best (list shows what there is)" in refusal("export", run_dir, out, "--snapshot", "best")
    flip(file(run_dir, good), 100)
    line = refusal("export", run_dir, out)
    assert "no good snapshot that a resume could load" in line and bad in line and good in line and lost in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_export_takes_a_superseded_one_only_by_its_name(tmp_path: Path) -> None:
    first = start(tmp_path / "run")
    first.save(10, state={"model": {"weight": torch.tensor([10.0])}})
    start(tmp_path / "run")
    first.save(99, state={"model": {"weight": torch.tensor([99.0])}})
    command("export", tmp_path / "run", tmp_path / "newest.pt")
    command("export", tmp_path / "run", tmp_path / "late.pt", "--snapshot", SUPERSEDED)
    assert [load(tmp_path / name)["weight"].item() for name in ("newest.pt", "late.pt")] == [10, 99]


def test_export_never_touches_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = tmp_path / "toy", three_snapshots(tmp_path / "run")
    Toy(run).run()
    taken, folder, link = tmp_path / "taken.pt", tmp_path / "folder.pt", tmp_path / "link.pt"
    taken.write_text("mine")
    folder.mkdir()
    link.symlink_to(tmp_path / "nowhere")
    for out in (taken, folder, link):
        assert f"{out} exists already" in refusal("export", run, out)
    assert f"cannot write {tmp_path}/no/x.pt: No such file" in refusal("export", run, tmp_path / "no" / "x.pt")
    assert "holds no weights" in refusal("export", plain, tmp_path / "x.pt")  # no TrainState wrote these
    before = everything(tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "No space left" in refusal("export", run, tmp_path / "x.pt")

    real = upkeep.publish

    def late(path: Path, content: bytes) -> None:
        path.write_text("somebody was quicker")
        real(path, content)

    assert everything(tmp_path) == before
    monkeypatch.setattr(upkeep, "publish", late)
    assert "File exists" in refusal("export", run, tmp_path / "x.pt")
    assert everything(tmp_path) == before | {"x.pt": b"somebody was quicker"} and taken.read_text() == "mine"


class Tied(nn.Module):
    """The output layer's weight is the embedding's, as in a GPT; a buffer is a transposed view of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(4, 8)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3).to(torch.bfloat16))
        self.register_buffer("transposed", self.get_buffer("table").T)
        self.register_buffer("none", torch.empty(0, 3))
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + self.head(self.embedding.weight[:1]).mean()
        return out


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run", model=Tied()).run()
    command("export", tmp_path / "run", tmp_path / "weights.pt")
    weights = load(tmp_path / "weights.pt")
    assert digest(weights) == toy.state.weights_digest()
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()


def test_safetensors(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    toy = Toy(tmp_path / "run", model=Tied()).run()
    command("export", tmp_path / "run", tmp_path / "weights.safetensors")
    weights = library.load_file(tmp_path / "weights.safetensors")
    assert digest(weights) == toy.state.weights_digest()
    fresh = Tied()
    fresh.load_state_dict(weights)
    assert digest(fresh.state_dict()) == toy.state.weights_digest()
    # The option has the last word.
    command("export", tmp_path / "run", tmp_path / "other.safetensors", "--format", "torch")
    command("export", tmp_path / "run", tmp_path / "other.bin", "--format", "safetensors")
    with (tmp_path / "other.safetensors").open("rb") as opened:  # torch.load would believe the name
        plain = torch.load(opened, map_location="cpu", weights_only=True)
    assert digest(plain) == digest(library.load_file(tmp_path / "other.bin")) == digest(weights)
    generation = start(tmp_path / "odd")
    for step, odd in enumerate([{"x": [1, 2]}, {3: torch.ones(1)}], 1):
        generation.save(step, state={"model": odd})
        out = tmp_path / "odd.safetensors"
        assert "safetensors cannot hold" in refusal("export", tmp_path / "odd", out) and not out.exists()


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Toy(tmp_path / "run").run()
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "weights.safetensors"
    assert "safetensors is not installed" in refusal("export", tmp_path / "run", out) and not out.exists()
