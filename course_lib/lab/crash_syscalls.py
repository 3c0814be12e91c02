"""Kills and errors at a process's system calls, put there from outside by strace, which is asked for none by Python.

This sees all that a process does, also what the interpreter and torch do in C.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from course_lib.engine import UsageError
from course_lib.lab.crash_kills import Note, Victim
from course_lib.lab.crash_trials import RUN, Tally, Trial

# As strace wants them: a call that an architecture lacks is marked with "?".
CALLS = {
    "open": "?open,openat",
    "write": "write",
    "fsync": "fsync",
    "link": "?link,linkat",
    "unlink": "?unlink,unlinkat",
    "mkdir": "?mkdir,mkdirat",
    "rename": "?rename,?renameat,renameat2",
}
KILL = "signal=SIGKILL"
REFUSED = 2


class CannotTrace(Exception):
    """strace is not there, or may not look into another process; the message says which."""


def at_every_call(trial: Trial, scratch: Path, calls: Sequence[str], effect: str, every: int = 1) -> Tally:
    """A life from an empty folder for each of its calls of these kinds (or each `every`th), with `effect` there.

    The effect is KILL or `error=ENOSPC` or alike. After an error a process has to go on, but for the save that it hit.
    Raises CannotTrace.
    """
    tally = Tally()
    for call in calls:
        for number in range(1, 10_000, every):
            with TemporaryDirectory(dir=scratch) as folder:
                victim, hit = _traced(trial, Path(folder), call, f"{effect}:when={number}")
                if not hit:
                    break
                tally.note(f"{effect} at {call} {number}", _problem(trial, Path(folder), victim, effect))
                tally.count(call)
    return tally


def _problem(trial: Trial, root: Path, victim: tuple[int, int], effect: str) -> str | None:
    code, published = victim
    if code not in ((-signal.SIGKILL,) if effect == KILL else (0, REFUSED)):
        return f"the process ended with {code}"
    if code == 0 and published < trial.saves - 1:
        return f"the error cost more than one save: of {trial.saves}, {published} is the last one that was published"
    return trial.problem(root, published) or trial.recovers(root)


def _traced(trial: Trial, root: Path, call: str, injection: str) -> tuple[tuple[int, int], bool]:
    """((exit code, last step published), whether the injection came to pass) of one life."""
    waiting, go = os.pipe()

    def live(note: Note) -> None:
        os.close(go)
        os.read(waiting, 1)
        os._exit(_stubborn_life(trial, root, note))

    victim = Victim(live, 0)
    os.close(waiting)
    log = root / "strace.txt"
    options = ["-e", f"inject={CALLS[call]}:{injection}", "-e", f"trace={CALLS[call]}"]
    if not trial.links:  # the file system has none
        options = ["-e", f"inject={CALLS['link']}:error=EPERM", *options[:-1], f"{options[-1]},{CALLS['link']}"]
    try:
        with strace(victim.pid, log, options):
            os.close(go)  # which ends the victim's wait
            code = victim.end()
    except CannotTrace:
        os.close(go)
        victim.end(kill=True)
        raise
    names = CALLS[call].replace("?", "").replace(",", "|")
    hit = code == -signal.SIGKILL or re.search(rf"\b({names})\(.*\(INJECTED\)", log.read_text()) is not None
    return (code, victim.published), hit


def _stubborn_life(trial: Trial, root: Path, note: Note) -> int:
    """What a job makes of errors of its disk: at its start it does not run, and later it goes on."""
    try:
        step, save = trial.way.start(root / RUN, trial.numbers, trial.keep)
    except (UsageError, OSError, RuntimeError):  # the last one tells all ranks of another's error
        return REFUSED
    for number in range(step + 1, step + 1 + trial.saves):
        with suppress(OSError):
            save(number)
            note(number)
    return 0


@contextmanager
def strace(pid: int, log: Path, options: list[str]) -> Iterator[None]:
    """Look on from when the block begins; it ends with the process."""
    command = ["strace", "-f", "-p", str(pid), "-o", str(log), *options]
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise CannotTrace("strace is not installed") from None
    assert process.stderr is not None
    with process:
        said = process.stderr.readline()
        if "attached" not in said:
            raise CannotTrace(said.strip() or "strace says nothing")
        yield
