"""The GPT under torchrun: killed and resumed to the bit, no other text, and better than a table of pairs."""

import random
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from helpers import REPO, Completed, launch, torchrun, torchrun_env
from jobs import assert_samples_once, losses, report
from ranks import on_ranks

from course_lib.engine import UsageError, World, read_events
from course_lib.workloads.gpt import SHAPES
from course_lib.workloads.gpt_job import load_everywhere
from course_lib.workloads.gpt_options import PRESETS, GptOptions, parse_options
from course_lib.workloads.text import Vocabulary, bigram_loss, load_text

SCRIPT = "scripts/gpt_torchrun.py"
WINDOWS, BATCH, EPOCHS, STEPS = 39, 14, 2, 6  # three steps an epoch, the last one of 11 windows
SHORT = ("--global-batch-size", BATCH, "--epochs", EPOCHS, "--snapshot-every", 2, "--dropout", 0.1)


def text_file(folder: Path, length: int = 2800, seed: int = 0) -> Path:
    """A text of a few words in a random order."""
    words = ["a", "model", "learns", "which", "word", "follows", "which,", "and", "in", "this", "text", "none", "does"]
    draws = random.Random(seed)
    path = folder / f"text-{length}-{seed}"
    path.write_text(" ".join(draws.choice(words) for _ in range(length))[:length])
    return path


def job(run_dir: Path, *options: str | float | Path, ranks: int = 2, max_restarts: int = 0) -> Completed:
    """The short job on the small text, under a plain torchrun; `options` have the last word."""
    text = text_file(run_dir.parent)
    return torchrun(
        "--text", text, *SHORT, *options, script=SCRIPT, nproc=ranks, max_restarts=max_restarts, run_dir=run_dir
    )


def result(run_dir: Path) -> dict[str, Any]:
    """What must not depend on a crash."""
    names = ("weights_sha256", "optimizer_sha256", "steps", "epochs", "test_accuracy")
    sample = (run_dir / "sample.txt").read_text(encoding="utf-8")
    return {name: report(run_dir)[name] for name in names} | {"losses": losses(run_dir), "sample": sample}


@cache
def undisturbed(ranks: int, *options: str | float) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        done = job(Path(folder) / "run", *options, ranks=ranks)
        assert done.returncode == 0, done.tail()
        return result(Path(folder) / "run")


@pytest.mark.parametrize("ranks", [2, 3])
def test_killed_and_resumed_it_is_the_run_that_never_died(tmp_path: Path, ranks: int) -> None:
    run_dir = tmp_path / "run"
    done = job(run_dir, "--fault", "kill:rank=1,step=3", ranks=ranks, max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert report(run_dir)["generations"] == 2 and report(run_dir)["steps"] == STEPS
    assert_samples_once(run_dir, WINDOWS, EPOCHS)
    assert result(run_dir) == undisturbed(ranks)
    if ranks == 2:
        refuses_another_text(run_dir)
        holds_the_vocabulary(run_dir)


def refuses_another_text(run_dir: Path) -> None:
    """Case H7: the same numbers would mean other characters."""
    other = text_file(run_dir.parent, seed=1)
    command = [sys.executable, REPO / SCRIPT, "--text", other, *map(str, SHORT), "--run-dir", run_dir]
    done = launch(command, env=torchrun_env())
    lines = [line for line in done.output.splitlines() if not line.startswith("running on")]
    assert done.returncode == 2 and len(lines) == 1, done.tail()
    here, there = (load_text(str(p), 64).identity for p in (other, text_file(run_dir.parent)))
    assert f"text {there} there, {here} here" in lines[0] and lines[0].startswith("error: ")


def holds_the_vocabulary(run_dir: Path) -> None:
    """What the model writes can be read with nothing but a snapshot."""
    newest = max((run_dir / "snapshots").glob("*.pt"))
    state = torch.load(newest, map_location="cpu", weights_only=True)["state"]
    characters = set(text_file(run_dir.parent).read_text())
    assert Vocabulary(**state["extra.vocabulary"]).characters == "".join(sorted(characters))
    assert len(state["model"]["characters.weight"]) == len(characters)


@pytest.mark.slow
def test_with_virtual_shards_any_number_of_ranks_gives_the_same_bits(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shards = ("--virtual-shards", 4)
    assert job(run_dir, *shards, "--fault", "kill:rank=1,step=3", ranks=3).returncode == 1
    done = job(run_dir, *shards, ranks=2)
    assert done.returncode == 0, done.tail()
    assert report(run_dir)["world_sizes"] == [3, 2]
    assert result(run_dir) == undisturbed(1, *shards)


@pytest.mark.slow
def test_the_default_beats_a_table_of_pairs_by_far(tmp_path: Path) -> None:
    """It must know more than which character follows which, and less than one that sees what it is to guess.

    Seeds 0, 1 and 2 ended between 1.37 and 1.39 nats a character, where the table reaches 2.32. The gap of 0.7 is what
    longer contexts tell. Below 1 nat no model of 0.1 M parameters gets on this text: it would have seen the answers.
    """
    run_dir = tmp_path / "run"
    done = torchrun(script=SCRIPT, run_dir=run_dir)
    assert done.returncode == 0, done.tail()
    loss = read_events(run_dir).named("epoch")[-1]["test_loss"]
    baseline = bigram_loss(load_text("pydoc", 64))
    assert 1.0 < loss < baseline - 0.7
    assert f"test loss {loss:.4f} nats a character; a table of character pairs reaches {baseline:.4f}" in done.output
    assert len((run_dir / "sample.txt").read_text(encoding="utf-8")) == 201


@pytest.mark.slow
def test_the_original_size_trains_and_resumes(tmp_path: Path) -> None:
    """25 M parameters, 0.3 GB a snapshot; two steps of two windows."""
    text = text_file(tmp_path, 4 * 128 + 1 + 129)
    options = ("--text", text, "--preset", "seed", "--epochs", 1, "--global-batch-size", 2, "--snapshot-every", 1)
    for name, fault in (("whole", ()), ("killed", ("--fault", "kill:rank=1,step=1"))):
        done = torchrun(*options, *fault, script=SCRIPT, max_restarts=1, run_dir=tmp_path / name)
        assert done.returncode == 0, done.tail()
    assert report(tmp_path / "killed")["generations"] == 2
    assert result(tmp_path / "killed") == result(tmp_path / "whole")
    assert result(tmp_path / "whole")["steps"] == 2


def its_own_text(world: World, folder: Path) -> str:
    argv = ["--text", str(text_file(folder, seed=world.rank % 2))]
    return load_everywhere(parse_options("", "group", "snapshots", argv=argv), world).identity


def test_nodes_with_different_texts_are_refused(tmp_path: Path) -> None:
    for outcome in on_ranks(2, its_own_text, tmp_path):
        assert isinstance(outcome, UsageError) and "the nodes have different texts" in str(outcome)


def test_the_script_is_short_and_has_the_options_of_the_others() -> None:
    assert len((REPO / SCRIPT).read_text().splitlines()) < 120
    done = launch([sys.executable, REPO / SCRIPT, "--help"], env=torchrun_env())
    assert done.returncode == 0
    for field in fields(GptOptions):
        assert f"--{field.name.replace('_', '-')} " in done.output.replace("]", " ").replace(",", " ")


def test_a_preset_sets_defaults_and_what_is_given_counts() -> None:
    assert PRESETS.keys() == SHAPES.keys()
    default, seed = (parse_options("", "group", "snapshots", argv=argv) for argv in ([], ["--preset", "seed"]))
    assert default.preset == "nano" and default.text == "pydoc"
    for options in (default, seed):
        assert {name: getattr(options, name) for name in PRESETS[options.preset]} == PRESETS[options.preset]
    argv = ["--preset=seed", "--lr", "0.5", "--dropout", "0"]
    mixed = parse_options("", "group", "snapshots", argv=argv)
    assert (mixed.lr, mixed.dropout, mixed.global_batch_size) == (0.5, 0.0, PRESETS["seed"]["global_batch_size"])
    for wrong in (["--preset", "huge"], ["--preset"], ["--dropout", "1"], ["--data", "digits"]):
        with pytest.raises(UsageError, match=wrong[0]):
            parse_options("", "group", "snapshots", argv=wrong)
