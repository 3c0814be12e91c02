"""Start a training script as a learner would, with torchrun, and keep what it says."""

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from course_lib.engine import SnapshotStore, UsageError
from course_lib.engine.snapshots.heartbeat import is_live
from course_lib.lab.job import LIMIT_S
from course_lib.lab.job import Job as Job
from course_lib.lab.job import JobFailed as JobFailed
from course_lib.lab.processes import JOB_SETTINGS

_LOG_OPTIONS = ("--log-dir", "--log_dir", "-r", "--redirects", "-t", "--tee")
_started: list[Job] = []


def start(
    command: str,
    *,
    limit_s: float = LIMIT_S,
    environment: Mapping[str, str | None] | None = None,
    logs: Path | None = None,
    inside: Sequence[str] = (),
) -> Job:
    """Start what would be typed in a terminal, without a shell: `torchrun --standalone … script.py --run-dir DIR …`.

    A leading `torchrun` or `python` is the one of this environment, whatever stands first on PATH. After `limit_s`
    seconds the job is killed. `environment` has the last word over `job_environment`; None removes a variable.
    `logs` is an empty folder for its output, by default a new one; `inside` are words that go before the command, such
    as those that enter a network namespace.
    """
    words = _words(command)
    run_dir = next(
        (Path(after) for word, after in zip(words, [*words[1:], ""], strict=True) if word == "--run-dir"), None
    )
    run_dir = next((Path(word[10:]) for word in words if word.startswith("--run-dir=")), run_dir)
    logs = logs or _log_folder(run_dir)
    if words[0] == "torchrun":
        # A file for each rank keeps the lines whole: two ranks that write into one pipe tear each other's.
        own = [] if any(word.split("=")[0] in _LOG_OPTIONS for word in words) else ["--log-dir", str(logs), "-r", "3"]
        words = [sys.executable, "-m", "torch.distributed.run", *own, *words[1:]]
    elif words[0] in ("python", "python3"):
        words = [sys.executable, "-u", *words[1:]]
    given = job_environment() | {"PYTHONUNBUFFERED": "1"} | dict(environment or {})
    complete = {name: value for name, value in given.items() if value is not None}
    job = Job(command, [*inside, *words], complete, logs, run_dir, limit_s)
    _started[:] = [earlier for earlier in _started if earlier.running] + [job]
    return job


def _words(command: str) -> list[str]:
    """The command's words, once it is plain that no shell is wanted and that its script is there."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"the command cannot be read ({error}): {command}") from None
    if not words or any(set(word) <= set("|&;<>") for word in words):
        raise UsageError(f"start() runs one command and no shell: leave out |, &, ; and > ({command})")
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None and not Path(script).is_file():
        raise UsageError(f"there is no {script} in {Path.cwd()}: correct the path, or call setup() first")
    if words[0] not in ("torchrun", "python", "python3") and shutil.which(words[0]) is None:
        raise UsageError(f"there is no command {words[0]!r}: start it with torchrun or python")
    return words


def _log_folder(run_dir: Path | None) -> Path:
    """A new folder for the output of a job: in its run directory, where the learner finds it, else in runs/logs."""
    base = (run_dir or runs_directory()) / "logs"
    base.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(len(list(base.iterdir())) + 1):
        with suppress(FileExistsError):
            (base / str(number)).mkdir()
            break
    return base / str(number)


def runs_directory() -> Path:
    """The folder of all runs: COURSE_RUNS, else `runs` in the working directory."""
    return Path(os.environ.get("COURSE_RUNS") or "runs")


def torchrun_command(script: str | Path, *options: object, ranks: int = 2, max_restarts: int = 3) -> list[str]:
    """The command line of a job on this machine, under the Python that runs this: its `torchrun` may not be on PATH."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    size = ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    return [*agent, *size, str(script), *map(str, options)]


def job_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a job: one thread a rank, no progress bars, and a store of its own for each restart.

    By default torchrun's agents share one store over all restarts (pytorch issue 135712). The scripts survive
    that, too; with the variable they needn't. A pod's own PET_ variables would override the options given here.
    """
    kept = {k: v for k, v in (environment or os.environ).items() if not k.startswith("PET_")}
    return kept | JOB_SETTINGS


def fresh_directory(path: Path) -> Path:
    """An empty run directory at `path`: what an earlier run left there is removed, a live run's is refused."""
    if path.exists():
        names = {entry.name for entry in path.iterdir()}
        if not (names <= {"logs", "faults"} or names & {"events", "snapshots", "report.json"}):
            raise UsageError(f"{path} holds something else than a run: give another directory, or empty it yourself")
        claims = SnapshotStore(path).listing().claims
        newest = max(claims, key=lambda claim: claim.generation, default=None)
        if newest is not None and is_live(path / "snapshots", newest):
            raise UsageError(f"{path} is in use by a live job (process {newest.pid}): wait for it, or stop it")
        # A job that is still starting has claimed nothing yet; those of this notebook are known all the same.
        if any(job.running and job.run_dir and job.run_dir.resolve() == path.resolve() for job in _started):
            raise UsageError(f"{path} is in use by a job of this notebook that still runs: stop it with job.kill()")
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path
