"""Set-up by the Makefile, with a Python that only pretends: environments are made and broken in no time."""

import os
import re
import shutil
from pathlib import Path

import pytest
from helpers import REPO, Completed, launch

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# Stands for python3 and, copied into the environment that it makes, for bin/python there. It writes down what it
# is asked to do. FAKE says what goes wrong. The file `installed` beside it stands for all packages.
FAKE_PYTHON = """#!/bin/sh
say() { echo "$*" >> "$LOG"; }
fails() { case " $FAKE " in *" $1 "*) ;; *) return 1 ;; esac; }
here=$(dirname "$0")
case "$1 $2" in
    "-c import sys"*) ! fails old ;;
    "-c import ensurepip"*) ! fails no-ensurepip ;;
    "-V "*) echo "Python 3.x" ;;
    "-m venv")
        say "$*"
        rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    "-m pip")
        say "$*"
        if fails killed; then kill -9 $$; fi
        if fails interrupted; then trap '' TERM; kill -TERM 0; exit 1; fi
        if fails no-network; then echo "ERROR: no network" >&2; exit 1; fi
        fails half-written || : > "$here/installed" ;;
    "-I -c") test -e "$here/installed" ;;
    *) say "$*" ;;
esac
"""

OUTER = ("VENV", "CPU", "PIP_FLAGS", "PYTEST_ARGS", "LAB_ARGS", "BENCH", "TORCH_CPU_INDEX")
MAKES = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEFILES")
VENV = "-m venv --clear .venv"
PIP = "-m pip install -q --disable-pip-version-check"
INSTALL = f"{PIP} -e .[course,test]"


class Checkout:
    """A checkout whose path holds a space, with the fake Python as its python3."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "a checkout"
        self.python = tmp_path / "fake python"
        self.log = tmp_path / "log"
        self.root.mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(REPO / name, self.root)
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def make(self, *words: str, fails: str = "") -> tuple[Completed, list[str]]:
        """The result of `make words`, and what the Pythons were asked to do meanwhile."""
        self.log.write_text("")
        env: dict[str, str | None] = dict.fromkeys(OUTER + MAKES)  # a `make test VAR=…` that runs this
        env |= {"LOG": str(self.log), "FAKE": fails, "PYTHON3": str(self.python)}
        done = launch(["make", *words], timeout=30, env=env, cwd=self.root)
        return done, self.log.read_text().splitlines()

    def outdate(self) -> None:
        """As after a change of pyproject.toml: it is newer than the set-up."""
        os.utime(self.root / ".venv" / ".course-ready", (1, 1))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_help_is_the_default_and_sets_nothing_up(checkout: Checkout) -> None:
    done, asked = checkout.make()
    assert done.returncode == 0 and asked == []
    targets = ("demo", "lab", "test", "test-all", "notebooks", "bench", "clean")
    assert all(f"\n  {target} " in done.output for target in targets)


def test_set_up_is_made_once(checkout: Checkout) -> None:
    done, asked = checkout.make("setup")
    assert (done.returncode, asked) == (0, [VENV, INSTALL]), done.output
    assert checkout.make("setup")[1] == []
    assert checkout.make("demo")[1] == ["scripts/crash_and_resume.py --run-dir runs/demo"]


def test_a_change_of_pyproject_installs_only_what_is_missing(checkout: Checkout) -> None:
    checkout.make("setup")
    checkout.outdate()
    assert checkout.make("setup")[1] == []
    checkout.outdate()
    (checkout.root / ".venv/bin/installed").unlink()
    assert checkout.make("setup")[1] == [INSTALL]
    assert checkout.make("setup")[1] == []


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_set_up_that_was_cut_short_starts_afresh(checkout: Checkout, how: str) -> None:
    done, asked = checkout.make("setup", fails=how)
    assert done.returncode != 0 and asked == [VENV, INSTALL]
    assert checkout.make("setup")[1] == [VENV, INSTALL]
    assert checkout.make("setup")[1] == []


def test_a_failed_install_says_so_and_goes_on_from_there(checkout: Checkout) -> None:
    done, _ = checkout.make("setup", fails="no-network")  # the last line is make's own
    *_, error, line, _ = done.output.splitlines()
    assert done.returncode != 0 and error == "ERROR: no network" and "set-up failed: pip could not" in line
    assert checkout.make("setup")[1] == [INSTALL]


def test_what_pip_installed_must_work(checkout: Checkout) -> None:
    done, _ = checkout.make("setup", fails="half-written")
    assert done.returncode != 0 and "does not work" in done.output.splitlines()[-2]
    assert checkout.make("setup")[1] == [VENV, INSTALL]


def test_a_copied_checkout_is_set_up_for_its_new_place(checkout: Checkout, tmp_path: Path) -> None:
    checkout.make("setup")
    checkout.root = Path(shutil.copytree(checkout.root, tmp_path / "copy", symlinks=True))
    (checkout.root / ".venv/bin/installed").unlink()  # course_lib would come from the original
    assert checkout.make("setup")[1] == [INSTALL]


def test_an_environment_whose_python_is_gone_is_made_again(checkout: Checkout) -> None:
    checkout.make("setup")
    (checkout.root / ".venv/bin/python").unlink()
    assert checkout.make("setup")[1] == [VENV, INSTALL]


def test_the_cpu_build_is_asked_for_first_and_in_the_same_range(checkout: Checkout) -> None:
    _, asked = checkout.make("setup", "CPU=1", "TORCH_CPU_INDEX=http://index.invalid/cpu")
    assert asked == [VENV, f"{PIP} --index-url http://index.invalid/cpu -r .venv/.course-torch", INSTALL]
    lines = (checkout.root / ".venv/.course-torch").read_text().splitlines()
    assert [re.split("[<>=]", line)[0] for line in lines] == ["torch", "torchvision"]
    assert all(f'"{line}"' in (REPO / "pyproject.toml").read_text() for line in lines)


@pytest.mark.parametrize(
    ("fails", "words", "message"),
    [
        ("old", [], "Python 3.10 or newer is needed"),
        ("no-ensurepip", [], "apt-get install python3-venv"),
        ("", ["PYTHON3=no-such-python"], "no-such-python not found"),
        ("", ["VENV=no-such-venv"], "VENV=no-such-venv has no bin/python"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_made(
    checkout: Checkout, fails: str, words: list[str], message: str
) -> None:
    done, asked = checkout.make("setup", *words, fails=fails)
    assert done.returncode != 0 and asked == [] and message in done.output.splitlines()[-2], done.output
    assert sorted(path.name for path in checkout.root.iterdir()) == ["Makefile", "pyproject.toml"]


def test_somebody_elses_environment_is_completed_and_never_cleared(checkout: Checkout) -> None:
    theirs = checkout.root / "theirs"
    (theirs / "bin").mkdir(parents=True)
    shutil.copy(checkout.python, theirs / "bin" / "python")
    (theirs / "precious").touch()
    assert checkout.make("setup", "VENV=theirs", fails="killed")[1] == [INSTALL]
    assert checkout.make("setup", "VENV=theirs")[1] == [INSTALL]
    assert checkout.make("setup", "VENV=theirs")[1] == []
    assert (theirs / "precious").exists() and not (checkout.root / ".venv").exists()


def test_an_environment_that_has_everything_needs_no_pip(checkout: Checkout) -> None:
    theirs = checkout.root / "theirs" / "bin"
    theirs.mkdir(parents=True)
    shutil.copy(checkout.python, theirs / "python")
    (theirs / "installed").touch()
    assert checkout.make("setup", "VENV=theirs")[1] == []


def test_without_notebooks_that_step_passes(checkout: Checkout) -> None:
    done, asked = checkout.make("nbval")
    assert done.returncode == 0 and done.output.endswith("no notebooks yet\n") and asked == [VENV, INSTALL]
    (checkout.root / "notebooks").mkdir()
    (checkout.root / "notebooks" / "00_a.ipynb").touch()
    assert checkout.make("nbval")[1] == [
        "-m pytest --nbval --nbval-current-env --nbval-cell-timeout 120 --timeout 0 notebooks/00_a.ipynb"
    ]


def test_a_benchmark_that_is_missing_or_fails_fails_the_target(checkout: Checkout) -> None:
    bench = checkout.root / "scripts" / "bench"
    bench.mkdir(parents=True)
    for name in ("a.py", "b.py", "_shared.py"):
        (bench / name).touch()
    done, asked = checkout.make("bench")
    assert done.returncode == 0
    assert asked[2:] == [f"scripts/bench/{x}.py --json runs/bench/{x}.json" for x in "ab"]
    assert checkout.make("bench", "BENCH=b")[1] == ["scripts/bench/b.py --json runs/bench/b.json"]
    assert checkout.make("bench", "BENCH=missing")[0].returncode != 0
