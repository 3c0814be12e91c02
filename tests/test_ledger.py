"""The ledger: every microsecond of a run in exactly one kind, on runs made by hand and on anything at all."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_tools import S, event, history, life, saved, step, write

from course_lib.engine import UsageError
from course_lib.engine.report import steps_replayed, summarize, surviving_steps
from course_lib.lab import ledger as ledger_module
from course_lib.lab.anatomy import recoveries
from course_lib.lab.history import Event, History
from course_lib.lab.ledger import KINDS, check_ledger, ledger_of
from course_lib.lab.recorded import attempts_of, read_history, workers_of


def seconds(run: History) -> dict[str, float]:
    """The kinds that occur, in seconds, and proof that they add up."""
    totals = ledger_of(run).totals()
    assert sum(totals.values()) == run.end - run.begin
    return {kind: total / S for kind, total in totals.items() if total}


def killed(*, fault: float | None = 10.25) -> list[list[Event]]:
    """Six steps up to t = 10, rank 1 is killed; the second life begins at 12 and does steps 4 and 5 again."""
    first = [life(range(6)), life(range(6), rank=1)]
    if fault is not None:
        first[1].append(event("fault", fault, 1, kind="kill", at="backward", step=6))
    return [*first, *(life(range(4, 8), 12.0, 2, rank) + [event("finish", 20.0, rank, 2)] for rank in (0, 1))]


def test_a_run_that_nobody_disturbs() -> None:
    told = [*life(range(3)), event("epoch", 7.5, step=3, epoch=0), event("finish", 7.75)]
    assert seconds(history(told)) == {"starting": 4.0, "productive": 3.0, "evaluating": 0.5, "stalled": 0.25}


def test_a_death_costs_the_cut_off_step_the_recovery_and_what_is_done_again() -> None:
    run = history(*killed())
    assert seconds(run) == {
        "starting": 4.0,
        "productive": 8.0,
        "replayed": 2.0,
        "lost": 0.25,
        "recovering": 16 - 10.25,
    }
    assert ledger_of(run).steps == {"productive": 8, "replayed": 2}


def test_a_death_that_no_fault_tells_of_is_dated_by_the_last_step() -> None:
    assert seconds(history(*killed(fault=None)))["recovering"] == 6.0
    assert "lost" not in seconds(history(*killed(fault=None)))


def test_a_slow_rank_is_no_death() -> None:
    told = life(range(3), rank=1) + [event("fault", 7.0, 1, kind="slow", at="eval", step=3), event("finish", 7.0, 1)]
    assert seconds(history(told)) == {"starting": 4.0, "productive": 3.0}


def test_replays_of_replays_count_once_each_and_what_is_never_done_again_is_lost() -> None:
    lives = [life(range(6)), life(range(2, 5), 12.0, 2), life(range(3, 5), 22.0, 3)]
    lives[2].append(event("stop_requested", 28.0, 0, 3, step=5))
    ledger = ledger_of(history(*lives))
    assert ledger.steps == {"productive": 2 + 1 + 2, "replayed": 3 + 2, "lost": 1}  # step 5 of the first life


def test_the_steps_of_a_run_that_was_given_up_are_lost_unless_a_snapshot_holds_them() -> None:
    told = life(range(6))
    assert ledger_of(history(told, durable=4)).steps == {"productive": 4, "lost": 2}
    assert ledger_of(history(told, durable=4, now=10.5)).steps == {"productive": 6}  # it is alive
    assert ledger_of(history([*told, event("finish", 10.5)], durable=4)).steps == {"productive": 6}


def test_a_run_that_is_alive_is_reported_as_of_now() -> None:
    assert seconds(history(life(range(3)), now=7.5)) == {"starting": 4.0, "productive": 3.0, "unattributed": 0.5}


def test_between_a_stop_and_the_next_launch_nothing_runs() -> None:
    first = [*life(range(3), launched=-1.0), event("stop_requested", 7.25, step=3), event("left", 7.5, code=143)]
    second = [*life(range(3, 5), 3610.0, 2, launched=3607.0), event("finish", 3616.0, 0, 2)]
    kinds = seconds(history(first, second))
    assert kinds == {"starting": 4 + 7, "productive": 5.0, "stalled": 0.25, "idle": 3607 - 7.25}
    old = [[{k: v for k, v in e.items() if k != "launched"} for e in life_] for life_ in (first, second)]
    assert seconds(history(*old))["idle"] == 3610 - 7.25  # a log that does not say when it was launched


def test_a_job_that_died_with_its_agent_is_idle_until_it_is_launched_anew() -> None:
    first = life(range(3), launched=-1.0)
    second = [*life(range(2, 5), 3610.0, 2, launched=3607.0), event("finish", 3617.0, 0, 2)]
    kinds = seconds(history(first, second))
    assert kinds == {"starting": 4.0, "productive": 5.0, "replayed": 1.0, "idle": 3600.0, "recovering": 7.0}
    again = [*life(range(2, 5), 3610.0, 2, launched=-1.0), event("finish", 3617.0, 0, 2)]
    assert seconds(history(first, again))["recovering"] == 3607.0  # its agent lived: it took so long to recover


def test_another_agent_that_lives_on_is_no_idle_time() -> None:
    lives = killed()
    lives[2] = [e | {"launched": 11.0} if e["event"] == "process_start" else e for e in lives[2]]  # the new node's
    lives[3] = [e | {"launched": -1.0} if e["event"] == "process_start" else e for e in lives[3]]
    assert "idle" not in seconds(history(*lives))


def test_a_start_that_fails_before_the_first_step_is_recovered_from() -> None:
    failed = [*life()[:3], event("fault", 2.5, 0, None, kind="exception", at="load", step=0)]
    run = history(failed, [*life(range(2), 5.0), event("finish", 11.0)])
    assert seconds(run) == {"starting": 2.5, "recovering": 6.5, "productive": 2.0}


def test_a_job_that_never_did_a_step() -> None:
    failed = [*life()[:3], event("error", 2.5, 0, None, error="no"), event("left", 3.0, 0, None, code=1)]
    assert seconds(history(failed)) == {"starting": 2.5, "recovering": 0.5}


def test_the_stall_of_a_snapshot_is_its_copy_and_what_the_engine_says_of_it() -> None:
    told = [*life(range(2)), step(2, 7.5), saved(2, 7.5, 0.25), event("finish", 7.5)]
    assert seconds(history(told))["stalled"] == 0.25
    told = [
        *life(range(2)),
        event("snapshot_skipped", 11.0, step=2, reason="slow"),
        step(2, 12.0),
        event("finish", 12.0),
    ]
    assert seconds(history(told)) == {"starting": 4.0, "productive": 3.0, "stalled": 5.0}


def test_an_evaluation_after_a_snapshot_and_one_that_is_done_again() -> None:
    first = [*life(range(2)), event("epoch", 7.0, step=2, epoch=0), saved(2, 7.0, 0.25), step(2, 8.0)]
    assert seconds(history([*first, event("finish", 8.0)]))["evaluating"] == 0.75
    again = [*life([1], 10.0, 2), event("epoch", 16.0, 0, 2, step=2, epoch=0), step(2, 17.0, 0, 2)]
    kinds = seconds(history(first, [*again, event("finish", 17.0, 0, 2)]))
    assert (kinds["evaluating"], kinds["replayed"]) == (1.0, 2 + 0.75)


def test_a_start_that_has_only_an_evaluation_left() -> None:
    second = [*life((), 10.0, 2, loaded=2), event("epoch", 14.0, 0, 2, step=2, epoch=0), event("finish", 14.5, 0, 2)]
    kinds = seconds(history([*life(range(2)), event("stop_requested", 6.0, step=2)], second))
    assert kinds == {"starting": 4 + 3, "productive": 2.0, "evaluating": 1.0, "stalled": 0.5, "idle": 4.0}


def test_what_nothing_tells_of_is_unattributed_and_refused_above_two_percent(tmp_path: Path) -> None:
    told = [*life(range(3)), step(3, 13.0), event("finish", 13.0)]  # five seconds' pause before the last step
    assert seconds(history(told)) == {"starting": 4.0, "productive": 4.0, "unattributed": 5.0}
    assert check_ledger(write(tmp_path, told)) == ["38.5% of 13.0 s is unattributed"]


def test_a_clock_that_is_set_back_moves_a_process_on_and_is_told() -> None:
    told = [*life(range(6)), event("finish", 10.0)]
    jumped = [e | {"t": e["t"] - 3600.0} if e["t"] > 7.5 else e for e in told]
    run = history(jumped)
    assert run.workers[0].back_us == 3599 * S
    # The step in which it happened ends where it began: its length is not known.
    assert seconds(run) == {"starting": 4.0, "productive": 5.0}


def test_a_loop_without_seconds_has_steps_that_follow_one_upon_the_other() -> None:
    told = [{k: v for k, v in e.items() if k != "seconds"} for e in life(range(4), generation=None)]
    told.append(event("finish", 8.0, generation=None))
    assert seconds(history(told)) == {"starting": 5.0, "productive": 3.0}


def test_an_old_generation_that_wakes_up_changes_nothing() -> None:
    lives = [life(range(3)), [*life(range(2, 9), 10.0, 2), event("finish", 21.0, 0, 2)]]
    before = seconds(history(*lives))
    lives[0].append(step(3, 18.5, seconds=11.5))  # it had been paused
    assert seconds(history(*lives)) == before


def test_ranks_of_one_file_a_pod_with_two_lives_and_a_rank_that_is_learnt_late() -> None:
    mixed = sorted(life(range(2)) + life(range(2), rank=1), key=lambda e: float(e["t"]))
    assert [(w.rank, len(w.events)) for w in workers_of("h-1", mixed)] == [(0, 7), (1, 7)]
    lives = workers_of("h-1", [*life(range(2)), *life(range(2, 4), 20.0, 2)])
    assert [(w.generation, w.born // S) for w in lives] == [(1, 0), (2, 20)]
    spawned = [e | {"rank": 0} for e in life(range(2), rank=3)[:2]] + life(range(2), rank=3)[2:]
    assert [(w.rank, w.born) for w in workers_of("h-1", spawned)] == [(3, 0)]
    twice = [e | {"rank": 0} for e in life((), 20.0, rank=3)[:2]] + life(range(2, 4), 20.0, 2, 3)[2:]
    assert [(w.rank, w.generation) for w in workers_of("h-1", [*spawned, *twice])] == [(3, 1), (3, 2)]


def test_a_second_run_in_one_process_begins_where_the_first_ended() -> None:
    again = [e | {"t": 0.0} if e["event"] == "process_start" else e for e in life(range(2, 4), 20.0, 2)]
    assert [w.born // S for w in workers_of("h-1", [*life(range(2)), *again])] == [0, 6]


def test_the_lowest_rank_whose_log_is_there_stands_for_all_and_the_world_may_change() -> None:
    lives = killed()
    smaller = [lives[1], *lives[2:], life(range(4, 8), 12.0, 2, 2)]
    assert seconds(history(*smaller)) == seconds(history(*lives))


def test_torn_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    told = [*life(range(3)), event("finish", 7.0)]
    torn = '{"t": NaN, "event": "x", "rank": 0, "generation": null}\n[]\n\n{"t": 1.0, "ev'
    run = read_history(write(tmp_path, told, tail=torn))
    assert run.bad_lines == 3
    assert seconds(run) == seconds(history(told))
    assert check_ledger(tmp_path) == []


@pytest.mark.parametrize("make", [lambda run: None, lambda run: write(run), lambda run: write(run, [], tail="{")])
def test_without_events_there_is_nothing_to_report(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path)
    with pytest.raises(UsageError, match="no run|no event") as refused:
        read_history(tmp_path)
    assert "\n" not in str(refused.value)


def test_the_check_sees_a_ledger_that_does_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *killed())
    assert check_ledger(tmp_path) == []
    whole = ledger_of(read_history(tmp_path))

    def shorter(_: History) -> Any:
        return ledger_module.Ledger(whole.pieces[:-2] + whole.pieces[-1:], whole.steps - Counter({"replayed": 1}), ())

    monkeypatch.setattr(ledger_module, "ledger_of", shorter)
    assert [text.split()[0] for text in check_ledger(tmp_path)] == ["the", "the", "8"]


NAMES = ("process_start", "imported", "group_ready", "snapshot_loaded", "warm_up", "step", "step", "step", "epoch",
         "snapshot_saved", "snapshot_skipped", "fault", "error", "left", "stop_requested", "finish")  # fmt: skip
TIMES = st.floats(-100, 1e4) | st.integers(0, 60).map(float)
ANY_EVENT = st.fixed_dictionaries(
    {
        "t": TIMES,
        "event": st.sampled_from(NAMES),
        "rank": st.integers(0, 2),
        "world_size": st.just(3),
        "generation": st.none() | st.integers(1, 4),
        "step": st.integers(0, 9),
    },
    optional={
        "seconds": st.floats(allow_nan=True) | st.just(1.0),
        "stall_s": st.floats(-5, 50) | st.text(max_size=2),
        "epoch": st.integers(0, 2) | st.lists(st.integers(), max_size=1),
        "kind": st.sampled_from(["kill", "slow"]),
        "launched": TIMES | st.none(),
        "spawned": TIMES,
        "joined": TIMES,
    },
)
FILES = st.lists(st.lists(ANY_EVENT, min_size=1, max_size=25), min_size=1, max_size=4)


@given(FILES, st.none() | st.integers(0, 2 * 10**10), st.integers(0, 9))
def test_whatever_the_logs_say_the_kinds_and_the_phases_add_up(
    files: list[list[Event]], now: int | None, durable: int
) -> None:
    workers = [worker for number, events in enumerate(files) for worker in workers_of(f"h-{number}", events)]
    assert sum(len(worker.events) for worker in workers) == sum(map(len, files))
    run = History(attempts_of(workers), now, durable)
    ledger = ledger_of(run)
    assert set(ledger.totals()) == set(KINDS)
    assert sum(ledger.totals().values()) == run.end - run.begin == ledger.wall
    assert all(piece.begin < piece.end for piece in ledger.pieces) or ledger.wall == 0
    assert all(a.end == b.begin for a, b in zip(ledger.pieces, ledger.pieces[1:], strict=False))
    for recovery in recoveries(ledger.outages):
        assert sum(phase.end - phase.begin for phase in recovery.phases) == recovery.total >= 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=4))
def test_the_engine_counts_the_same_steps_and_the_same_goodput(lives: list[tuple[int, int]]) -> None:
    files, t, reached = [], 0.0, 0
    for number, (back, count) in enumerate(lives, 1):
        first = max(0, reached - back)
        files.append(life(range(first, first + count), t, number))
        t, reached = t + 4 + count + 2, first + count
    files[-1].append(event("finish", t, 0, len(lives)))
    events = sorted((e for file in files for e in file), key=lambda e: float(e["t"]))
    ledger = ledger_of(history(*files))
    done = ledger.steps["productive"] + ledger.steps["lost"]
    assert (done, ledger.steps["replayed"]) == (len(surviving_steps(events)), steps_replayed(events))
    if not ledger.steps["lost"]:
        assert round(ledger.share("productive"), 4) == pytest.approx(summarize(events)["goodput"], abs=1e-4)
    totals = [recovery.total / S for recovery in recoveries(ledger.outages)]
    assert totals == pytest.approx(summarize(events)["recovery_seconds"])
