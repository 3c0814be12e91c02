"""torchrun with restarts in a fraction of the time, and with the exit code of its workers.

    python -m course_lib.engine.launch [--cold] [--preload MODULES] [torchrun's options] SCRIPT …

The agent and its options are torchrun's. Its workers are forked from a process that has done the imports, so a restart
skips them; `--preload a,b` names more modules than the script itself imports, and `--cold` starts each worker from
nothing, as torchrun does. A scheduler wants to know whether to put the job into its queue again, so it ends with

    0    when torchrun does
    2    when the workers refused their input: another try will end alike
    143  when the job was preempted and its snapshot is published: the same command goes on from there
    1    for everything else

For this node: on several, each agent speaks for its own workers. Each worker leaves its exit code, with `run` of
`course_lib.engine`, where the agent finds it. Unless it is set, it also sets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
without which the loss of rank 0's node is not always survived.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from course_lib.engine import warm
from course_lib.engine.entry import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, LEAVING, _say
from course_lib.engine.watchdog import AGENT, STOP_SIGNALS


def main() -> int:
    """Be an agent, and say what became of its workers."""
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__)  # torchrun's options follow
    _open_closed_streams()
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.pop(AGENT, None)  # of a launch around this one
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))  # Slurm's warning, deadly to torchrun
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--cold", action="store_true")
    own.add_argument("--preload", default="")
    ours, theirs = _ours(own, sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="exit-codes-", ignore_cleanup_errors=True) as directory:
        os.environ[LEAVING] = directory
        try:
            _launch(ours, theirs)
        except ChildFailedError as error:
            _say(str(error))
            if not {f.exitcode for f in error.failures.values()} & {EXIT_USAGE, EXIT_PREEMPTED}:
                return EXIT_FAILED  # what is in the directory is of an earlier attempt
        except SignalException as error:
            _say(f"the agent was asked to end by {error.sigval.name}")
        else:
            return 0
        return outcome(Path(directory))


def _open_closed_streams() -> None:
    """Let no file of ours become a worker's standard input or output because somebody has closed these."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number


def _ours(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, which come first, and the words that are torchrun's or the script's."""
    count = 0
    while count < len(words) and words[count].split("=")[0] in ("--cold", "--preload"):
        count += 2 if words[count] == "--preload" else 1
    return parser.parse_args(words[:count]), words[count:]


def _launch(ours: argparse.Namespace, words: list[str]) -> None:
    args = torchrun.parse_args(words)  # type: ignore[no-untyped-call]
    try:
        if ours.cold or args.no_python or args.run_path or sys.platform != "linux":
            torchrun.run(args)  # type: ignore[no-untyped-call]
        else:
            _launch_warm(args, ours.preload)
    finally:
        for signum in STOP_SIGNALS:  # one more would end us with torchrun's traceback, and 1
            signal.signal(signum, signal.SIG_IGN)
        warm.stop()


def _launch_warm(args: argparse.Namespace, preload: str) -> None:
    if args.standalone:  # as `torchrun.run` has it
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    args.start_method = "forkserver"
    config, _, _ = torchrun.config_from_args(args)
    warm.prepare(args.training_script, args.module, [name for name in preload.split(",") if name])
    # torch prints the agent's own traceback for each worker that ends; the worker has said why.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    try:
        elastic_launch(config, warm.work)(args.training_script, args.module, *args.training_script_args)
    except ChildFailedError as error:  # torch names it after our function
        raise ChildFailedError(args.training_script, error.failures) from None


def _without_traceback(record: logging.LogRecord) -> bool:
    record.exc_info = None
    return True


def outcome(directory: Path) -> int:
    """What the exit codes in `directory`, in files named RESTARTS-LOCAL_RANK, add up to: the last attempt's count.

    All ranks stop together once their snapshot is published, so one 143 says it for all: the agent, which the first of
    them tells to end, may end another before it has left its code.
    """
    codes = {tuple(map(int, path.name.split("-"))): int(path.read_text()) for path in directory.glob("[0-9]*")}
    last = max((attempt for attempt, _ in codes), default=0)
    final = {code for (attempt, _), code in codes.items() if attempt == last}
    if EXIT_USAGE in final:
        return EXIT_USAGE
    if final == {0}:
        return 0  # the agent was asked to end when the work was done
    return EXIT_PREEMPTED if EXIT_PREEMPTED in final else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
