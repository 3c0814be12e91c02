"""Start a training script as a learner would, with torchrun, and keep what it says."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from course_lib.engine import SnapshotStore, UsageError
from course_lib.engine.snapshots.heartbeat import is_live

# What the elastic agent says on its own account; the workers' lines have no such head.
_AGENT_LINE = re.compile(r"[WEI]\d{4} \d\d:\d\d")


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
    ours = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return kept | ours


def run_job(
    command: Sequence[str], log: Path, timeout_s: float, show: Callable[[str], None] = lambda line: None
) -> int:
    """Run a job to its end, write its output to `log`, pass the workers' lines to `show`; returns the exit code.

    Raises TimeoutError after `timeout_s` seconds; then and on an interrupt the job is asked to stop, and waited for.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=job_environment(),
        )
        timer = threading.Timer(timeout_s, process.terminate)
        timer.start()
        try:
            for line in process.stdout or ():
                file.write(line)
                if line.strip() and not _AGENT_LINE.match(line):
                    show(line.rstrip("\n"))
            code = process.wait()
        finally:
            late = not timer.is_alive()
            timer.cancel()
            if process.poll() is None:
                process.terminate()
                process.wait()
    if late:
        raise TimeoutError(f"the job did not end within {timeout_s:g} s and was stopped: {log}")
    return code


def fresh_directory(path: Path) -> Path:
    """An empty run directory at `path`: what an earlier run left there is removed, a live run's is refused."""
    if path.exists():
        if any(path.iterdir()) and not any((path / part).exists() for part in ("events", "snapshots", "report.json")):
            raise UsageError(f"{path} holds something else than a run: give another directory, or empty it yourself")
        claims = SnapshotStore(path).listing().claims
        newest = max(claims, key=lambda claim: claim.generation, default=None)
        if newest is not None and is_live(path / "snapshots", newest):
            raise UsageError(f"{path} is in use by a live job (process {newest.pid}): wait for it, or stop it")
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path
