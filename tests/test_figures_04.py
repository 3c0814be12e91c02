"""Notebook 04: the fingerprints of the line-up, the simulated kills, and the figures drawn from events."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from course_lib.lab import fig04, lineup
from course_lib.lab.crashes import killed_at


def first_difference(curve: list[float], whole: list[float]) -> int | None:
    """The first step after the resume at which two curves are not exactly the same."""
    pairs = zip(curve, whole[lineup.DEATH :], strict=False)
    return next((step for step, (a, b) in enumerate(pairs) if a != b), None)


def test_every_missing_piece_has_its_fingerprint() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = lineup.uninterrupted()
    left = len(whole.train) - lineup.DEATH
    found = {piece: lineup.resume_without(piece) for piece in lineup.PIECES}
    firsts = {piece: first_difference(curves.train, whole.train) for piece, curves in found.items()}
    assert firsts == {
        "random state": 0,
        "position": 0,
        "epoch off by one": 0,
        "optimizer": 1,
        "scheduler": 2,
        "buffers": None,
        "nothing missing": None,
    }
    assert first_difference(found["buffers"].held_out, whole.held_out) == 0
    assert first_difference(found["nothing missing"].held_out, whole.held_out) is None
    lengths = {piece: len(curves.train) - left for piece, curves in found.items()}
    assert lengths == {piece: {"position": 6, "epoch off by one": 12}.get(piece, 0) for piece in lineup.PIECES}
    assert torch.equal(before, torch.get_rng_state())


def test_the_suspects_are_shuffled_and_complete() -> None:
    assert sorted(lineup.suspects().values()) == sorted(lineup.PIECES)
    assert list(lineup.suspects().values()) not in (list(lineup.PIECES), sorted(lineup.PIECES))


def test_a_function_is_killed_at_each_of_its_places(tmp_path: Path) -> None:
    target = tmp_path / "file"

    def save(data: bytes) -> None:
        with target.open("wb") as file:
            file.write(data)
        os.replace(target, tmp_path / "done")  # noqa: PTH105

    seen: dict[str, tuple[bytes | None, bool]] = {}
    for at in range(1, 50):
        target.unlink(missing_ok=True)
        (tmp_path / "done").unlink(missing_ok=True)
        where = killed_at(at, save, b"12345678")
        if where is None:
            break
        # Python comes to the line of a `with` twice: the first time counts.
        left = target.read_bytes() if target.exists() else None
        seen.setdefault(where, (left, (tmp_path / "done").exists()))
    assert seen["before open"] == (None, False)
    assert seen["inside write"] == (b"1234", False)
    assert seen["before replace"] == (b"12345678", False)
    assert seen["before its line 1"] == (None, False)
    assert (tmp_path / "done").read_bytes() == b"12345678"


def write_events(run: Path, lives: list[tuple[int, int, list[int]]]) -> None:
    """A file for each (generation, rank, steps), with epochs of 4 steps of 2 samples."""
    (run / "events").mkdir(parents=True)
    for number, (generation, rank, steps) in enumerate(lives):
        common: dict[str, Any] = {"rank": rank, "world_size": 2, "generation": generation}
        events = [{"t": 10.0 * generation, "event": "process_start", **common}]
        events += [
            {"t": 10.0 * generation + 1 + step / 10, "event": "step", "step": step, "epoch": step // 4, "lr": 0.1}
            | {"samples": [step % 4 * 2, step % 4 * 2 + 2], "loss": 1 / (1 + step), **common}
            for step in steps
        ]
        text = "".join(json.dumps(event) + "\n" for event in events)
        (run / "events" / f"host-{number}.jsonl").write_text(text)


def test_figures_say_what_the_events_say(tmp_path: Path) -> None:
    first, second = list(range(6)), list(range(4, 8))
    write_events(tmp_path, [(0, 0, first), (0, 1, first), (1, 0, second), (1, 1, second)])
    overlay = fig04.overlay(tmp_path)
    assert "2 steps were done by both; difference exactly 0.0" in overlay.axes[1].get_title(loc="left")
    words = [text.get_text() for text in fig04.epochs_trained(tmp_path).axes[0].texts]
    assert words == ["epoch 0", "cut", "epoch 1"]
    words = [text.get_text() for text in fig04.life_of_a_job(tmp_path).axes[0].texts]
    assert words.count(" generation 0") == words.count(" generation 1") == 2
    texts = fig04.who_used_what(tmp_path).axes[0].texts
    places = {text.get_text().strip(): text.get_position() for text in texts}
    assert [*places] == ["start 1: 2 ranks", "start 2: 2 ranks", "lost, done again"]
    assert [round(y) for _, y in places.values()] == [0, 1, 1], "in the epoch of which it used most"
    for figure in (overlay, fig04.line_up()):
        assert figure._repr_png_().startswith(b"\x89PNG")
    assert [ax.get_title(loc="left") for ax in fig04.line_up().axes[:7]] == [f"curve {n}" for n in range(1, 8)]
