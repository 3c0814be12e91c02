"""torchrun with the exit code of its workers: `python -m course_lib.engine.launch [torchrun's options] SCRIPT …`

torchrun ends with 1, whatever happened; a scheduler wants to know whether to put the job into its queue again. This is
the same agent with the same options, and it ends with

    0    when torchrun does
    2    when the workers refused their input: another try will end alike
    143  when the job was preempted and its snapshot is published: the same command goes on from there
    1    for everything else

For this node: on several, each agent speaks for its own workers. Each worker leaves its exit code, with `run` of
`course_lib.engine`, where the agent finds it. Unless it is set, it also sets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1,
without which the loss of rank 0's node is not always survived.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from course_lib.engine.entry import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, LEAVING, _say


def main() -> int:
    """Be an agent, and say what became of its workers."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with tempfile.TemporaryDirectory(prefix="exit-codes-", ignore_cleanup_errors=True) as directory:
        os.environ[LEAVING] = directory
        try:
            torchrun.main(sys.argv[1:])
        except ChildFailedError as error:
            _say(str(error))
            if not {f.exitcode for f in error.failures.values()} & {EXIT_USAGE, EXIT_PREEMPTED}:
                return EXIT_FAILED  # what is in the directory is of an earlier attempt
        except SignalException as error:
            _say(f"the agent was asked to end by {error.sigval.name}")
        else:
            return 0
        for signum in (signal.SIGTERM, signal.SIGINT):  # one more would end us with torchrun's traceback, and 1
            signal.signal(signum, signal.SIG_IGN)
        return outcome(Path(directory))


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
