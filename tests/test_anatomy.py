"""The anatomy of a recovery: its phases, on runs made by hand whose times are round."""

import pytest
from run_tools import S, event, history, life

from course_lib.engine.report import recovery_seconds
from course_lib.lab.anatomy import PHASES, Recovery, medians, recoveries
from course_lib.lab.history import Event
from course_lib.lab.ledger import ledger_of


def found(*files: list[Event]) -> list[Recovery]:
    """The recoveries of a run, and proof that each one's phases add up to it, rank by rank too."""
    result = recoveries(ledger_of(history(*files)).outages)
    for recovery in result:
        assert sum(phase.end - phase.begin for phase in recovery.phases) == recovery.total
        for phases in (recovery.phases, *recovery.ranks.values()):
            assert all(a.end == b.begin for a, b in zip(phases, phases[1:], strict=False))
    return result


def phases(recovery: Recovery, rank: int | None = None) -> dict[str, float]:
    chosen = recovery.phases if rank is None else recovery.ranks[rank]
    return {phase.name: (phase.end - phase.begin) / S for phase in chosen}


def killed() -> list[list[Event]]:
    """Two ranks; rank 1 is killed in step 3 at 7.25, rank 0 notices and leaves at 7.75; the next life begins at 10."""
    told = [*life(range(3)), event("error", 7.5, error="PeerLost"), event("left", 7.75, code=1)]
    victim = [*life(range(3), rank=1), event("fault", 7.25, 1, kind="kill", at="backward", step=3)]
    return [told, victim, *(life(range(2, 6), 10.0, 2, rank, spawned=9.75) for rank in (0, 1))]


def test_a_recovery_in_its_phases() -> None:
    (recovery,) = found(*killed())
    assert phases(recovery) == {
        "detection": 0.5,
        "rendezvous": 2.0,
        "process start": 0.25,
        "import": 1.0,
        "process group": 0.5,
        "data": 0.5,
        "snapshot load": 1.0,
        "first batch": 0.25,
        "warm-up": 0.75,
        "first step": 1.0,
    }
    assert set(phases(recovery)) <= set(PHASES)
    assert recovery.total == 7_750_000
    assert phases(recovery, 1) == {k: v for k, v in phases(recovery).items() if k != "detection"}


def test_it_agrees_with_the_engine() -> None:
    events = sorted((e for file in killed() for e in file), key=lambda e: float(e["t"]))
    assert recovery_seconds(events) == [recovery.total / S for recovery in found(*killed())]


def test_a_phase_ends_with_the_slowest_rank_and_the_recovery_with_the_first_record() -> None:
    lives = killed()
    late = {"imported": 0.25, "group_ready": 0.125, "step": 0.0625}
    lives[3] = [e | {"t": e["t"] + late.get(e["event"], 0.0)} for e in lives[3]]
    (recovery,) = found(*lives)
    assert recovery.total == 7_750_000
    job, own = phases(recovery), phases(recovery, 0)
    assert (job["import"], job["process group"], job["data"]) == (1.25, 0.25, 0.625)
    assert (own["import"], own["process group"], own["data"]) == (1.0, 0.5, 0.5)
    assert job["snapshot load"] == 0.875 and job["first step"] == 1 - 0.0625


def test_the_kill_ends_when_the_last_that_could_speak_has_left() -> None:
    third = [*life(range(3), rank=2), event("left", 8.5, 2, code=1)]
    (recovery,) = found(*killed(), third)
    assert (phases(recovery)["detection"], phases(recovery)["kill"], phases(recovery)["rendezvous"]) == (
        0.5,
        0.75,
        1.25,
    )


def test_what_cannot_be_told_apart_has_a_joint_name() -> None:
    lives = [[e for e in file if e["event"] != "left"] for file in killed()]
    lives = [[{k: v for k, v in e.items() if k not in ("spawned", "joined")} for e in file] for file in lives]
    (recovery,) = found(*lives)
    assert phases(recovery)["detection + kill + rendezvous + process start"] == 2.75
    assert phases(recovery)["process group + data"] == 1.0
    assert medians([recovery]) == phases(recovery)


def test_starts_that_failed_on_the_way_are_one_phase() -> None:
    failed = [*life((), 9.0, 2)[:3], event("fault", 11.5, 0, 2, kind="exception"), event("left", 11.75, 0, 2, code=1)]
    again = life(range(2, 6), 13.0, 3, spawned=12.75)
    (recovery,) = found(*killed()[:2], failed, again)
    assert phases(recovery)["failed starts"] == 11.5 - 7.25
    assert (phases(recovery)["detection"], phases(recovery)["rendezvous"]) == (0.25, 1.0)
    assert recovery.total == 10_750_000
    assert [attempt.generation for attempt in recovery.before] == [1, 2]


def test_a_job_that_was_launched_anew_was_idle_before() -> None:
    first, second = life(range(3), launched=-1.0), life(range(2, 6), 100.0, 2, launched=95.0, spawned=99.0)
    (recovery,) = found(first, second)
    assert list(phases(recovery).items())[:3] == [("idle", 88.0), ("launch + rendezvous", 4.0), ("process start", 1.0)]


def test_a_resume_that_evaluates_first() -> None:
    second = life([3], 10.0, 2)
    second.insert(4, event("epoch", 13.125, 0, 2, step=3, epoch=0))
    (recovery,) = found(life(range(3)), second)
    assert (phases(recovery)["evaluation"], phases(recovery)["first batch"]) == (0.125, 0.125)


@pytest.mark.parametrize("ended", ["stop_requested", "finish"])
def test_an_end_in_order_is_no_death(ended: str) -> None:
    first = [*life(range(3)), event(ended, 7.25, step=3)]
    second = life(range(3, 5), 3600.0, 2)
    assert found(first, second) == []
    assert recovery_seconds([*first, *second]) == []


def test_a_run_that_never_comes_back_has_no_recovery() -> None:
    assert found(*killed()[:2]) == []


def test_medians_are_over_all_recoveries() -> None:
    lives = [life(range(3)), life(range(2, 4), 10.0, 2), life(range(3, 6), 20.0, 3), life(range(5, 7), 40.0, 4)]
    result = found(*lives)
    assert [recovery.total / S for recovery in result] == [8.0, 9.0, 18.0]
    agent = "detection + kill + rendezvous + process start"
    assert [phases(recovery)[agent] for recovery in result] == [3.0, 4.0, 13.0]
    assert medians(result)[agent] == 4.0 and list(medians(result))[-1] == "first step"
