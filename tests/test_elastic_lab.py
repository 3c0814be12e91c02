"""What notebook 06 tells of a run on changing nodes: who was which rank, and what its record proves."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import REPO
from test_claims import crashed_run, epoch, step, write

from course_lib.lab import elastic_claims
from course_lib.lab.claims import BrokenRecord
from course_lib.lab.elastic_scenes import JOBS, evidence, read_scenes
from course_lib.lab.exercises import n06
from course_lib.lab.story import read_story, story, tell

RECORD = REPO / "notebooks" / "recorded" / "elastic.json"
Event = dict[str, Any]


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    return read_scenes(RECORD)


def elastic_run() -> dict[str, list[Event]]:
    """Two ranks, of which one dies in step 2; one alone until it is asked to stop after step 3; then two to the end."""

    def timed(event: Event, rank: int) -> Event:
        return event | {"seconds": 0.5, "own_seconds": 0.4 if rank == 1 else 0.1}

    files: dict[str, list[Event]] = {}
    plan = {1: (2, range(2), [0, 1]), 2: (1, range(1, 4), [0]), 3: (2, range(4, 6), [0, 1])}
    for generation, (size, steps, ranks) in plan.items():
        for rank in ranks:
            who = {"rank": rank, "world_size": size, "generation": generation}
            files[f"h-{generation}{rank}"] = [
                {"event": "process_start", "t": 100.0 * generation - 3, "rank": rank, "world_size": size,
                 "generation": None},
                {"event": "snapshot_loaded", "t": 100.0 * generation - 1, "step": steps[0], **who},
                *(timed(step(n, rank, generation, size), rank) for n in steps),
            ]  # fmt: skip
    files["h-20"] += [epoch(0, 0, 2, 1), _event("stop_requested", 2, 0, 1, 204)]
    for rank in (0, 1):
        files[f"h-3{rank}"] += [epoch(1, rank, 3), _event("finish", 3, rank, 2, 307)]
    files["h-10"] += [_event("error", 1, 0, 2, 103) | {"error": "PeerLost: gone"}]
    return files


def _event(name: str, generation: int, rank: int, size: int, t: float) -> Event:
    return {"event": name, "t": t, "rank": rank, "world_size": size, "generation": generation, "step": 9}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write(tmp_path / "run", elastic_run())
    deeds = [(90, "start", "a"), (90, "start", "b"), (102, "kill", "a"), (204, "stop", "b")]
    (folder / "logs").mkdir()
    lines = [json.dumps({"t": t, "what": what, "node": node}) + "\n" for t, what, node in deeds]
    (folder / "logs" / "story.jsonl").write_text("".join(lines))
    return folder


# --- who was which rank -------------------------------------------------------------------------------------------


def test_ranks_are_dealt_to_the_nodes_that_are_there(run: Path) -> None:
    told = read_story(run)
    assert [(life.generation, life.rank, life.node) for life in told.lives] == [
        (1, 0, "a"),
        (1, 1, "b"),
        (2, 0, "b"),
        (3, 0, "d"),  # nobody of a and b is there: one machine by itself, with two ranks
        (3, 1, "d"),
    ]
    first = told.lives[0]
    assert (first.born, first.trained, first.busy, first.ended) == (97 - 90, 100 - 90, 101 - 90, 103 - 90)
    assert told.lives[2].busy == told.lives[2].ended == 204 - 90, "it ended in order"
    assert [deed.t for deed in told.deeds] == [0, 0, 12, 114]


def test_a_spare_is_no_member_until_it_is_needed() -> None:
    deeds = [{"t": t, "what": what, "node": node} for t, what, node in
             ((0, "start", "c"), (1, "start", "b"), (2, "start", "a"), (120, "kill", "c"))]  # fmt: skip
    events = [step(0, rank, generation) for generation in (1, 2) for rank in (0, 1)]
    told = story(deeds, events)
    assert [life.node for life in told.lives] == ["b", "c", "a", "b"]


def test_deeds_are_written_down_as_they_come(tmp_path: Path) -> None:
    tell(tmp_path, "start", "a", "b")
    tell(tmp_path, "hang", "b")
    lines = (tmp_path / "logs" / "story.jsonl").read_text().splitlines()
    assert [(json.loads(line)["what"], json.loads(line)["node"]) for line in lines] == [
        ("start", "a"),
        ("start", "b"),
        ("hang", "b"),
    ]


# --- claims -------------------------------------------------------------------------------------------------------


def test_claims_of_a_sound_record(run: Path, tmp_path: Path) -> None:
    assert elastic_claims.journey(run) == [2, 1, 2]
    assert elastic_claims.batch_sizes(run) == {1: 4, 2: 4}
    assert elastic_claims.done_again(run) == {"planned": 0, "death": 1}
    assert elastic_claims.own_times(run, 2) == {0: (0.5, 0.1), 1: (0.5, 0.4)}
    assert elastic_claims.slowest(run, 2) == 1
    other = write(tmp_path / "other", crashed_run())
    assert elastic_claims.journey(other) == [2], "a restart on as many ranks is no change"
    assert elastic_claims.done_again(other) == {"planned": 0, "death": 2}


def test_a_stop_that_not_all_ranks_heard_of_was_not_planned(tmp_path: Path) -> None:
    files = elastic_run()
    files["h-10"][-1] = _event("stop_requested", 1, 0, 2, 103)  # in place of its error
    assert elastic_claims.done_again(write(tmp_path / "one", files)) == {"planned": 0, "death": 1}
    files["h-11"] += [_event("stop_requested", 1, 1, 2, 103)]
    assert elastic_claims.done_again(write(tmp_path / "both", files)) == {"planned": 1, "death": 0}


def test_a_run_whose_last_start_is_missing_proves_nothing(run: Path) -> None:
    for path in run.glob("events/h-3*.jsonl"):
        path.unlink()
    with pytest.raises(BrokenRecord):
        elastic_claims.slowest(run, 2)


@pytest.mark.parametrize("claim", ["journey", "batch_sizes", "done_again"])
def test_no_claim_rests_on_a_broken_record(run: Path, claim: str) -> None:
    path = run / "events" / "h-20.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"step": 2' not in line]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BrokenRecord):
        getattr(elastic_claims, claim)(run)


# --- the record ---------------------------------------------------------------------------------------------------


def test_the_recorded_jobs_are_what_the_exercise_says(scenes: dict[str, Any]) -> None:
    for letter, said in n06.culprits.solution.items():
        fault, rank = JOBS[letter], said.split()[1]
        assert f"rank={rank}" in fault
        assert fault.split(":")[0] == {"is": "slow", "hangs": "hang", "was": "kill"}[said.split()[2]]
        events = scenes["jobs"][letter]["events"]
        silent = [r for r in range(3) if not any(e["event"] == "error" and e["rank"] == r for e in events)]
        assert silent == ([int(rank)] if said.split()[2] != "is" else [0, 1, 2])


def test_the_evidence_shows_what_the_answers_rest_on(scenes: dict[str, Any]) -> None:
    jobs = evidence(scenes, "ABCD").split("\n\n")
    assert [job.split()[1] for job in jobs] == list("ABCD")
    assert jobs[0].count("finished") == 3 and "PeerLost" not in jobs[0]
    for job, timeout in zip(jobs[1:], (True, False, True), strict=True):
        later = [float(line.split(" s later")[0].split()[-1]) for line in job.splitlines() if "PeerLost" in line]
        assert len(later) == 2 and job.count("nothing") == 1
        assert all((seconds > 3) is timeout for seconds in later)
    assert "hang" not in "".join(jobs) and "kill" not in "".join(jobs)


def test_each_recorded_settings_wait_is_what_they_add_up_to(scenes: dict[str, Any]) -> None:
    """The last heartbeat is at most one interval old, and an agent that waits looks once a second."""
    for found in scenes["losses"].values():
        interval, attempts = found["settings"]["keep_alive_interval"], found["settings"]["keep_alive_max_attempt"]
        least = interval * (attempts - 1) + found["settings"]["last_call_timeout"]
        assert least < found["until_new_worker"] < found["until_next_step"]
