"""From a pod of the manifest to the command that runs here."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from course_lib.lab.pytorchjob.container import Container, Plan
from course_lib.lab.pytorchjob.injected import injected, own_environment, pod_fields, resolve
from course_lib.lab.pytorchjob.job import Pod, PyTorchJob, Replica
from course_lib.lab.pytorchjob.logs import PodLogs
from course_lib.lab.pytorchjob.paths import make_folders, rewrite
from course_lib.lab.pytorchjob.places import Place

_CURE = "is not on this machine: --map {folder}=HERE says which folder holds the same here"


class Starter:
    """Starts the containers of a job. `maps` are paths of the image -> folders."""

    def __init__(self, job: PyTorchJob, workdir: Path, logs: PodLogs, place: Place, maps: Mapping[str, str]) -> None:
        self._job, self._workdir, self._logs, self._place = job, workdir, logs, place
        self._maps = maps

    def new_pod(self, pod: Pod, replica: Replica) -> Callable[[], Container]:
        """Make the folders of a new pod; what is returned starts its container."""
        folders = make_folders(self._workdir, pod, replica.container.mounts)
        places = {**self._place.names, **self._maps, **folders}
        return lambda: self._start(pod, replica, places)

    def _start(self, pod: Pod, replica: Replica, places: Mapping[str, str]) -> Container:
        container = replica.container
        own = own_environment(container, pod_fields(self._job, pod, self._place.address(pod)))
        known = {
            **{name: rewrite(value, places) for name, value in own.items()},
            **{name: rewrite(value, self._place.names) for name, value in injected(self._job, pod).items()},
        }
        words = [rewrite(resolve(word, known), places) for word in container.words]
        plan = Plan(pod, words, known, _folder(replica, places), self._logs.next(pod.name))
        return Container(plan, self._place)


def not_here(job: PyTorchJob, maps: Mapping[str, str]) -> list[str]:
    """A line for each folder and script that the image would hold, and this machine does not."""
    found = []
    for replica in job.replicas:
        container = replica.container
        volumes = {mount.path: "" for mount in container.mounts}
        given = container.working_dir
        if given and rewrite(given, volumes) == given and not _folder(replica, maps).is_dir():
            found.append(f"{container.where}.workingDir: {given} {_CURE.format(folder=given)}")
            continue
        for where, word in container.placed_words():
            script = re.fullmatch(r"[^\s$=-][^\s$=]*\.py", word) and rewrite(word, volumes) == word
            if script and not (_folder(replica, maps) / rewrite(word, maps)).is_file():
                folder = word.rpartition("/")[0] if word.startswith("/") else given
                cure = _CURE.format(folder=folder) if folder else "is not in the present folder: start from where it is"
                found.append(f"{where}: {word} {cure}")
    return found


def _folder(replica: Replica, places: Mapping[str, str]) -> Path:
    """The working directory; without one it would be the image's, and here is the present one."""
    given = replica.container.working_dir
    return Path(rewrite(given, places)) if given else Path.cwd()
