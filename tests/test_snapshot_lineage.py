"""Which snapshots a new generation may load, against a model: the history that the newest generation has trained.

A history is the tuple of the generations that did each step. A snapshot is of the newest generation's line when its
history is a beginning of the newest's own. That says nothing of claims, parents or tokens, which the code has.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from snapshot_tools import Generation, find, flip, names, start

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import Claim, Manifest
from course_lib.engine.snapshots.records import lineage

History = tuple[int, ...]


@dataclass
class Life:
    """A generation, and what it has trained; it may be a zombie."""

    generation: Generation
    history: History


class Runs(RuleBasedStateMachine):
    """Generations start, train and publish, also long after they were superseded, on a disk that damages files."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir = Path(tempfile.mkdtemp())
        self.fsync = patch.object(os, "fsync")  # durability is another test's; here it's only slow
        self.fsync.start()
        self.lives: list[Life] = []
        self.histories: dict[str, History] = {}
        self.bad_payloads: set[str] = set()
        self.bad_manifests: set[str] = set()

    def teardown(self) -> None:
        self.fsync.stop()
        shutil.rmtree(self.run_dir)

    def on_disk(self) -> set[str]:
        """The snapshots whose manifests are there, in whatever state."""
        there = names(self.run_dir, ".json") if self.lives else []
        return {name for name in there if not name.endswith(".claim")}

    def expected(self) -> tuple[str | None, bool]:
        """The snapshot to load, or None, and then whether that is an error: a snapshot was there and is bad."""
        newest = self.lives[-1].history if self.lives else ()
        unread = self.on_disk() & self.bad_manifests
        line = {n for n in self.on_disk() - unread if self.histories[n] == newest[: len(self.histories[n])]}
        if good := line - self.bad_payloads:
            return max(good, key=lambda name: (len(self.histories[name]), name)), False
        return None, bool(line or unread)

    def check_found(self) -> None:
        name, refused = self.expected()
        if refused:
            with pytest.raises(UsageError, match="none of the snapshots"):
                find(self.run_dir)
            return
        found = find(self.run_dir)
        assert (found.manifest.name if found.manifest else None) == name
        assert tuple(found.content.get("history", ())) == (self.histories[name] if name else ())

    @rule(keep=st.integers(1, 3))
    def start(self, keep: int) -> None:
        name, refused = self.expected()
        self.check_found()
        if not refused:
            generation = start(self.run_dir, keep)
            assert generation.claim.parent == name and generation.claim.generation == len(self.lives) + 1
            self.lives.append(Life(generation, self.histories[name] if name else ()))

    def train_and_save(self, life: Life, steps: int) -> None:
        life.history += (life.generation.claim.generation,) * steps
        name = life.generation.save(len(life.history), history=list(life.history)).name
        self.histories[name] = life.history

    @precondition(lambda self: self.lives)
    @rule(steps=st.integers(1, 4))
    def newest_saves(self, steps: int) -> None:
        self.train_and_save(self.lives[-1], steps)
        self.check_found()
        assert self.expected()[0] == max(self.histories, key=lambda n: (self.histories[n] == self.lives[-1].history, n))

    @precondition(lambda self: len(self.lives) > 1)
    @rule(back=st.integers(2, 5), steps=st.integers(1, 9))
    def zombie_saves(self, back: int, steps: int) -> None:
        before = self.on_disk(), self.expected()
        self.train_and_save(self.lives[-min(back, len(self.lives))], steps)
        assert before[0] <= self.on_disk(), "a zombie removed something"
        assert self.expected() == before[1]
        self.check_found()

    @precondition(lambda self: self.on_disk() - self.bad_payloads - self.bad_manifests)
    @rule(newest=st.booleans(), how=st.sampled_from(["flip", "cut", "lose", "manifest"]))
    def damage(self, newest: bool, how: str) -> None:
        whole = self.on_disk() - self.bad_payloads - self.bad_manifests
        name = (self.expected()[0] if newest else None) or min(whole)
        payload = self.run_dir / "snapshots" / f"{name}.pt"
        if how == "flip":
            flip(payload, 100)
        elif how == "cut":
            os.truncate(payload, 10)
        elif how == "lose":
            payload.unlink()
        else:
            payload.with_suffix(".json").write_bytes(b"")
        (self.bad_manifests if how == "manifest" else self.bad_payloads).add(name)
        self.check_found()


TestRuns = Runs.TestCase
TestRuns.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def claim(generation: int, parent: str | None) -> Claim:
    return Claim(generation, f"token-{generation}", parent, "none", "host", 1)


def manifest(generation: int, step: int, parent: str | None = None) -> Manifest:
    return Manifest(step, 0, generation, f"token-{generation}", parent, "", 0, 1)


def steps_of(claims: Iterable[Claim], manifests: Iterable[Manifest]) -> list[tuple[int, int]]:
    return [(m.generation, m.step) for m in lineage(claims, manifests)]


def name(generation: int, step: int) -> str:
    return manifest(generation, step).name


def test_the_line_goes_back_through_the_parents_and_leaves_out_what_came_after_them() -> None:
    claims = [claim(1, None), claim(2, name(1, 20)), claim(3, name(1, 20)), claim(5, name(3, 40))]
    manifests = [manifest(g, s) for g in range(1, 6) for s in (10, 20, 30, 40, 50)]
    assert steps_of(claims, manifests) == [(5, s) for s in (50, 40, 30, 20, 10)] + [
        *((3, s) for s in (40, 30, 20, 10)),
        *((1, s) for s in (20, 10)),
    ]
    assert steps_of(claims[:3], manifests[:15])[5:] == [(1, 20), (1, 10)]


def test_a_snapshot_of_another_group_with_the_same_number_is_not_of_the_line() -> None:
    stranger = replace(manifest(1, 30), token="another group")
    assert steps_of([claim(1, None)], [manifest(1, 20), stranger]) == [(1, 20)]


@pytest.mark.parametrize("parent", [name(2, 5), name(3, 5), "best", ""])
def test_a_forged_parent_ends_the_line_instead_of_looping(parent: str) -> None:
    manifests = [manifest(1, 5), manifest(2, 5), manifest(3, 5)]
    assert steps_of([claim(1, None), claim(2, parent)], manifests[:2]) == [(2, 5)]
    assert steps_of([claim(2, name(3, 5)), claim(3, name(2, 5))], manifests[1:]) == [(3, 5), (2, 5)]


def test_claims_that_were_not_copied_along_are_made_up_from_the_manifests() -> None:
    manifests = [manifest(1, 10), manifest(1, 20), manifest(2, 12, parent=name(1, 10))]
    assert steps_of([], manifests) == [(2, 12), (1, 10)]
    assert steps_of([], []) == []
