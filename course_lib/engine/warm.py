"""Workers that are forked from a process that has imported everything already, instead of started from nothing.

A restart then skips the start of Python and the imports, which are most of its time. The fork server is the standard
library's; it is told what to import by the script's own import statements. Nothing may touch a GPU before the fork,
since a CUDA context does not survive one. A worker runs the script as it is on the disk at that moment, but modules as
they were when the launch began.
"""

import ast
import atexit
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import TextIOWrapper
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from course_lib.engine.watchdog import AGENT, STOP_SIGNALS, die_with_parent

# What torch imports at the first use of DDP or of an optimizer, in over a second; and what the agent's module imports.
_ALWAYS = ("torch._dynamo", "torch.distributed.run", __name__)
_hasty: list[str] = []  # in the fork server: the module whose import has used a GPU
_TOLD = "COURSE_FORK_SERVER"  # what the fork server is to import, and the path on which it finds that, as JSON


def prepare(target: str, as_module: bool, extra: list[str]) -> None:
    """Tell the fork server, which starts with the first worker, what to import for a script (or module)."""
    spec = find_spec(target) if as_module else None
    path = Path(spec.origin or "") if spec is not None else Path(target)
    places = sys.path if as_module else [str(path.resolve().parent), *sys.path]
    modules = [*imports_of(path), *extra, *_ALWAYS]
    os.environ[_TOLD] = json.dumps({"modules": modules, "path": places})
    os.environ[AGENT] = str(os.getpid())
    multiprocessing.set_forkserver_preload(["course_lib.engine.fork_server"])
    forkserver.ensure_running()  # it imports while the agent finds its peers
    MultiprocessContext._start = _undisturbed(MultiprocessContext._start)  # type: ignore[method-assign]


def _undisturbed(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a signal wait until the agent knows all the workers that it is starting.

    A worker may be so quick that it tells the agent to end before its siblings are there, who would be forgotten.
    """

    def start_all(context: Any) -> None:
        came: list[int] = []
        handled = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
        before = {signum: signal.signal(signum, lambda number, _: came.append(number)) for signum in handled}
        try:
            start(context)
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
        if came:
            signal.raise_signal(came[0])

    return start_all


def stop() -> None:
    """End the fork server, which would otherwise go a moment after this process, or never while a child of it lives."""
    with suppress(AttributeError, TypeError, OSError):  # no public way; and a cold launch has none
        server: Any = forkserver._forkserver
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def imports_of(path: Path) -> list[str]:
    """The modules that a Python file imports at its top level, in order; none when it cannot be read."""
    with suppress(OSError, SyntaxError, ValueError):
        found: list[str] = []
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.Import):
                found += [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.append(node.module)
        return [name for name in dict.fromkeys(found) if name != "__future__"]
    return []


def serve() -> None:
    """What the fork server does first: import, and stay when the whole process group is told to stop.

    The workers have to see such a signal, not lose their parent; they lose it when the agent dies. What cannot be
    imported here fails in the worker, where the error is shown.
    """
    die_with_parent(int(os.environ[AGENT]))  # the library's own pipe stays open as long as a worker lives
    # Blocked and not ignored: what the agent sends to a worker that has hardly been forked must not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    told = json.loads(os.environ.pop(_TOLD))
    environment, threads = dict(os.environ), torch.get_num_threads()
    sys.path[:] = told["path"]
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else the question whether there is a GPU would spoil it
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    for name in told["modules"]:
        with suppress(Exception, SystemExit):
            importlib.import_module(name)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _hasty.append(name)
            break
    torch.set_num_threads(threads)
    os.environ.clear()  # of what an import has left there
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each worker would say it once more
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # again: a tracker of resources unblocks them


def work(target: str, as_module: bool, *arguments: str) -> None:
    """A worker's life: what `python target arguments` (or `python -m`) would do. It returns when that exits with 0."""
    multiprocessing.set_start_method(None, force=True)  # a worker's own children are its own, and not the server's
    np.random.seed()  # the state was copied with everything else; Python and torch see to theirs
    try:
        # The server ignores it, and so does what a shell starts in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if _hasty:
            sys.exit(f"{_hasty[0]} uses the GPU as it is imported, before the fork: launch with --cold")
        with _returning():
            _run(target, as_module, arguments)
    except SystemExit as error:
        if error.code is not None and error.code != 0:
            raise
    except KeyboardInterrupt:
        sys.exit(130)  # torch would take it for a success
    except Exception:
        traceback.print_exc()  # torch would keep it in a file
        sys.exit(1)


def _run(target: str, as_module: bool, arguments: tuple[str, ...]) -> None:
    sys.argv = [target, *arguments]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            path = Path(target).resolve()
            sys.path[0] = str(path.parent)  # as for any script; multiprocessing has put the agent's there
            runpy.run_path(str(path), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without them


@contextmanager
def _returning() -> Iterator[None]:
    """Turn an `os._exit(0)` of this process into a SystemExit: the agent waits for the end of `work`."""
    leave, me = os._exit, os.getpid()

    def leave_or_return(code: int) -> None:
        if code == 0 and os.getpid() == me and threading.current_thread() is threading.main_thread():
            raise SystemExit(0)
        leave(code)

    os._exit = leave_or_return  # type: ignore[assignment]  # it does return, by way of an exception
    try:
        yield
    finally:
        os._exit = leave
