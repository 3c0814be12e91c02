"""Where a pod's paths are on this machine: its volumes are folders of the work directory, its image's a folder's files.

A path in a command, an argument or a value of the environment is replaced by the folder's, wherever it stands as a
word of its own or as the beginning of a longer path. What a program has written into its own files is not found.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from course_lib.lab.pytorchjob.job import SHARED, Mount, Pod


def folder(workdir: Path, pod: Pod, mount: Mount) -> Path:
    """The folder of a volume: one for all pods (a claim), one a node (hostPath), or one that ends with the pod."""
    if mount.kind in SHARED:
        base = workdir / "volumes" / mount.claim
    elif mount.kind == "hostPath":
        base = workdir / "nodes" / pod.name / mount.claim
    else:
        base = workdir / "pods" / pod.name / mount.volume
    return base / mount.sub_path if mount.sub_path else base


def make_folders(workdir: Path, pod: Pod, mounts: tuple[Mount, ...]) -> dict[str, str]:
    """Make the folders of a new pod; what an earlier one had for itself is removed. Returns path -> folder."""
    shutil.rmtree(workdir / "pods" / pod.name, ignore_errors=True)
    found = {}
    for mount in mounts:
        if mount.path != "/dev/shm":  # the machine's own, which no container bounds
            place = folder(workdir, pod, mount)
            place.mkdir(parents=True, exist_ok=True)
            found[mount.path] = str(place)
    return found


def rewrite(text: str, places: Mapping[str, str]) -> str:
    """`text` with each path (or name) of `places` replaced by what it is here; of two that fit, the longer."""
    if not places:
        return text
    names = "|".join(re.escape(name) for name in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])(?:{names})(?![\w.-])", lambda match: places[match[0]], text)
