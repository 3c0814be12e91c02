"""One JSON line per event, read by plots, reports and tests.

Each process appends to a file of its own, because shared appends tear on network file systems. A line is one
`write` call, so a process killed at any instant leaves whole lines, but for at most the last one.
"""

import json
import math
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.engine.watchdog import launch_time, process_start_time

Event = dict[str, Any]


class RunLog:
    """The event log of this process.

    Nothing is written before `open()`: until the ranks know that there is work to do, events wait in memory, so
    that a run that is refused, or finished already, is left as it was. `current` is the process's newest log,
    where the crash handler writes.
    """

    current: "RunLog | None" = None

    def __init__(self, run_dir: str | Path | None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.generation: int | None = None
        self.last_step: int | None = None
        self.path: Path | None = None
        if run_dir is not None:
            self.path = Path(run_dir) / "events" / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        self._waiting: list[str] = []
        self._file: int | None = None
        RunLog.current = self
        own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or "no/agent").parent  # its agent makes it, right before
        spawned = own.stat().st_mtime if own.is_dir() else None
        self("process_start", t=process_start_time(os.getpid()), launched=launch_time(), spawned=spawned)
        self("imported")

    def __call__(self, event: str, **fields: Any) -> None:
        """Record `event` now, with `t` in Unix seconds and whatever fields it has."""
        common = {"rank": self.rank, "world_size": self.world_size, "generation": self.generation}
        if event == "step":
            self.last_step = fields["step"]
        if event in ("fault", "error"):
            self.open()  # the process may not live to write it later
        line = json.dumps({"t": time.time(), "event": event, **common, **fields}, allow_nan=True)
        if self._file is None:
            self._waiting.append(line)
        else:
            self._write(line)

    def open(self) -> None:
        """Create the file and write what has waited; from now on each event is on its way to disk at once."""
        if self._file is not None:
            return
        if self.path is None:
            self._file = os.open(os.devnull, os.O_WRONLY)  # nobody will read what would wait in memory
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            # A pod keeps its host name and pid across restarts: don't continue a line that its last life tore.
            waiting = [""] * (os.fstat(self._file).st_size > 0) + self._waiting
        except OSError as error:
            self._give_up(error)
            return
        self._write("\n".join(waiting))
        self._waiting.clear()

    def _write(self, line: str) -> None:
        data = (line + "\n").encode()
        try:
            while data:  # once, unless the disk is full in the middle of the line: the next try then says so
                data = data[os.write(self._file or 0, data) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A log that cannot be written costs nothing else: training goes on without it."""
        print(f"rank {self.rank}: no event log any more: {error}", file=sys.stderr, flush=True)
        self.path, self._waiting = None, []
        self._file = os.open(os.devnull, os.O_WRONLY)


@dataclass(frozen=True)
class Events:
    """The events of a run in the order of time, and how many lines could not be read."""

    events: list[Event] = field(default_factory=list)
    bad_lines: int = 0

    def named(self, *names: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event["event"] in names]


def log_files(run_dir: str | Path) -> list[Path]:
    """The event logs of the run in `run_dir`; a pipe of such a name, which nobody may write to, is left out."""
    return [path for path in sorted((Path(run_dir) / "events").glob("*.jsonl")) if path.is_file()]


def read_events(run_dir: str | Path) -> Events:
    """Merge the files of all processes of the run in `run_dir`; bad lines are skipped anywhere and counted.

    A file that cannot be read counts as one.
    """
    events: list[Event] = []
    bad = 0
    for path in log_files(run_dir):
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            bad += 1
            continue
        for line in lines:
            if not line.strip():
                continue
            try:
                events.append(checked(json.loads(line)))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                bad += 1
    # The sort is stable, so that events of one process with equal times keep their order.
    return Events(sorted(events, key=lambda event: event["t"]), bad)


# What events of a kind have beside that which all have.
_NUMBERS = {"step": ("step",), "snapshot_loaded": ("step", "generation", "world_size"), "fault": ("step",)}
_WORDS = {"fault": ("kind", "at")}


def checked(event: Any) -> Event:
    """The event, if it has what readers rely on; else one of the errors that bad JSON gives."""
    name, generation, seconds = event["event"], event["generation"], event.get("seconds", 0)
    numbers = [event[field] for field in ("t", "rank", *_NUMBERS.get(name, ()))]
    numbers += [seconds, 0 if generation is None else generation]
    if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
        raise ValueError("a number is missing")
    words = [name, *(event[field] for field in _WORDS.get(name, ()))]
    if not all(isinstance(word, str) for word in words) or not isinstance(event.get("loss", 0), (int, float)):
        raise ValueError("a name or a loss is missing")
    if seconds < 0:
        raise ValueError("nothing takes less than no time")
    return dict(event)
