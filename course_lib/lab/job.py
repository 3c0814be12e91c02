"""A training job that a notebook started: watched by its events, broken by signals, and never left behind."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from course_lib.engine import UsageError
from course_lib.lab.follow import Event, EventFollower
from course_lib.lab.live import LiveCurve
from course_lib.lab.output import AGENT_LOG, Output
from course_lib.lab.processes import MARK, Process, describe_exit, kill_marked, launch_mark, marked
from course_lib.lab.tree import draw_tree, local_size, ranks_of

LIMIT_S = 110.0  # less than nbval gives a cell, so that the job says what happened before nbval ends the cell
_POLL_S = 0.02
_WORKERS_S = 30.0  # seconds that a rank may take to appear: a start or a restart, on a loaded machine


class JobFailed(RuntimeError):
    """A job ended, or did not do what it was waited for; the message ends with the last lines of its output."""


class Job:
    """A running job; `launch.start` makes it.

    `command` is what was typed, `run_dir` the folder of its events (None when it has none), `logs` the folder of its
    output. Whatever waits for the job kills all its processes when it is interrupted.
    """

    def __init__(
        self,
        command: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        logs: Path,
        run_dir: Path | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.command, self.run_dir, self.logs, self.limit_s = command, run_dir, logs, limit_s
        self._followed = EventFollower(run_dir) if run_dir is not None else None
        self._output = Output(logs)
        self._mark, value = launch_mark()
        self._late = False
        with (logs / AGENT_LOG).open("wb") as log:
            self._popen = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, MARK: value},
                start_new_session=True,  # what interrupts the kernel shall not reach the job by itself
            )
        self._timer = threading.Timer(limit_s, self._enforce_limit)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def __repr__(self) -> str:
        code = self.exit_code
        return f"<job: {self.command} ({'running' if code is None else 'ended with ' + describe_exit(code)})>"

    # --- what it is doing ----------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the agent, or the script that has none, is alive."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """The agent's exit code (negative: a signal ended it), None while it runs."""
        return self._popen.poll()

    @property
    def _events(self) -> EventFollower:
        if self._followed is None:
            raise UsageError(f"this job records no events: start it with --run-dir DIR ({self.command})")
        self._followed.update()
        return self._followed

    @property
    def events(self) -> list[Event]:
        """What this job has recorded in its run directory so far; what an earlier job left there is not in it."""
        return self._events.events

    def output(self, rank: int | None = None, lines: int | None = None) -> str:
        """What the job has said so far, or only its worker `rank`; or only the last `lines` of that."""
        found = [line.text for line in self._output.update(not self.running) if rank is None or line.rank == rank]
        return "\n".join(found if lines is None else found[-lines:])

    def tail(self) -> str:
        """The last lines of its workers and of its agent, as a failure shows them."""
        return self._output.tail(ended=not self.running)

    def show(self) -> None:
        """Print what its workers have said since the last call; the agent's own lines are left out."""
        self._output.show(rest=not self.running)

    def processes(self) -> list[Process]:
        """All living processes of the job, the agent's own among them."""
        return marked(self._mark)

    def workers(self) -> dict[int, int]:
        """rank -> process id of the workers that live now."""
        return {rank: pid for pid, rank in self._ranks(self.processes()).items()}

    def _ranks(self, processes: list[Process]) -> dict[int, int]:
        return ranks_of(processes, self._events.rank_of_pid if self._followed is not None else {})

    def pid(self, rank: int) -> int:
        """The process id of the worker that is `rank` now; waits for it while it is being started.

        Raises JobFailed when there is no such rank, or the job has ended.
        """
        return self._wait_for_workers(lambda workers, size: rank in workers or 0 < size <= len(workers), rank)[rank]

    def tree(self) -> str:
        """The job's processes as a drawing, once all its workers are there."""
        self._wait_for_workers(lambda workers, size: 0 < size <= len(workers))
        processes = self.processes()
        return draw_tree(processes, self._ranks(processes))

    def _wait_for_workers(
        self, enough: Callable[[dict[int, int], int], bool], rank: int | None = None
    ) -> dict[int, int]:
        """The workers, once `enough(workers, how many there will be)`; that is 0 while nobody knows it."""
        with self._ended_by_interrupt():
            deadline = time.monotonic() + _WORKERS_S
            workers: dict[int, int] = {}
            while self.running and time.monotonic() < deadline:
                processes = self.processes()
                workers = {number: pid for pid, number in self._ranks(processes).items()}
                if enough(workers, local_size(processes)):
                    break
                time.sleep(_POLL_S)
        if not self.running:
            raise self._failure(f"has ended with {describe_exit(self.exit_code or 0)}, so there is no process to find")
        if rank is not None and rank not in workers:
            raise self._failure(f"has no rank {rank}; its ranks are {', '.join(map(str, workers)) or 'not there yet'}")
        return workers

    # --- what is done to it --------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Ctrl-C in the terminal that the job runs in: SIGINT to its foreground process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGINT)

    def terminate(self) -> None:
        """SIGTERM to the agent, as a scheduler sends it before it takes the node away."""
        self._popen.terminate()

    def kill(self) -> None:
        """SIGKILL everything at once, as when the node loses its power."""
        self._timer.cancel()
        kill_marked(self._mark, quiet=3 if self.running else 1)
        self._popen.wait(10)

    def _enforce_limit(self) -> None:
        if self.running:
            self._late = True
            kill_marked(self._mark, quiet=3)

    # --- waiting for it ------------------------------------------------------------------------------------------

    def wait_for(self, step: int, restarts: int = 0, timeout_s: float | None = None) -> None:
        """Return when `step` is done, by a generation that came after `restarts` restarts of this job or more.

        Raises JobFailed when the job ends before, or has not done it within `timeout_s` seconds; then it is killed.
        """
        self._wait(lambda: self._events.reached(step, restarts), f"step {step} was done", timeout_s, lambda: None)

    def wait(self, check: bool = True, show: bool = True, timeout_s: float | None = None) -> None:
        """Wait for the end of the job, and show its workers' lines as they come, if `show`.

        Raises JobFailed when its exit code is not 0, unless `check` is False, and when it does not end in time.
        """
        self._wait(None, "it ended", timeout_s, self._output.show if show else lambda: None)
        if show:
            self._output.show(rest=True)
        self._finish(check)

    def watch(self, step: int | None = None, restarts: int = 0, check: bool = True) -> None:
        """`wait`, or with a `step` `wait_for`, with a loss curve that grows meanwhile."""
        _ = self._events  # a job without events is refused before it is waited for
        curve = LiveCurve(self.run_dir or Path())
        done = None if step is None else lambda: self._events.reached(step, restarts)
        try:
            self._wait(done, f"step {step} was done" if step else "it ended", None, lambda: curve.refresh(True))
        finally:
            curve.refresh(self.running)
        if step is None:
            self._finish(check)

    def _wait(
        self, done: Callable[[], bool] | None, what: str, timeout_s: float | None, meanwhile: Callable[[], None]
    ) -> None:
        """Wait until `done`; None is the end of the job."""
        deadline = time.monotonic() + (self.limit_s + 5 if timeout_s is None else timeout_s)
        with self._ended_by_interrupt():
            while True:
                ended = not self.running  # looked at before the files, so that its last lines are not missed
                self._output.update()
                meanwhile()
                if done is not None and done():
                    return
                if ended:
                    break
                if time.monotonic() > deadline:
                    self.kill()
                    raise self._failure(f"was killed: {timeout_s or self.limit_s:g} s passed before {what}")
                time.sleep(_POLL_S)
        if done is not None:
            self._finish(check=False)
            raise self._failure(f"ended with {describe_exit(self.exit_code or 0)} before {what}")

    def _finish(self, check: bool) -> None:
        """Leave nothing behind of a job that has ended, and say so when its end was a bad one."""
        self._timer.cancel()
        kill_marked(self._mark)
        if self._late:
            raise self._failure(f"did not end within its limit of {self.limit_s:g} s, and was killed")
        if check and self.exit_code != 0:
            raise self._failure(f"ended with {describe_exit(self.exit_code or 0)}")

    def _failure(self, what: str) -> JobFailed:
        last = self._followed.last_step if self._followed is not None and self._events else None
        where = f" (the last step that it did is {last})" if last is not None else ""
        return JobFailed(f"the job {what}{where}: {self.command}\n{self.tail()}")

    @contextmanager
    def _ended_by_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.kill()
            raise
