"""A PyTorchJob on this machine whose story is told, so that it can be drawn, and its run be read as any other.

    with ToldJob(manifest, run) as job:
        job.start()
        job.wait_for(step=50)
        job.kill("gpt-worker-1")
        job.wait_end()

The folder that the manifest calls /snapshots/NAME-OF-JOB is the run directory `run`; what the image has in /workspace
is this repository. The job's own files (logs, pods.json) are in RUN/logs.
"""

import re
import time
from pathlib import Path

from course_lib.engine import UsageError, read_events
from course_lib.lab.pytorchjob import LocalJob, read_job
from course_lib.lab.story import tell

LIMIT_S = 115.0  # less than the 120 s that nbval gives a cell, so that the job itself says how far it came
_BUSY = "is the machine busy? end what else runs, and run the cell that makes the run directory and this one again"
_FRAMES = ("frame #", "<omitting python frames>", "Exception raised from")  # of traces that come from torch's C++


def places(run: Path | str, name: str) -> dict[str, str]:
    """What the image and the volume of a job have at a path -> the folder here."""
    return {"/workspace": ".", f"/snapshots/{name}": str(run)}


class ToldJob(LocalJob):
    """The job of a manifest, whose `lines` are kept; it prints them, frames of traces aside, unless `show` is False."""

    def __init__(
        self, manifest: Path | str, run: Path | str, *, show: bool = True, isolated: bool | None = None
    ) -> None:
        self.run, self.lines, self._show = Path(run), list[str](), show
        self._until = time.monotonic() + LIMIT_S
        job = read_job(manifest)
        maps = places(run, job.name)
        super().__init__(job, self.run / "logs", maps=maps, isolated=isolated, say=self._told)

    def _told(self, line: str) -> None:
        self.lines.append(line)
        if (started := re.match(r"kubelet  \| (\S+): started", line)) is not None:
            tell(self.run, "start", self._short(started[1]))
        text = line.partition(" | ")[2]
        if self._show and text and not text.startswith(_FRAMES):
            print(line, flush=True)

    def _short(self, pod: str) -> str:
        """master-0, worker-1, …: a pod's name without the job's."""
        return pod.removeprefix(f"{self.job.name}-")

    def kill(self, pod: str) -> None:
        """SIGKILL to all processes of a pod's container."""
        super().kill(pod)  # first, since it refuses a name that is none
        tell(self.run, "kill", self._short(pod))

    def wait_for(self, step: int) -> None:
        """Return when the step is done; raises UsageError when the job ends before, or it takes too long."""
        while not any(e["event"] == "step" and e["step"] >= step for e in read_events(self.run).events):
            if self.done or time.monotonic() > self._until:
                why = f"has ended ({self.phase})" if self.done else f"has run for {LIMIT_S:g} s ({_BUSY})"
                raise UsageError("\n".join([f"the job {why}, and step {step} is not done:", *self.lines[-15:]]))
            self.wait(0.1)

    def wait_end(self) -> str:
        """Wait for the end and return the last condition; raises UsageError when it takes too long."""
        phase = self.wait(max(0.0, self._until - time.monotonic()))
        if phase is None:
            raise UsageError("\n".join([f"the job did not end within {LIMIT_S:g} s ({_BUSY}):", *self.lines[-15:]]))
        return phase
