"""Read files that others are writing: each whole line once, as soon as it is there."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Follower:
    """Follows the files that `find` lists, also those that appear later."""

    def __init__(self, find: Callable[[], Iterable[Path]]) -> None:
        self._find = find
        self._read: dict[Path, int] = {}

    def new_lines(self, rest: bool = False) -> list[tuple[Path, str]]:
        """(file, line) for each line that came since the last call; with `rest` also a last one that has no end yet."""
        found = []
        for path in sorted(self._find()):
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    data = file.read()
            except OSError:
                continue  # removed meanwhile, or not readable yet
            whole = data if rest else data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            found += [(path, line.decode(errors="replace").rstrip("\r")) for line in whole.split(b"\n")]
            if not whole or whole.endswith(b"\n"):
                found.pop()  # what stands behind the last line's end
        return found


class EventFollower:
    """The events that a run records from now on; what its directory holds already is left out."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "events"
        old = set(self._folder.glob("*.jsonl"))
        self._lines = Follower(lambda: set(self._folder.glob("*.jsonl")) - old)
        self.events: list[Event] = []
        self.rank_of_pid: dict[int, int] = {}

    def update(self) -> list[Event]:
        """All events so far, in the order in which they were found; bad lines are skipped."""
        for path, line in self._lines.new_lines():
            try:
                event = json.loads(line)
                rank = int(event["rank"])
                self.rank_of_pid[int(path.stem.rsplit("-", 1)[1])] = rank
                self.events.append(dict(event))
            except (ValueError, TypeError, KeyError, IndexError):
                continue
        return self.events

    @property
    def last_step(self) -> int | None:
        """The step that was done last, None before the first."""
        return next((int(e["step"]) for e in reversed(self.events) if e["event"] == "step"), None)

    def reached(self, step: int, restarts: int = 0) -> bool:
        """Whether `step` was done after at least `restarts` restarts; a script without snapshots never restarts."""
        order = sorted({e["generation"] for e in self.events if e["event"] == "snapshot_loaded"})
        late = order[restarts:] if restarts else [None, *order]
        return any(e["event"] == "step" and e["step"] >= step and e["generation"] in late for e in self.events)
