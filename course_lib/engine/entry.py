"""How a worker ends: the exit code, one clear line, the traceback in the log, and a word to the agent."""

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from course_lib.engine.errors import PeerLost, Preempted, UsageError
from course_lib.engine.runlog import RunLog
from course_lib.engine.watchdog import agent_pid, is_agent

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_PREEMPTED = 1, 2, 130, 143
LEAVING = "COURSE_EXIT_CODES"  # names a directory when the agent, `course_lib.engine.launch`, wants to know the codes
_PATIENCE_S, _REFUSAL_PATIENCE_S = 1.0, 15.0


def run(main: Callable[[], object]) -> NoReturn:
    """Call `main` and end the process: 0 done, 1 failed, 2 unusable input, 143 preempted with a snapshot.

    Use it as the last line of a script. Under torchrun a worker that exits with 2 or 143 would be started again
    until the restarts run out, so local rank 0 also ends its agent. The process leaves without tearing down the
    interpreter: gloo's threads abort it in the middle of that now and then (1 to 5 of 80 ends here), also after a
    barrier, and torchrun would take the finished job for a failed one. Functions given to `atexit` run.
    """
    with suppress(OSError, ValueError, RuntimeError):  # a notebook's stderr has no file
        faulthandler.enable()
    code = 0
    _leave_code(EXIT_FAILED)  # until it ends otherwise: a code that an earlier life left must not speak for this one
    try:
        main()
    except UsageError as error:
        code = EXIT_USAGE
        _refuse(error)
    except Preempted as error:
        code = EXIT_PREEMPTED
        if _local_rank() == "0":
            _say(str(error))
            if error.tell_agent:
                _stop_agent(code)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            _say(error.code)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        if _local_rank() == "0":
            _say("interrupted")
    except BaseException as error:
        code = EXIT_FAILED
        _report(error)
    if code == 0:
        atexit._run_exitfuncs()
    elif RunLog.current is not None:
        RunLog.current("left", code=code)
    _leave_code(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it; a closed one is None
            stream.flush()
    os._exit(code)


def _leave_code(code: int) -> None:
    """Tell the agent with what this process ends, when it asks: torch's own knows only who failed first."""
    directory = os.environ.get(LEAVING)
    if directory is not None:
        name = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{_local_rank()}"
        _write_whole(Path(directory, name), str(code))


def _local_rank() -> str:
    return os.environ.get("LOCAL_RANK", "0")


def _say(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # nobody reads it; a closed one is None
        sys.stderr.write(text + "\n")  # one write, so that the lines of two ranks don't tear


def _refuse(error: UsageError) -> None:
    """Say what is wrong, once on each machine, and end the agent.

    Every rank sees a mistake in the options, so local rank 0 speaks. What a rank met alone, in the middle of
    training, the first to meet it says: `open_world` marks it.
    """
    if not getattr(error, "first_here", _local_rank() == "0"):
        # Another rank speaks. Were this one the first to leave, the agent would end the other before it could.
        another_knows = hasattr(error, "first_here") or getattr(error, "everywhere", False)
        if _agent_ends_us(_PATIENCE_S if another_knows else _REFUSAL_PATIENCE_S) or another_knows:
            return
    # An error from a loader's worker process arrives wrapped in that process's traceback; its last line is ours.
    name = f"{UsageError.__module__}.{UsageError.__qualname__}: "
    line = f"error: {str(error).strip().splitlines()[-1].removeprefix(name)}"
    _say(line)
    _record(line, "")
    _stop_agent(EXIT_USAGE)


def _report(error: BaseException) -> None:
    """One line that names the rank, the step and the cause, and the traceback: here, and in the log if there is one.

    An error that all ranks raise is shown by the rank where it happened, or by local rank 0.
    """
    log = RunLog.current
    where = f"rank {os.environ.get('RANK', '0')}"
    if log is not None and log.last_step is not None:
        where += f", after step {log.last_step}"
    trace = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if log is not None:
        log("error", error=text, traceback=trace)
    path = log.path if log is not None else None
    lost = isinstance(error, PeerLost)
    if lost:
        text += "; its own last lines or the agent's summary say why"
    line = f"{where}: {text}" + (f" [traceback: {path}]" if path is not None else "")
    if not getattr(error, "everywhere", False) or error.__cause__ is not None or _local_rank() == "0":
        _say(line if lost and path is not None else trace + line)
    if lost and not getattr(error, "agent_knows", False) and _agent_ends_us(_PATIENCE_S):
        return
    _record(line, "" if lost else trace)


def _agent_ends_us(patience_s: float) -> bool:
    """Wait up to `patience_s` seconds for the agent's SIGTERM, so that another rank is the first to leave.

    The agent names the first as the cause, and a rank that still has to speak must not be ended by it. After a death
    on this machine it comes within a tenth of a second; when it doesn't come, the cause is elsewhere, or a rank
    hangs, and this rank's own failure is what the agent acts upon. Without an agent, rank 0 alone acts.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _local_rank() != "0"
    told: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        told.append(signum)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, note)
    deadline = time.monotonic() + patience_s
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(told)


def _record(line: str, trace: str) -> None:
    """Leave the failure where the agent's summary looks for it, ending with the line that says it all.

    torch's own `record` writes that file piece by piece; an agent that reads half of one ends the job, with
    restarts left. Hence the rename.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:  # empty with --log-dir /dev/null
        return
    extra = {"py_callstack": trace + line, "timestamp": str(int(time.time()))}
    _write_whole(Path(path), json.dumps({"message": {"message": line, "extraInfo": extra}}))


def _write_whole(path: Path, text: str) -> None:
    """Let the agent find all of the text in `path` or none of it; a disk that takes nothing costs nothing else."""
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        whole.write_text(text)
        whole.replace(path)


def _stop_agent(code: int) -> None:
    """Tell the elastic agent that started this worker, which ends with `code`, to end: nothing is started again.

    Only a process whose command line says that it is an agent: it could be a shell, or a notebook's kernel.
    """
    _leave_code(code)  # before, since the agent's answer may be the end of this process
    if "TORCHELASTIC_RUN_ID" in os.environ and is_agent(agent := agent_pid()):
        os.kill(agent, signal.SIGTERM)
