"""Constants and goodput from a job's events, and that the prediction for them is right when the model is."""

import json
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers import BENCH

from course_lib.engine import UsageError
from course_lib.engine.runlog import Event
from course_lib.lab.constants import measure, measured_goodput, window

Launch = Callable[..., helpers.Completed]
STEP, PACE, STALL, WRITE, RECOVERY, EVERY = 0.08, 0.1, 0.02, 0.15, 2.5, 20


def job(kills: list[float], end: float) -> list[Event]:
    """The events of two ranks of a job that does all as the model says; the first step's begins at 100.0."""
    events: list[Event] = []
    now, done, saved, generation = 100.0, 0, 0, 1
    for at in [*kills, end]:
        flight: tuple[float, int] | None = None
        while now + PACE <= at:
            now, number, done = now + PACE, done, done + 1
            if flight is not None and flight[0] <= now:
                times = {"stall_s": STALL, "write_s": STALL + WRITE, "bytes": 9}
                events.append(event("snapshot_saved", now, 0, generation, step=flight[1], **times))
                saved, flight = flight[1], None
            events += [event("step", now, rank, generation, step=number, seconds=STEP) for rank in (0, 1)]
            if done % EVERY == 0:
                now += STALL
                flight = now + WRITE, done
        if flight is not None and flight[0] <= at:
            saved = flight[1]  # published, though nobody came to log it
        now, done, generation = at + RECOVERY, saved, generation + 1
    return sorted(events, key=lambda e: float(e["t"]))


def event(name: str, t: float, rank: int, generation: int, **fields: Any) -> Event:
    return {"t": t, "event": name, "rank": rank, "world_size": 2, "generation": generation, **fields}


def test_the_constants_of_a_job_are_found_in_its_events() -> None:
    kills = [107.33, 120.0, 121.0, 140.5]  # the third one in the recovery from the second
    found = measure(job(kills, 160.0), kills)
    assert astuple(found) == pytest.approx((PACE, STEP / PACE, STALL, WRITE, RECOVERY), rel=1e-6)
    assert measure(job([], 160.0)).recovery_s == 0.0


def test_what_holds_no_constants_is_refused() -> None:
    with pytest.raises(UsageError, match="published snapshot"):
        measure(job([], 101.0))
    with pytest.raises(UsageError, match="no step"):
        window([])


def test_goodput_counts_the_steps_that_stay() -> None:
    kill = 105.0  # 40 steps are saved, 49 were done, and the 50th was not
    events = job([kill], 112.0)
    begin, end = window(events)
    assert begin == pytest.approx(100.1 - STEP) and 111.9 < end <= 112.0
    # From 107.5 on, 44 of 0.1 s and two stalls of 0.02 s fit.
    assert measured_goodput(events) == pytest.approx((40 + 44) * STEP / (end - begin))
    assert measured_goodput(job([], 112.0)) == pytest.approx(STEP / (PACE + STALL / EVERY), rel=0.01)


def test_the_prediction_for_a_job_that_does_as_the_model_says_is_right(bench: Callable[[str], Any]) -> None:
    kills = [104.5, 104.9, 111.0, 123.45, 140.0, 141.0, 158.8]
    events = job(kills, 175.0)
    found = measure(events, kills)
    rows = bench("goodput").compare(events, kills, found, EVERY, mtbf_s=10.0)
    assert rows["kills"] == 7 and rows["window_s"] == pytest.approx(75, abs=0.2)
    assert rows["measured"] == pytest.approx(rows["predicted_for_these_times"], abs=0.01)
    wrong = replace(found, recovery_s=2 * found.recovery_s)
    worse = bench("goodput").compare(events, kills, wrong, EVERY, mtbf_s=10.0)
    assert rows["predicted_for_these_times"] - worse["predicted_for_these_times"] > 0.1
    assert rows["predicted_for_this_mtbf"] == pytest.approx(rows["formula"], abs=0.05)


def test_random_waits_are_as_long_as_asked(bench: Callable[[str], Any]) -> None:
    waits = bench("goodput").memoryless(10.0, 5000.0, seed=1)
    assert sum(waits) == pytest.approx(5000.0) and 400 < len(waits) < 600
    assert waits == bench("goodput").memoryless(10.0, 5000.0, seed=1)


@pytest.mark.parametrize(("name", "option"), [("goodput", "--mtbf"), ("simulated_cluster", "--runs")])
def test_a_bench_refuses_a_number_that_makes_no_sense(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, option, "0"])
    with pytest.raises(UsageError, match=option):
        bench(name).main()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_campaign_of_kills_is_predicted_roughly(launch: Launch, tmp_path: Path) -> None:
    """The bench asks for 5 points, of a job of minutes on a quiet machine."""
    path = tmp_path / "goodput.json"
    options = ["--seconds", "40", "--mtbf", "12", "--seed", "1", "--points", "25", "--json", path]
    done = launch([sys.executable, BENCH / "goodput.py", *options], timeout=380, env=helpers.torchrun_env())
    assert done.returncode == 0, done.tail()
    result = json.loads(path.read_text())
    assert result["kills"] >= 2 and 0 < result["measured"] < 1
