"""The Dockerfile of scripts/cluster, which is read here and not built."""

import json
import re

from helpers import REPO
from test_cluster_files import CLUSTER, pods
from test_project import project


def instructions() -> list[tuple[str, str]]:
    text = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_has_what_it_copies_and_the_projects_ranges() -> None:
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]
    assert copied and ignored[[line.startswith("#") for line in ignored].index(False)] == "*"
    for name in copied:
        assert (REPO / name).exists() and name.split("/")[0] in kept
    installed = " ".join(rest for name, rest in instructions() if name == "RUN" and "pip install" in rest)
    wanted = project()["project"]["dependencies"]
    assert re.findall(r'"(\w[^"]+)"', installed.replace('"$TORCH_INDEX"', "")) == wanted and "--no-deps ." in installed
    started = [word for _, spec in pods() for word in spec["containers"][0]["args"] if word.endswith(".py")]
    assert len(started) == len(list(pods())) and set(started) <= set(copied)


def test_the_image_has_a_pinned_base_no_root_and_no_shell() -> None:
    found = dict(instructions())
    tested = project()["tool"]["course"]["tested"]["python"]
    assert re.fullmatch(rf"python:{re.escape(tested)}\.\d+-slim-\w+", found["FROM"])
    assert found["USER"] == "1000"
    entry, default = json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])
    assert entry == ["python", "-m", "course_lib.engine.launch"] and default[-1].startswith("--run-dir=")
    order = [name for name, _ in instructions()]
    assert order.index("USER") > max(n for n, name in enumerate(order) if name in ("RUN", "COPY"))
