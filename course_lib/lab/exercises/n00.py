"""Exercises of notebook 00."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course_lib.engine import read_events
from course_lib.lab.checks import Exercise, choose, predict
from course_lib.lab.claims import every_sample_once, restarts
from course_lib.lab.plots import starts

bet = choose(
    "d",
    hints={
        "a": "look where start 2 begins: not at step 0",
        "b": "both process ids are new after the kill, and steps that were done before it are done again",
        "c": "the lowest panel is more than nearly flat: read the number that it gives",
    },
    why="back to a snapshot, and from there bit for bit the undisturbed run",
)

done_again = predict(
    12,
    wrong=[10, 13, 2, 61],
    hints={
        10: "a snapshot after 20 steps holds the steps 0 to 19, so step 20 is lost, too",
        2: "that is the number of deaths; count the steps that two starts did",
        61: "that is the last step plus the number of repeats; count the repeats alone",
    },
    hint="write down the steps that start 1 and start 2 both did, then those of start 2 and start 3",
    why="7 (the steps 20 to 26) and 5 (the steps 30 to 34)",
)


def _killed_twice(name: str | Path, folder: Path = Path()) -> str | None:
    run = folder / name
    if not (run / "events").exists():
        return f"{run} holds no events: start a job with --run-dir and this directory"
    deaths = restarts(run)
    if deaths != 2:
        return f"the job began again {deaths} time{'s' * (deaths != 1)}, not twice"
    if not (run / "report.json").exists():
        return "the job has not finished: watch it to its end after the second kill"
    stories = [start.story for start in starts(read_events(run).events)[:-1]]
    if any("rank 1" in story for story in stories):
        return f"start {next(n for n, story in enumerate(stories, 1) if 'rank 1' in story)} lost rank 1, not rank 0"
    return None if every_sample_once(run) else "some sample was not used exactly once"


def _runs(folder: Path) -> tuple[Path]:
    """Records as jobs leave them: as asked for; killed once; another rank killed; not finished."""
    _record(folder / "twice", [(0, 2, 1), (0, 4, 2)])
    _record(folder / "once", [(0, 2, 1)])
    _record(folder / "other-rank", [(0, 2, 1), (1, 4, 2)])
    _record(folder / "not-finished", [(0, 2, 1), (0, 4, 2)], finished=False)
    return (folder,)


def _record(run: Path, deaths: Sequence[tuple[int, int, int]], finished: bool = True) -> None:
    """A run of two ranks and six steps; a death is (rank, last step that was done, step that the next resumes at)."""
    lines: list[dict[str, Any]] = []
    began = 0
    for number, (dead, last, resumes) in enumerate([*deaths, (-1, 5, 0)], 1):
        for rank in (0, 1):
            who = {"rank": rank, "world_size": 2, "generation": number, "t": float(number)}
            lines.append(who | {"event": "snapshot_loaded", "step": began})
            step = who | {"event": "step", "epoch": 0, "lr": 0.1}
            lines += [step | {"step": s, "loss": 1.0 / (1 + s), "samples": [s, s + 1]} for s in range(began, last + 1)]
            if dead >= 0 and rank != dead:
                lines.append(who | {"event": "error", "error": "PeerLost: connection reset"})
            if dead < 0 and finished:
                lines.append(who | {"event": "finish"})
        began = resumes
    (run / "events").mkdir(parents=True)
    (run / "events" / "host-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (run / "report.json").write_text(json.dumps({"steps": 6}))


rank_0_twice = Exercise(
    "write",
    _killed_twice,
    solution="twice",
    wrong=["once", "other-rank", "not-finished", "nowhere"],
    why="killed twice, and every sample was used once; now print max_difference(twin, twice)",
    make_evidence=_runs,
)
