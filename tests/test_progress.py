"""A step that kills every generation stops the job; anything else doesn't."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from toys import Toy, events

from course_lib.engine import UsageError
from course_lib.engine.progress import Deaths, hopeless_step, last_words, merge
from course_lib.engine.snapshots import Claim
from course_lib.engine.step import Step


def claims(run_ids: str = "aaa") -> list[Claim]:
    return [Claim(i + 1, f"token{i}", None, run_id, "host", 1) for i, run_id in enumerate(run_ids)]


@pytest.mark.parametrize(
    ("run_ids", "deaths", "expected"),
    [
        ("aaa", {1: 7, 2: 7, 3: 7}, 7),
        ("aaa", {1: 0, 2: 0, 3: 0}, 0),
        ("aaaa", {1: 5, 2: 7, 3: 7, 4: 7}, 7),
        ("aaaa", {1: 7, 2: 7, 3: 7, 4: 8}, None),  # the last one got further
        ("aaa", {1: 7, 2: 8, 3: 7}, None),
        ("aaa", {1: 7, 2: None, 3: 7}, None),  # one was asked to stop
        ("aaa", {1: 7, 3: 7}, None),  # one left no word
        ("aa", {1: 7, 2: 7}, None),
        ("baa", {1: 7, 2: 7, 3: 7}, None),  # started anew after the first death
        ("bbb", {1: 7, 2: 7, 3: 7}, None),
        ("", {}, None),
    ],
)
def test_three_deaths_in_a_row_in_one_step_of_one_job(
    run_ids: str, deaths: Deaths, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert hopeless_step(claims(run_ids), deaths) == expected
    assert hopeless_step(reversed(claims(run_ids)), deaths) == expected


def test_a_run_that_is_started_by_hand_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    by_hand = [replace(claim, run_id="none") for claim in claims()]
    assert hopeless_step(by_hand, {1: 7, 2: 7, 3: 7}) is None


@pytest.mark.parametrize(
    ("known", "others", "expected"),
    [
        ({}, {1: 5}, {1: 5}),
        ({1: 5}, {1: 6}, {1: 6}),
        ({1: 6}, {1: 5}, {1: 6}),
        ({1: 6}, {1: None}, {1: None}),
        ({1: None}, {1: 6}, {1: None}),
        ({1: 6}, {2: 3}, {1: 6, 2: 3}),
    ],
)
def test_what_the_nodes_know_is_put_together(known: Deaths, others: Mapping[int, int | None], expected: Deaths) -> None:
    merge(known, others)
    assert known == expected


def write(run_dir: Path, name: str, *lines: object) -> None:
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (run_dir / "events" / f"{name}.jsonl").write_text(text)


def event(name: str, generation: int, step: int = 0) -> dict[str, object]:
    return {"event": name, "generation": generation, "step": step, "t": 1.0, "rank": 0, "world_size": 2}


def test_the_last_words_are_read_from_the_ends_of_all_logs(tmp_path: Path) -> None:
    begun = [event("snapshot_loaded", 1, 5), event("warm_up", 1, 5)]
    write(tmp_path, "a", *begun, event("step", 1, 5), event("step", 1, 6), '{"torn')
    write(tmp_path, "b", *begun, event("step", 1, 5), *(["x" * 100] * 1000), event("step", 1, 7), [1], "")
    write(tmp_path, "c", event("snapshot_loaded", 2, 5))  # died before it had a batch
    write(tmp_path, "d", event("warm_up", 3, 5))  # died with it
    write(tmp_path, "e", event("warm_up", 4, 5), event("step", 4, 5), event("stop_requested", 4, 6))
    write(tmp_path, "f", event("step", 9, 100))
    assert last_words(tmp_path, [1, 2, 3, 4, 5]) == {1: 8, 2: None, 3: 5, 4: None}
    assert last_words(tmp_path / "nowhere", [1]) == {}


class Poisoned(Toy):
    """Each process dies in step `at`, also when that is the first step after its start."""

    at = 4

    def body(self, step: Step) -> None:
        if step.number == self.at:
            raise RuntimeError("poison")
        super().body(step)


def test_the_job_stops_and_names_the_samples(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match="poison"):
            Poisoned(tmp_path, snapshot_every=2).run()
    toy = Poisoned(tmp_path, snapshot_every=2)
    indices = toy.trainer.plan.permutation(0)[32:40].tolist()
    words = f"all died in step 4, on the samples {', '.join(map(str, indices))} of the data set"
    with pytest.raises(UsageError, match=words):
        toy.run()
    assert [e["indices"] for e in events(tmp_path, "no_progress")] == [indices]
    with pytest.raises(RuntimeError, match="poison"):  # the next start tries it again
        Poisoned(tmp_path, snapshot_every=2).run()
    assert Toy(tmp_path, snapshot_every=2).run().trainer.progress.position.step == 10


def test_deaths_in_other_steps_do_not_count(tmp_path: Path) -> None:
    for at in (4, 4, 5, 4, 4, 6):
        toy = Poisoned(tmp_path, snapshot_every=20)
        toy.at = at
        with pytest.raises(RuntimeError, match="poison"):
            toy.run()
    assert Toy(tmp_path, snapshot_every=20).run().trainer.progress.position.step == 10


def test_in_the_first_step_of_an_epoch_the_samples_are_those_of_the_new_one(tmp_path: Path) -> None:
    for end in (RuntimeError, RuntimeError, RuntimeError, UsageError):
        toy = Poisoned(tmp_path, snapshot_every=2)
        toy.at = 5
        with pytest.raises(end):
            toy.run()
    (told,) = events(tmp_path, "no_progress")
    assert (told["epoch"], told["indices"]) == (1, toy.trainer.plan.permutation(1)[:8].tolist())


def test_a_log_with_odd_lines_is_read_all_the_same(tmp_path: Path) -> None:
    odd = [event("warm_up", 1, 5) | {"generation": [1]}, event("step", 1) | {"step": None}, {"event": "step"}]
    write(tmp_path, "a", *odd, event("warm_up", 1, 5), *odd)
    assert last_words(tmp_path, [1]) == {1: 5}
