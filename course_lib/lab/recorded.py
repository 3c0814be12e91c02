"""Read the history of a run from its event logs, each process's own lines in the order in which it wrote them.

`read_events` sorts the lines of all processes by their clocks. Here no clock can upset a process's order: when a line
is dated before the one above it, the clock was set back, and all that the process wrote from there on is moved forward
by as much. A clock that was set forward cannot be told from a pause, so the time stays, as a gap that nothing accounts
for; and the clocks of two machines are taken for equal.
"""

import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from course_lib.engine import SnapshotStore, UsageError
from course_lib.engine.runlog import checked
from course_lib.engine.snapshots.heartbeat import is_live
from course_lib.engine.snapshots.records import parse_name
from course_lib.engine.watchdog import command_line, process_start_time
from course_lib.lab.follow import Follower
from course_lib.lab.history import Attempt, Event, History, Worker, micro

_START = {"process_start", "imported"}


def read_history(run_dir: Path | str, look: bool = True) -> History:
    """The history of the run in `run_dir`; UsageError when it holds no events. With `look`, see whether it is alive."""
    folder = Path(run_dir) / "events"
    try:
        # Not glob, which takes a folder that it may not read for an empty one.
        logs = [path for path in folder.iterdir() if path.name.endswith(".jsonl")]
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{run_dir} holds no run: there is no folder `events` in it; give the --run-dir of a run"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from None
    for path in logs:
        if not os.access(path, os.R_OK) or not path.is_file():
            raise UsageError(
                f"{path} is no file that you can read, so a part of the run is missing: move it, or chmod it"
            )
    files: dict[str, list[Event]] = {}
    bad = 0
    for path, line in Follower(lambda: logs).new_lines(rest=True):
        try:
            if line.strip():
                event = _sound(checked(json.loads(line)))
                files.setdefault(path.stem, []).append(event)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            bad += 1
    if not files:
        raise UsageError(
            f"{folder} holds no event{f', and lines that cannot be read: {bad}' if bad else ''}: nothing to report"
        )
    workers = [worker for name, events in files.items() for worker in workers_of(name, events)]
    alive = look and _alive(Path(run_dir), workers)
    now = round(time.time() * 1e6)
    found = History(attempts_of(workers), now if alive else None, _durable(Path(run_dir)), bad)
    return replace(found, ahead_us=max(0, found.end - now))


def _sound(event: Event) -> Event:
    """The event, unless its time is none that a clock can have: then one of the errors of bad JSON."""
    if micro(event["t"]) is None:
        raise ValueError("no time")
    return event


def workers_of(process: str, events: Iterable[Event]) -> list[Worker]:
    """The processes, or the lives of one, in a file: a pod keeps its host name and pid when it is started again."""
    found: list[list[Event]] = []
    open_: dict[int, list[Event]] = {}
    young: set[int] = set()  # the ranks of which no more is there than a process's start
    for event in events:
        rank, name = event["rank"], event["event"]
        new_here = rank not in open_ or (name == "group_ready" and rank not in young)
        if young and new_here and name not in _START:
            open_[rank] = open_.pop(young.pop())  # one that `mp.spawn` started learns its rank after it has begun
        elif name == "process_start" or rank not in open_:
            open_[rank] = []
            found.append(open_[rank])
            young.add(rank)
        if name not in _START:
            young.discard(rank)
        open_[rank].append(event)
    workers: list[Worker] = []
    for mine in found:
        # Of two runs in one process, the second was not born with the process.
        earliest = max((worker.ended for worker in workers if worker.rank == mine[-1]["rank"]), default=None)
        workers.append(_straight(process, mine, earliest))
    return workers


def _straight(name: str, events: list[Event], earliest: int | None) -> Worker:
    dated: list[Event] = []
    shift = 0
    for event in events:
        us = (micro(event["t"]) or 0) + shift
        before = dated[-1]["us"] if dated else us if earliest is None else max(us, earliest)
        if us < before and dated:
            shift += before - us
        dated.append(event | {"us": max(us, before)})
    return Worker(name, tuple(dated), shift)


def attempts_of(workers: Iterable[Worker]) -> tuple[Attempt, ...]:
    """Group the processes by generation; those without one, by the time that they lived in, go where that falls."""
    groups: dict[int, list[Worker]] = {}
    nameless: list[list[Worker]] = []
    for worker in sorted(workers, key=lambda worker: (worker.born, worker.rank)):
        if worker.generation is not None:
            groups.setdefault(worker.generation, []).append(worker)
        elif nameless and worker.born <= max(other.ended for other in nameless[-1]):
            nameless[-1].append(worker)
        else:
            nameless.append([worker])
    attempts = [_attempt(groups[generation]) for generation in sorted(groups)]
    for extra in map(_attempt, nameless):
        at = next((i for i, attempt in enumerate(attempts) if attempt.born > extra.born), len(attempts))
        attempts.insert(at, extra)
    return tuple(attempts)


def _attempt(workers: list[Worker]) -> Attempt:
    return Attempt(tuple(sorted(workers, key=lambda worker: worker.rank)))


def _durable(run_dir: Path) -> int:
    names = [parse_name(path.stem) for path in (run_dir / "snapshots").glob("*.json")]
    return max((name for name in names if name is not None), default=(0, 0))[1]


def _alive(run_dir: Path, workers: list[Worker]) -> bool:
    """Whether one of the processes lives on this machine, or the newest generation's heartbeat moves."""
    for worker in workers:
        host, _, pid = worker.name.rpartition("-")
        known = host == socket.gethostname() and pid.isdecimal() and command_line(int(pid))  # a zombie has none
        if known and abs(process_start_time(int(pid)) - worker.events[0]["t"]) < 1:
            return True
    newest = max(SnapshotStore(run_dir).listing().claims, key=lambda claim: claim.generation, default=None)
    return newest is not None and is_live(run_dir / "snapshots", newest)
