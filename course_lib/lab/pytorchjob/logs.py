"""What all pods say, line by line as it comes, each line behind the name of its pod."""

from collections.abc import Callable, Sequence
from pathlib import Path

from course_lib.lab.follow import Follower
from course_lib.lab.pytorchjob.job import Pod


class PodLogs:
    """The log files of one run below `workdir`/logs, a file for each life of a container."""

    def __init__(self, workdir: Path, pods: Sequence[Pod], say: Callable[[str], None]) -> None:
        runs = workdir / "logs"
        runs.mkdir(parents=True, exist_ok=True)
        self.folder = runs / str(1 + max((int(p.name) for p in runs.iterdir() if p.name.isdecimal()), default=0))
        self.folder.mkdir()
        self._width = max(len(pod.name) for pod in pods)
        self._lives: dict[str, int] = {}
        self._pod_of: dict[Path, str] = {}
        self._follower = Follower(lambda: self._pod_of)
        self._say = say

    def next(self, pod: str) -> Path:
        """The file for the next life of a pod's container."""
        self._lives[pod] = self._lives.get(pod, 0) + 1
        path = self.folder / f"{pod}-{self._lives[pod]}.log"
        self._pod_of[path] = pod
        return path

    def show(self, rest: bool = False) -> None:
        """Say the lines that have come; with `rest` also a last one without an end."""
        for path, line in self._follower.new_lines(rest):
            self._say(f"{self._pod_of[path]:{self._width}} | {line}")
