"""Real processes that save and are killed: at each of their operations on files, or at random instants.

They are forked, so a kill costs no import; the process that forks must have no threads of its own.
"""

import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from course_lib.engine.snapshots.records import parse_name
from course_lib.lab.crash_points import Recorder, raise_killed
from course_lib.lab.crash_trials import RUN, Tally, Trial
from course_lib.lab.recorded_calls import recording

Note = Callable[[int], None]  # says that a step is published


class Victim:
    """A forked process; it tells which step is published through memory that both share, and ends with its parent."""

    def __init__(self, live: Callable[[Note], object], published: int) -> None:
        self._memory = mmap.mmap(-1, 8)
        self._parent = os.getpid()
        self._publish(published)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                live(self._publish)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def _publish(self, step: int) -> None:
        struct.pack_into("q", self._memory, 0, step)
        if self._parent not in (os.getpid(), os.getppid()):
            os._exit(1)

    @property
    def published(self) -> int:
        return int(struct.unpack_from("q", self._memory, 0)[0])

    def end(self, kill: bool = False) -> int:
        """Its exit code, negative for a signal; with `kill`, SIGKILL comes first."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


def kill_everywhere(trial: Trial, scratch: Path, every: int = 1, before: int = 0) -> Tally:
    """A process for each place that its life has (or each `every`th), killed there, and one killed right after its end.

    It begins with an empty folder, or with what a process left that was killed at place `before`.
    """
    tally = Tally()
    with TemporaryDirectory(dir=scratch) as folder:
        die_at(trial, Path(folder), before)
        recorder = Recorder(Path(folder), links=trial.links)
        with recording(recorder):
            trial.live(Path(folder), lambda step: None)
    places = list(enumerate([*recorder.places, "after the last one"], start=1))
    for number, place in places[::every]:
        with TemporaryDirectory(dir=scratch) as folder:
            root = Path(folder)
            victim = Victim(partial(_life, trial, root, number), die_at(trial, root, before))
            code = victim.end()
            problem = None if code == -signal.SIGKILL else f"the process ended with {code}"
            tally.note(f"killed {place}", problem or trial.problem(root, victim.published) or trial.recovers(root))
            tally.count("in the middle of a write", "in the middle" in place)
    return tally


def die_at(trial: Trial, root: Path, place: int, saves: int | None = None) -> int:
    """A life in this process that ends at a place (0: there is none); returns the last step that was published."""
    steps = [0]
    if place:
        recorder = Recorder(root, place, raise_killed, links=trial.links)
        with recording(recorder), recorder.life():
            trial.live(root, steps.append, saves)
    return steps[-1]


def _life(trial: Trial, root: Path, place: int, note: Note) -> None:
    recorder = Recorder(root, place, kill_myself, links=trial.links)
    with recording(recorder):
        trial.live(root, note)
    kill_myself()


def kill_at_random(trial: Trial, root: Path, kills: int, seed: int) -> Tally:
    """Kill one life of endless saves after another, all in one folder; each starts from what the one before left.

    The seed draws the instants, each a part of the time that a start and three saves take here.
    """
    tally, draw = Tally(), random.Random(seed)
    span, known = _span_s(trial, root)
    for number in range(kills):
        delay = draw.uniform(0, span)
        victim = Victim(lambda note: trial.live(root, note, saves=10**9), known)
        time.sleep(delay)
        code, published = victim.end(kill=True), victim.published
        problem = None if code == -signal.SIGKILL else f"the process ended with {code}"
        try:
            found = trial.way.find(root / RUN, trial.numbers)
        except Exception as error:
            tally.note(f"kill {number + 1} after {delay:.4f} s", f"{type(error).__name__}: {error}")
            shutil.rmtree(root / RUN)  # there is nothing to go on from
            known = 0
            continue
        problem = problem or trial.wrong(found, published) or too_much(root, trial.keep)
        tally.note(f"kill {number + 1} after {delay:.4f} s", problem)
        for what in left_over(root / RUN / "snapshots"):
            tally.count(what)
        tally.count("saves published", found.step - known)
        known = found.step
    return tally


def _span_s(trial: Trial, root: Path) -> tuple[float, int]:
    """How long a start and three saves take, and the step that is then published."""
    started = time.monotonic()
    victim = Victim(lambda note: trial.live(root, note, saves=3), 0)
    assert victim.end() == 0, "a process that nobody kills does not come to its end"
    return time.monotonic() - started, victim.published


def die_again_and_again(trial: Trial, root: Path, place: int, deaths: int) -> str | None:
    """Lives in one folder that all die at the same place; what is too much of what they leave behind."""
    for _ in range(deaths):
        die_at(trial, root, place, saves=1)
        if (problem := too_much(root, trial.keep)) is not None:
            return problem
    return None


def left_over(folder: Path) -> Iterator[str]:
    """What deaths have left half done in a folder of snapshots, in words."""
    names = {path.name for path in folder.glob("*")}
    for name in names:
        if name.endswith(".tmp"):
            yield "payloads cut short" if ".pt." in name else "records cut short"
        elif name.endswith(".pt") and name.replace(".pt", ".json") not in names:
            yield "payloads without a manifest"


def too_much(root: Path, keep: int) -> str | None:
    """What is more than `keep` snapshots and one in flight, of the newest generation; None if nothing is."""
    folder = root / RUN / "snapshots"
    payloads = [path.name for path in folder.glob("*.pt") if parse_name(path.stem)]
    drafts = [path.name for path in folder.glob(".gen-*.pt.*.tmp")]
    if len(payloads) <= keep + 1 and len(drafts) <= 1:
        return None
    return f"{len(payloads)} payloads and {len(drafts)} drafts are there: {', '.join(sorted(payloads + drafts))}"
