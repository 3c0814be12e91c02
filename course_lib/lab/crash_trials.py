"""A way of saving is tried: what is asked of it, and every state of the disk when the machine dies.

Whatever happens, a process that starts afterwards has to find the last step that was published or, whole, the one
that was being published; and it can save the next.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from course_lib.lab.crash_points import Operation, Recorder, no_kill, raise_killed
from course_lib.lab.crash_ways import Found, Way
from course_lib.lab.lost_writes import Image, moments, restore, snapshot
from course_lib.lab.recorded_calls import recording

RUN = "runs/mine"  # neither folder is there at the beginning


@dataclass(frozen=True)
class Trial:
    """What is tried, with a state of twice `numbers` integers, `keep` snapshots kept, `saves` in each life."""

    way: Way
    numbers: int = 1500
    keep: int = 1
    saves: int = 3
    links: bool = True

    def live(self, root: Path, published: Callable[[int], object], saves: int | None = None) -> None:
        """A process: it starts and saves, and says which step is published; what it starts from has to be, too."""
        step, save = self.way.start(root / RUN, self.numbers, self.keep)
        published(step)
        for number in range(step + 1, step + 1 + (self.saves if saves is None else saves)):
            save(number)
            published(number)

    def problem(self, root: Path, published: int) -> str | None:
        """What is wrong with what is found when step `published` was the last one that was published."""
        try:
            return self.wrong(self.way.find(root / RUN, self.numbers), published)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def wrong(self, found: Found, published: int) -> str | None:
        """The same for what was found."""
        if found.step not in (published, published + 1):
            return f"step {published} was published, and step {found.step} is found"
        if found.good < min(self.keep, published):
            return f"{published} steps were published, and {found.good} are good, of {self.keep} to be kept"
        return None

    def recovers(self, root: Path) -> str | None:
        """Start and save once more, and find that; what is wrong if not."""
        step = 0

        def published(new: int) -> None:
            nonlocal step
            step = new

        recorder = Recorder(root, links=self.links)
        try:
            with recording(recorder):
                self.live(root, published, saves=1)
            found = self.way.find(root / RUN, self.numbers)
        except Exception as error:
            return f"cannot go on: {type(error).__name__}: {error}"
        return None if found.step == step else f"saved step {step}, and step {found.step} is found"


@dataclass(frozen=True)
class History:
    """What was done below a folder that was empty, and after how many operations each step had been published."""

    operations: tuple[Operation, ...]
    published: tuple[tuple[int, int], ...]
    died_at: int  # after so many operations, or 0

    def step_after(self, operations: int) -> int:
        """The last step that was published when so many operations were done."""
        return max((step for after, step in self.published if after <= operations), default=0)


def record(trial: Trial, root: Path, die_at: int = 0) -> tuple[History, list[str]]:
    """One life below the empty folder `root`, or one that is killed at a place and another one after it.

    Returns the places, too, at which the first life could have been killed.
    """
    recorder = Recorder(root, die_at, raise_killed if die_at else no_kill, links=trial.links)
    published: list[tuple[int, int]] = []

    def note(step: int) -> None:
        published.append((len(recorder.operations), step))

    died_at = 0
    with recording(recorder):
        with recorder.life():
            trial.live(root, note)
        if recorder.died:
            died_at = len(recorder.operations)
            recorder.revive()
            trial.live(root, note, saves=1)
    *_, disk = moments(recorder.operations, {})
    assert disk.now() == snapshot(root), "the files are not what the recorded operations make of them"
    return History(tuple(recorder.operations), tuple(published), died_at), recorder.places


@dataclass
class Tally:
    """How many crashes were tried, and what went wrong."""

    tried: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, where: str, problem: str | None) -> None:
        self.tried += 1
        if problem is not None:
            self.failures.append(f"{where}: {problem}")

    def add(self, other: "Tally") -> None:
        self.tried += other.tried
        self.failures += other.failures
        for name, number in other.counts.items():
            self.count(name, number)

    def count(self, name: str, more: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + more


class Images:
    """Tries every state that the disk may be in when the machine dies; the same one is rebuilt and read once."""

    def __init__(self, trial: Trial, scratch: Path, enough: float = math.inf) -> None:
        self.tally = Tally()
        self._trial, self._scratch, self._enough = trial, scratch, enough
        self._there: Image = snapshot(scratch)
        self._seen: dict[frozenset[tuple[str, bytes | None]], Found | str] = {}
        self._names: set[frozenset[str]] = set()

    def try_all(self, history: History) -> None:
        """Each moment of a history, from the first life's death on if it has one."""
        for done, disk in enumerate(moments(history.operations, {})):
            if done < history.died_at:
                continue
            self.tally.count("moments")
            published = history.step_after(done)
            where = f"machine dies after {history.operations[done - 1] if done else 'nothing'}"
            judged: set[frozenset[tuple[str, bytes | None]]] = set()
            for image in disk.images():
                key = frozenset(image.items())
                if key in judged:
                    continue
                if len(self.tally.failures) >= self._enough:
                    return
                judged.add(key)
                found = self._found(key, image)
                problem = found if isinstance(found, str) else self._trial.wrong(found, published)
                self.tally.note(where, problem and f"{problem} (found are {_listed(image)})")

    def _found(self, key: frozenset[tuple[str, bytes | None]], image: Image) -> Found | str:
        if key not in self._seen:
            restore(self._scratch, image, self._there)
            self._there = image
            try:
                self._seen[key] = self._trial.way.find(self._scratch / RUN, self._trial.numbers)
                if (problem := self._recovery(image)) is not None:
                    self._seen[key] = problem
            except Exception as error:
                self._seen[key] = f"{type(error).__name__}: {error}"
            self.tally.counts["different states"] = len(self._seen)
        return self._seen[key]

    def _recovery(self, image: Image) -> str | None:
        """Go on from an image, once for each set of names."""
        if (names := frozenset(image)) in self._names:
            return None
        self._names.add(names)
        problem = self._trial.recovers(self._scratch)
        self._there = snapshot(self._scratch)
        self.tally.count("gone on from")
        return problem


def _listed(image: Image) -> str:
    files = {path: content for path, content in image.items() if content is not None}
    return (
        ", ".join(f"{Path(path).name} ({len(content)} bytes)" for path, content in sorted(files.items())) or "nothing"
    )


def machine_dies(trial: Trial, scratch: Path, before: int = 0, enough: float = math.inf) -> Tally:
    """One life with the machine under it; with `before`, lives after one that was killed at each `before`th place.

    So many failures are `enough`.
    """
    with TemporaryDirectory(dir=scratch) as image:
        images = Images(trial, Path(image), enough)
        with TemporaryDirectory(dir=scratch) as folder:
            history, places = record(trial, Path(folder))
        if not before:
            images.try_all(history)
        for place in range(1, len(places) + 1, before) if before else ():
            with TemporaryDirectory(dir=scratch) as folder:
                images.try_all(record(trial, Path(folder), place)[0])
        return images.tally
