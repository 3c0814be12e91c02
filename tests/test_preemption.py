"""A job that is told to go: one snapshot, exit 143 for the scheduler, and the same command goes on to the same bits."""

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import helpers
import psutil
import pytest
from jobs import SCRIPT, SHORT, assert_same_result, undisturbed

from course_lib.engine import read_events
from course_lib.engine.launch import outcome

pytestmark = pytest.mark.matrix

AGENT = "course_lib.engine.launch"


def command(run_dir: Path, *options: str | float, max_restarts: int = 1) -> list[str]:
    """The short job under the agent that has its workers' exit codes."""
    words = helpers.torchrun_cmd(*SHORT, *options, script=SCRIPT, run_dir=run_dir, max_restarts=max_restarts)
    return [AGENT if word == "torch.distributed.run" else word for word in words]


def start(run_dir: Path, *options: str | float, max_restarts: int = 1) -> helpers.Completed:
    return helpers.launch(command(run_dir, *options, max_restarts=max_restarts), env=helpers.torchrun_env())


def to_agent(signum: signal.Signals) -> Callable[[helpers.Running], None]:
    return lambda process: os.kill(process.pid, signum)


def twice(process: helpers.Running) -> None:
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGTERM)


def to_all(process: helpers.Running) -> None:
    """As a scheduler does that signals every process of the job: agent, workers, their guards and loaders."""
    for one in process.processes():
        with suppress(psutil.Error):
            one.send_signal(signal.SIGTERM)


def to_one(process: helpers.Running) -> None:
    """Rank 1, by the file of events that it writes: a forked worker's environment is not to be seen from outside."""
    words = process.popen.args
    assert isinstance(words, list)
    run_dir = Path(words[words.index("--run-dir") + 1])
    events = [path for path in run_dir.glob("events/*.jsonl") if '"rank": 1' in path.read_text()]
    os.kill(int(events[0].stem.rsplit("-", 1)[1]), signal.SIGTERM)


SLOW = pytest.mark.slow
# Where rank 1 is for two seconds when the signal comes, and to whom it is sent.
SITUATIONS = [
    pytest.param("forward", to_agent(signal.SIGTERM), (), id="collective"),  # the other rank waits for it there
    pytest.param("forward", to_agent(signal.SIGINT), (), id="SIGINT", marks=SLOW),
    pytest.param("snapshot", to_agent(signal.SIGTERM), (), id="snapshot", marks=SLOW),  # one is being written
    pytest.param("eval", to_agent(signal.SIGTERM), (), id="evaluation"),
    pytest.param("forward", twice, (), id="twice", marks=SLOW),
    pytest.param("forward", to_all, ("--num-workers", 2), id="all processes"),
    pytest.param("forward", to_one, (), id="one worker", marks=SLOW),
]


@pytest.mark.parametrize(("at", "send", "options"), SITUATIONS)
def test_a_preempted_job_ends_with_143_and_goes_on(
    tmp_path: Path, at: str, send: Callable[[helpers.Running], None], options: tuple[str | float, ...]
) -> None:
    fault = ("--fault", f"slow:rank=1,seconds=2,step=2,at={at}")
    with helpers.running(command(tmp_path, *fault, *options), env=helpers.torchrun_env()) as process:
        deadline = time.monotonic() + 60
        while not read_events(tmp_path).named("fault"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        send(process)
        stopped = process.wait()
    assert stopped.returncode == 143, stopped.tail()
    stops = read_events(tmp_path).named("stop_requested")
    assert sorted(event["rank"] for event in stops) == [0, 1] and len({event["step"] for event in stops}) == 1
    assert stopped.output.count(f"stopped as asked after {stops[0]['step']} steps") == 1

    resumed = start(tmp_path, *options)
    assert resumed.returncode == 0, resumed.tail()
    mine = assert_same_result(tmp_path, undisturbed())
    assert mine["steps_replayed"] == 0 and mine["generations"] == 2


def test_a_time_limit_ends_with_143_too(tmp_path: Path) -> None:
    stopped = start(tmp_path, "--time-limit", 1)  # over before the first step, which is done all the same
    assert stopped.returncode == 143, stopped.tail()
    assert start(tmp_path).returncode == 0
    assert_same_result(tmp_path, undisturbed())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--data-root", "nowhere", "--data", "image_folder"), 2),
        (("--fault", "exit:step=1"), 1),  # and no restart is left
        (("--fault", "kill:step=1"), 1),
    ],
    ids=["refused", "failed", "killed"],
)
def test_the_agent_has_its_workers_exit_code(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    done = start(tmp_path, *options, max_restarts=0)
    assert done.returncode == code, done.tail()
    assert "Traceback" not in done.output.split("FAILED")[0]


STALE = """
import os, signal, sys
from pathlib import Path
Path(os.environ["COURSE_EXIT_CODES"], "0-0").write_text("143")  # as an earlier life of this attempt has left it
if sys.argv[1] == "import":
    os.kill(os.getpid(), signal.SIGKILL)
from course_lib.engine import run
run(lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.parametrize("dies_in", ["import", "main"])
def test_what_an_earlier_life_left_does_not_speak_for_one_that_was_killed(tmp_path: Path, dies_in: str) -> None:
    """When a node joins, the workers begin anew, and torchrun does not count it."""
    (tmp_path / "job.py").write_text(STALE)
    words = helpers.torchrun_cmd(dies_in, script=tmp_path / "job.py", nproc=1)
    done = helpers.launch([AGENT if w == "torch.distributed.run" else w for w in words], env=helpers.torchrun_env())
    assert done.returncode == 1, done.tail()


def test_a_preemption_is_one_although_nobody_reads_what_is_said(tmp_path: Path) -> None:
    """As with `… 2>&1 | tee log` and Ctrl-C, which ends tee first."""
    fault = ("--fault", "sigterm:rank=1,step=2")
    shell = f"{shlex.join(command(tmp_path, *fault))} 2>&1 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = helpers.launch(["bash", "-c", shell], env=helpers.torchrun_env())
    assert done.returncode == 143
    assert start(tmp_path).returncode == 0
    assert_same_result(tmp_path, undisturbed())


def test_a_job_that_survived_is_a_success(tmp_path: Path) -> None:
    done = start(tmp_path, "--fault", "kill:step=3")
    assert done.returncode == 0, done.tail()
    assert_same_result(tmp_path, undisturbed())


def test_torchruns_own_usage_stays(tmp_path: Path) -> None:
    done = helpers.launch([command(tmp_path)[0], "-m", AGENT, "--no-such-option"], env=helpers.torchrun_env())
    assert done.returncode == 2 and "usage" in done.output


@pytest.mark.parametrize(
    ("codes", "result"),
    [
        ({"0-0": 143, "0-1": 143}, 143),
        ({"0-0": 1, "0-1": 1, "1-0": 143}, 143),  # the last attempt's count
        ({"0-0": 143, "1-0": 1}, 1),
        ({"0-0": 143, "0-1": 1}, 143),  # the other was ended while it left
        ({"0-0": 2, "0-1": 1}, 2),
        ({"0-0": 0, "0-1": 0}, 0),  # asked to end when all was done
        ({"0-0": 0, "0-1": 1}, 1),
        ({"9-0": 1, "10-0": 143, ".11-0-77": 1}, 143),
        ({}, 1),
    ],
)
def test_what_the_codes_add_up_to(tmp_path: Path, codes: dict[str, int], result: int) -> None:
    for name, code in codes.items():
        (tmp_path / name).write_text(str(code))
    assert outcome(tmp_path) == result
