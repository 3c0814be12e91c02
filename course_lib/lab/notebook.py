"""What the first cell of every notebook calls, and commands that fail loudly.

    from course_lib.lab.notebook import fresh, setup

    setup()

This module imports nothing heavy, so that `setup` can say what is missing.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from course_lib.lab.output import root_cause, without_agent
from course_lib.lab.processes import JOB_SETTINGS, MARK, describe_exit, kernel_mark, kill_marked, launch_mark

_TAIL_LINES, _TAIL_CHARACTERS = 15, 20_000
# What torchrun or a pod may have left in the environment; it would tell a script that it is somebody's worker.
_LAUNCHER = re.compile("PET_|TORCHELASTIC_|MASTER_(ADDR|PORT)$|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|ROLE_NAME$")
_NEEDED = ("torch", "numpy", "matplotlib", "sklearn")


class SetupFailed(RuntimeError):
    """The notebook cannot run here; the message says what to do."""


class CommandFailed(RuntimeError):
    """A `!` command ended with a non-zero `exit_code`; the message ends with the last lines of its output."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def setup(device: str = "cpu") -> None:
    """Make this kernel ready for the course, from wherever it was started; calling it twice is harmless.

    It works in the repository's root from then on, puts this environment first on PATH, hides the GPUs unless
    `device` is "cuda", and makes a `!` command that fails raise CommandFailed. It prints nothing when all is well.
    Raises SetupFailed, which names what blocks and what to do.
    """
    if device not in ("cpu", "cuda"):
        raise SetupFailed(f"setup(device={device!r}): the device is 'cpu' or 'cuda'")
    if sys.platform == "win32":
        raise SetupFailed("the course needs Linux or macOS: on Windows install WSL2 and start JupyterLab in it")
    root = find_root(Path.cwd())
    os.chdir(root)
    _set_environment(root, device)
    _check_packages()
    torch = import_module("torch")
    torch.set_num_threads(1)
    if device == "cuda" and not torch.cuda.is_available():
        raise SetupFailed("setup(device='cuda'): torch finds no GPU here; call setup() to work on the CPU")
    _make_commands_fail_loudly()


def find_root(start: Path) -> Path:
    """The course's folder: `start` or one above it, else the one that this package was imported from."""
    here = Path(__file__).resolve().parents[2]
    for folder in (start, *start.parents):
        if _is_root(folder):
            if folder.resolve() != here:
                raise SetupFailed(
                    f"this notebook is in {folder}, but its kernel takes course_lib from {here}: "
                    f"start JupyterLab with `make lab` in {folder}"
                )
            return folder
    if not _is_root(here):
        raise SetupFailed(f"the course's scripts are not beside {here}: start JupyterLab with `make lab`")
    return here


def _is_root(folder: Path) -> bool:
    return all((folder / part).exists() for part in ("pyproject.toml", "course_lib/lab", "scripts"))


def _set_environment(root: Path, device: str) -> None:
    for name in [name for name in os.environ if _LAUNCHER.match(name)]:
        del os.environ[name]
    os.environ.update(JOB_SETTINGS)
    _put_first("PATH", str(Path(sys.executable).parent))
    _put_first("PYTHONPATH", str(root))  # a script's folder is what Python puts first, not the working directory
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    # fish and zsh read files of the user's before a command, which may put another Python first again.
    os.environ["SHELL"] = "/bin/sh"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ[MARK] = kernel_mark()  # whatever a cell starts ends with this kernel


def _put_first(variable: str, folder: str) -> None:
    others = [part for part in os.environ.get(variable, "").split(os.pathsep) if part and part != folder]
    os.environ[variable] = os.pathsep.join([folder, *others])


def _check_packages() -> None:
    """torch and numpy are imported, since a half-installed one can be found and doesn't work; the others are found."""
    for name in _NEEDED:
        try:
            if name in ("torch", "numpy"):
                import_module(name)
            elif find_spec(name) is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
        except Exception as error:
            raise SetupFailed(
                f"{name} cannot be imported ({type(error).__name__}: {error}).\n"
                f"This kernel's Python is {sys.executable}.\n"
                f"Install what the course needs into it, in {Path.cwd()}:\n"
                f"    {sys.executable} -m pip install -e '.[course]'\n"
                "or close this and start JupyterLab with `make lab`, which makes an environment of its own."
            ) from None


def fresh(name: str) -> Path:
    """An empty run directory `name` among the runs (COURSE_RUNS, else runs/): what an earlier run left goes.

    Raises UsageError when a job still uses it.
    """
    from course_lib.engine import UsageError
    from course_lib.lab.launch import fresh_directory, runs_directory

    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise UsageError(f"fresh({name!r}): give a plain name such as '04-crash', without a folder")
    return fresh_directory(runs_directory() / name)


# --- commands that fail loudly ------------------------------------------------------------------------------------


def _make_commands_fail_loudly() -> None:
    """Wrap IPython's `system`, which runs `!` lines; it stores the exit code and goes on, whatever it is."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return
    shell: Any = get_ipython()
    if shell is None or getattr(shell.system, "fails_loudly", False):
        return
    wrapped = _loud(shell, shell.system)
    wrapped.fails_loudly = True  # type: ignore[attr-defined]  # a function may carry it
    shell.system = wrapped


def _loud(shell: Any, original: Callable[[str], None]) -> Callable[[str], None]:
    def system(cmd: str) -> None:
        # `{run}` and `$run` mean the cell's variables: two frames up from var_expand, which is one too few for
        # the original, so that gets only a name to expand, in this frame.
        command = shell.var_expand(cmd, depth=1)
        mark, value = launch_mark()
        tail, before, started = _Tail(), os.environ.get(MARK, ""), time.monotonic()
        os.environ[MARK] = value
        try:
            with redirect_stdout(tail):
                original(command if command.rstrip().endswith("&") else "{command}")
        finally:
            os.environ[MARK] = before
            # The stop button ends a command's shell within half a second, and whatever that has started lives on.
            kill_marked(mark)
        code = shell.user_ns["_exit_code"]
        if code != 0:
            raise CommandFailed(_explain(command, code, time.monotonic() - started, tail.text()), code)

    return system


@dataclass
class Failure:
    """What `expect_failure` saw; `exit_code` is negative when a signal ended the command."""

    exit_code: int = 0


@contextmanager
def expect_failure() -> Iterator[Failure]:
    """For a `!` command that is meant to fail: the cell goes on, and fails when the command does not."""
    failure = Failure()
    try:
        yield failure
    except CommandFailed as error:
        failure.exit_code = error.exit_code
    if failure.exit_code == 0:
        raise RuntimeError("this command was expected to fail, but its exit code is 0")


def _explain(command: str, code: int, seconds: float, output: str) -> str:
    lines = [line for line in output.replace("\r\n", "\n").split("\n") if line.strip()]
    # torchrun ends with a long traceback of its own, which would push out what the worker has said.
    cause = root_cause(lines)
    lines = (without_agent(lines) if cause else lines)[-_TAIL_LINES:] + cause
    where = f"\nThis environment's commands are in {Path(sys.executable).parent}." if code == 127 else ""
    said = "\n".join(f"  {line[:300]}" for line in lines) or "  (nothing; in a terminal it stands above)"
    return f"{describe_exit(code)} after {seconds:.0f} s: {command}{where}\nIts last lines:\n{said}"


class _Tail:
    """Passes on what is written to stdout, and keeps the end of what this thread wrote."""

    def __init__(self) -> None:
        self._stdout, self._thread, self._text = sys.stdout, threading.get_ident(), ""

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            self._text = (self._text + text)[-_TAIL_CHARACTERS:]
        return self._stdout.write(text)

    def __getattr__(self, name: str) -> Any:  # what else a notebook's stdout can do
        return getattr(self._stdout, name)

    def text(self) -> str:
        return self._text
