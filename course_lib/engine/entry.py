"""How a worker ends: the exit code, one clear line, the traceback in the log, and a word to the agent."""

import atexit
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from course_lib.engine.errors import PeerLost, Preempted, UsageError
from course_lib.engine.runlog import RunLog

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PREEMPTED = 1, 2, 130, 143
_AGENTS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "course_lib.engine.launch")


def run(main: Callable[[], object]) -> NoReturn:
    """Call `main` and end the process: 0 done, 1 failed, 2 unusable input, 143 preempted with a snapshot.

    Use it as the last line of a script. Under torchrun a worker that exits with 2 or 143 would be started again
    until the restarts run out, so local rank 0 also ends its agent. The process leaves without tearing down the
    interpreter: gloo's threads abort it in the middle of that now and then (1 to 5 of 80 ends here), also after a
    barrier, and torchrun would take the finished job for a failed one. Functions given to `atexit` run.
    """
    code = 0
    try:
        record(main)()
    except UsageError as error:
        code = EXIT_USAGE
        _say(f"error: {error}", everyone=False)
        _stop_agent()
    except Preempted as error:
        code = EXIT_PREEMPTED
        _say(str(error), everyone=False)
        if error.tell_agent:
            _stop_agent()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        _say("interrupted", everyone=False)
    except BaseException as error:
        code = EXIT_FAILED
        _report(error)
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say(text: str, everyone: bool) -> None:
    if everyone or os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(text + "\n")  # one write, so that the lines of two ranks don't tear


def _report(error: BaseException) -> None:
    """One line that names the rank, the step and the cause; the traceback goes to the log, or here without one."""
    log = RunLog.current
    where = f"rank {os.environ.get('RANK', '0')}"
    if log is not None and log.last_step is not None:
        where += f", after step {log.last_step}"
    trace = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if log is not None:
        log("error", error=text, traceback=trace)
    in_log = log is not None and log.path is not None
    if isinstance(error, PeerLost):
        text = f"lost another rank, which probably died; its own last lines or the agent's summary say why ({text})"
    if not (in_log and isinstance(error, PeerLost)):
        sys.stderr.write(trace)
    at = f" [traceback: {log.path}]" if log is not None and log.path is not None else ""
    _say(f"{where}: {text}{at}", everyone=True)


def _stop_agent() -> None:
    """Tell the elastic agent above local rank 0 to end, so that nothing is started again.

    Only a parent whose command line says that it is an agent: it could be a shell, or a notebook's kernel.
    """
    parent = os.getppid()
    if os.environ.get("LOCAL_RANK") != "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if any(name in command_line(parent) for name in _AGENTS):
        os.kill(parent, signal.SIGTERM)


def command_line(pid: int) -> str:
    """The command line of a process, or "" when it cannot be known."""
    path = Path(f"/proc/{pid}/cmdline")
    try:
        if path.exists():
            return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, timeout=5)
        return shown.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
