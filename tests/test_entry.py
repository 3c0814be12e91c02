"""How a worker ends: exit codes, one clear line, and what the agent is told."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import helpers
import psutil
import pytest
import test_world
from test_world import ranks, spawned
from torch.distributed import TCPStore

from course_lib.engine import (
    NonFiniteError,
    PeerLost,
    Preempted,
    RunLog,
    UsageError,
    entry,
    open_world,
    read_events,
    run,
    watchdog,
)
from course_lib.engine.watchdog import StopWatch, is_agent
from course_lib.engine.world import shared

zygote = test_world.zygote
server = test_world.server
Launch = Callable[..., helpers.Completed]

# --- one process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "code"), [("print('done')", 0), ("raise UsageError('x')", 2)])
def test_closed_streams_change_no_exit_code(launch: Launch, tmp_path: Path, body: str, code: int) -> None:
    script = tmp_path / "closed.py"
    script.write_text(f"from course_lib.engine import UsageError, run\n\ndef main():\n    {body}\n\nrun(main)\n")
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        done = launch(["sh", "-c", f'exec "$0" "$1" {closed}', sys.executable, script])
        assert done.returncode == code, (closed, done.tail())


def end_with(rank: int, outcome: Any) -> None:
    def main() -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    run(main)


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize(
    ("outcome", "code", "output"),
    [
        (None, 0, ""),
        ("a value is no failure", 0, ""),
        (SystemExit(0), 0, ""),
        (SystemExit(None), 0, ""),
        (SystemExit(7), 7, ""),
        (SystemExit("not like this"), 1, "not like this\n"),
        (UsageError("--lr: use a positive number"), 2, "error: --lr: use a positive number\n"),
        (Preempted("stopped as asked after 7 steps"), 143, "stopped as asked after 7 steps\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_each_end_has_its_exit_code_and_its_line(tmp_path: Path, outcome: Any, code: int, output: str) -> None:
    end = ranks(tmp_path, 1, end_with, outcome)[0]
    assert (end.code, end.output) == (code, output)


@pytest.mark.usefixtures("zygote")
def test_a_failure_ends_with_1_its_traceback_and_one_line(tmp_path: Path) -> None:
    end = ranks(tmp_path, 1, end_with, ValueError("boom\nand more"))[0]
    assert end.code == 1
    assert end.output.startswith("Traceback") and end.output.endswith("\nrank 0: ValueError: boom\n")


@pytest.mark.usefixtures("zygote")
def test_only_local_rank_0_speaks_for_a_mistake_that_all_have_made(tmp_path: Path) -> None:
    ends = ranks(tmp_path, 2, end_with, UsageError("--lr"))
    assert [(end.code, end.output) for end in ends] == [(2, "error: --lr\n"), (2, "")]


@pytest.mark.usefixtures("zygote")
def test_an_error_that_all_ranks_raise_is_shown_once(tmp_path: Path) -> None:
    ends = ranks(tmp_path, 2, end_with, shared(NonFiniteError("the loss is nan")))
    assert [end.code for end in ends] == [1, 1]
    assert ends[0].output.endswith("rank 0: NonFiniteError: the loss is nan\n") and ends[1].output == ""


def end_in_loader(rank: int) -> None:
    inner = f"{UsageError.__module__}.{UsageError.__qualname__}: a.png cannot be read: remove it"
    end_with(rank, UsageError(f"Caught UsageError in DataLoader worker process 0.\nOriginal Traceback\n{inner}\n"))


@pytest.mark.usefixtures("zygote")
def test_a_mistake_that_a_loader_worker_met_is_one_line_too(tmp_path: Path) -> None:
    assert ranks(tmp_path, 1, end_in_loader)[0].output == "error: a.png cannot be read: remove it\n"


def end_after_exit_functions(rank: int) -> None:
    import atexit

    atexit.register(print, "by atexit")
    end_with(rank, None)


@pytest.mark.usefixtures("zygote")
def test_exit_functions_run_and_what_was_printed_is_flushed(tmp_path: Path) -> None:
    end = ranks(tmp_path, 1, end_after_exit_functions)[0]
    assert (end.code, end.output) == (0, "by atexit\n")


def lose_a_peer(rank: int, run_dir: Path, step: int | None) -> None:
    log = RunLog(run_dir)
    if step is not None:
        log("step", step=step)
    end_with(rank, PeerLost("another rank died or left (closed by peer)"))


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize(("step", "where"), [(41, "rank 0, after step 41"), (None, "rank 0")])
def test_a_lost_peer_is_one_line_that_names_the_step_and_the_traceback_is_in_the_log(
    tmp_path: Path, step: int | None, where: str
) -> None:
    end = ranks(tmp_path, 1, lose_a_peer, tmp_path, step)[0]
    log = next((tmp_path / "events").glob("*.jsonl"))
    assert end.code == 1
    assert end.output == (
        f"{where}: PeerLost: another rank died or left (closed by peer); its own last lines or the agent's "
        f"summary say why [traceback: {log}]\n"
    )
    error = [event for event in read_events(tmp_path).events if event["event"] == "error"]
    assert "Traceback" in error[0]["traceback"] and "PeerLost" in error[0]["traceback"]


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (ValueError("boom"), "rank 0: ValueError: boom"),
        (UsageError("--lr"), "error: --lr"),
        (Preempted("stopped"), None),
        (None, None),
    ],
)
def test_the_agents_summary_finds_the_failure_and_ends_with_its_line(
    tmp_path: Path, outcome: Any, line: str | None
) -> None:
    path = tmp_path / "error.json"
    ranks(tmp_path, 1, end_with, outcome, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert path.exists() == (line is not None)
    if line is not None:
        message = json.loads(path.read_text())["message"]
        assert message["message"] == line
        assert message["extraInfo"]["py_callstack"].endswith(line) and int(message["extraInfo"]["timestamp"]) > 0
    assert [p.name for p in tmp_path.iterdir() if p.suffix not in (".txt", ".json")] == []


# --- a mistake that one rank meets, or each by itself, inside the group --------------------------------------------


def raise_inside(rank: int, port: int, who: list[int]) -> None:
    def main() -> None:
        with spawned(rank, 3, port) as world:
            if world.rank in who:
                raise UsageError("picture 7 cannot be read: remove it")
            world.gather(None)

    run(main)


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize("who", [[2], [0, 1, 2]])
def test_what_ranks_meet_by_themselves_is_said_once(tmp_path: Path, server: TCPStore, who: list[int]) -> None:
    ends = ranks(tmp_path, 3, raise_inside, server.port, who)
    assert [end.code for end in ends] == [2 if rank in who else 1 for rank in range(3)]
    lines = [line for end in ends for line in end.output.splitlines() if line.startswith("error:")]
    assert lines == ["error: picture 7 cannot be read: remove it"]


# --- who gets a signal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "yes"),
    [
        (["python", "/venv/bin/torchrun", "--standalone", "job.py"], True),
        (["/usr/bin/python3.11", "-u", "-m", "torch.distributed.run", "job.py"], True),
        (["python", "-m", "torch.distributed.launch", "job.py"], True),
        (["torchrun", "job.py"], True),
        (["python", "-W", "ignore", "-X", "dev", "-m", "course_lib.engine.launch", "job.py"], True),
        (["python", "-X", "torchrun", "watch.py"], False),
        (["bash", "-c", "torchrun --standalone job.py"], False),
        (["bash", "-c", "torchrun"], False),
        (["vim", "torchrun"], False),
        (["python", "watch.py", "torchrun"], False),
        (["python", "watch.py", "-m", "torch.distributed.run"], False),
        (["python", "-m", "pytest", "torch.distributed.run"], False),
        (["python", "-m"], False),
        (["python"], False),
        ([], False),
    ],
)
def test_an_agent_is_known_by_what_it_runs(monkeypatch: pytest.MonkeyPatch, words: list[str], yes: bool) -> None:
    monkeypatch.setattr(watchdog, "command_line", lambda pid: words)
    assert is_agent(1) is yes


def test_the_command_line_of_a_living_and_of_a_dead_process() -> None:
    assert watchdog.command_line(os.getpid()) == psutil.Process().cmdline()
    assert watchdog.command_line(2**22 + 1) == []


@pytest.mark.parametrize(("agent", "elastic", "signals"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_only_an_agent_above_a_worker_is_told(
    monkeypatch: pytest.MonkeyPatch, agent: bool, elastic: bool, signals: int
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(entry, "is_agent", lambda pid: agent)
    monkeypatch.setattr(entry.os, "kill", lambda pid, signum: sent.append((pid, signum)))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if elastic:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some-run")
    entry._stop_agent(2)
    assert sent == [(os.getppid(), signal.SIGTERM)] * signals


def test_the_agent_is_the_parent_unless_it_is_the_parents_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    grandparent = psutil.Process().parent().parent().pid  # type: ignore[union-attr]  # pytest was started by something
    for named, agent in ((None, os.getppid()), (str(grandparent), grandparent), ("1234567", os.getppid())):
        monkeypatch.setenv(watchdog.AGENT, named) if named else monkeypatch.delenv(watchdog.AGENT, raising=False)
        assert watchdog.agent_pid() == agent


REFUSE = "from course_lib.engine import UsageError, run\ndef main():\n    raise UsageError('--lr')\nrun(main)\n"


def test_a_shell_between_agent_and_worker_is_spared(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "torchrun_job.py").write_text(REFUSE)
    env = helpers.torchrun_env({"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "some-run"})
    command = f"{sys.executable} torchrun_job.py; echo torchrun survived with $?"
    done = launch(["bash", "-c", command], env=env)
    assert (done.returncode, done.output) == (0, "error: --lr\ntorchrun survived with 2\n")


# --- the watch for signals ------------------------------------------------------------------------------------


def watch(rank: int, box: Any, foreign_thread: bool) -> None:
    if foreign_thread:  # older than the watch, with its signals open, as OpenBLAS has some
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    stop = StopWatch()
    stop.start()
    stop.armed = True
    box.send(os.getpid())
    while stop.requested is None:
        time.sleep(0.01)
    box.send((stop.requested, stop.sender, stop.from_agent))
    stop.stop()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    box.send((signal.getsignal(signal.SIGTERM), signal.SIGTERM in blocked, threading.active_count()))
    time.sleep(60)


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_watched_signal_has_a_sender_and_unwatched_it_kills_again(tmp_path: Path, signum: signal.Signals) -> None:
    box, theirs = test_world.ZYGOTE.Pipe()
    process = test_world.ZYGOTE.Process(target=watch, args=(0, theirs, False), daemon=True)
    process.start()
    try:
        os.kill(box.recv(), signum)
        assert box.recv() == (signum, current_process().pid, False)
        assert box.recv() == (signal.SIG_DFL, False, 1)
        process.terminate()
        process.join(20)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join()


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize(("env", "agent"), [({"TORCHELASTIC_RUN_ID": "some-run"}, True), ({}, False)])
def test_a_signal_whose_sender_a_librarys_thread_swallowed_counts_as_the_agents(
    tmp_path: Path, env: dict[str, str], agent: bool
) -> None:
    box, theirs = test_world.ZYGOTE.Pipe()
    args = (watch, 0, (theirs, True), env, tmp_path / "out.txt", theirs)
    process = test_world.ZYGOTE.Process(target=test_world._rank, args=args, daemon=True)
    process.start()
    try:
        os.kill(box.recv(), signal.SIGTERM)
        requested, sender, from_agent = box.recv()
        # Which thread gets it is the kernel's choice; the first that does not block it, on Linux.
        assert requested == signal.SIGTERM and sender in (None, os.getpid())
        assert from_agent is (agent and sender is None)
    finally:
        process.kill()
        process.join()


def test_the_parent_is_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopWatch()
    assert not stop.from_agent
    stop.requested, stop.sender = signal.SIGTERM, os.getppid()
    assert stop.from_agent
    stop.sender = os.getpid()
    assert not stop.from_agent


def signalled_in_a_collective(rank: int, port: int) -> tuple[Any, bool]:
    store = TCPStore("127.0.0.1", port, is_master=False)
    with open_world("cpu", say=lambda text: None) as world:
        world.stop.armed = True
        pid = world.gather(os.getpid())[0]

        def tell() -> None:
            while world.stop.requested is None:
                time.sleep(0.01)
            store.set("seen", "1")

        if rank == 0:
            threading.Thread(target=tell, daemon=True).start()
        else:
            time.sleep(0.3)  # rank 0 is in the gather below by now
            os.kill(pid, signal.SIGTERM)
            store.wait(["seen"], timedelta(seconds=20))
        world.gather(None)
        return world.stop.requested, world.stop.sender == world.gather(os.getpid())[1]


@pytest.mark.usefixtures("zygote")
def test_a_signal_is_noted_while_the_main_thread_waits_for_a_peer(tmp_path: Path, server: TCPStore) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    ends = ranks(
        tmp_path, 2, signalled_in_a_collective, server.port, env=env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    assert [(end.code, end.value) for end in ends] == [(0, (signal.SIGTERM, True)), (0, (None, False))]


@pytest.mark.usefixtures("zygote")
def test_a_signal_before_there_is_anything_to_save_ends_the_process(tmp_path: Path) -> None:
    end = ranks(tmp_path, 1, signal_oneself)[0]
    assert (end.code, end.output) == (1, "stopped by SIGTERM outside of training\n")


def signal_oneself(rank: int) -> None:
    StopWatch().start()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


# --- under torchrun -------------------------------------------------------------------------------------------

BOOM = """
from course_lib.engine import RunLog, open_world, run

def main():
    RunLog("run")
    with open_world("cpu") as world:
        world.gather(None)
        if world.rank == 1:
            raise ValueError("boom")
        world.gather(None)

run(main)
"""


def test_without_restarts_the_summary_ends_with_the_first_failure(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(BOOM)
    cmd = [word for word in helpers.torchrun_cmd(script=tmp_path / "job.py") if "max-restarts" not in word]
    done = launch(cmd, env=helpers.torchrun_env())
    assert done.returncode == 1
    assert "rank      : 1 (local_rank: 1)" in done.output.split("Root Cause (first observed failure)")[1]
    assert "exitcode  : 1 " in done.output.split("Root Cause (first observed failure)")[1]
    log = next(path for path in (tmp_path / "run" / "events").glob("*.jsonl") if '"rank": 1' in path.read_text())
    assert f"rank 1: ValueError: boom [traceback: run/events/{log.name}]" in done.tail(20)
    lost = [line for line in done.output.splitlines() if "PeerLost: another rank died or left" in line]
    # On a busy machine the agent ends rank 0 before it has noticed.
    assert len(lost) <= 1 and all(line.startswith("rank 0: ") for line in lost)
    assert done.output.count("ValueError: boom") == 4  # trace and line, by the rank and in the summary


def test_a_bad_option_is_one_line_and_one_attempt(torchrun: Launch, tmp_path: Path) -> None:
    done = torchrun(*("--epochs", "many"), script="scripts/ddp_torchrun.py", max_restarts=3, run_dir=tmp_path / "run")
    assert done.returncode == 1  # torchrun's, whatever the workers' was
    lines = [line for line in done.output.splitlines() if "error" in line.lower() and not line.startswith(" ")]
    problem = "'many' is not a whole number from 1 to 2**63 - 1"
    assert lines == [f"error: argument --epochs: {problem} (--help lists the options)"]
    assert "Received 15 death signal" in done.output and not (tmp_path / "run").exists()


PREPARE = """
import os
from course_lib.engine import UsageError, open_world, run

def prepare():
    print("start", flush=True)
    if os.environ["RANK"] == "1":
        raise UsageError("--data-root: no such folder")

def main():
    with open_world("cpu", prepare=prepare):
        print("never reached", flush=True)

run(main)
"""


def test_a_prepare_that_fails_in_one_worker_ends_the_job_in_one_attempt(torchrun: Launch, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PREPARE)
    done = torchrun(script=tmp_path / "job.py", max_restarts=3)
    assert done.returncode == 1
    assert done.output.count("error: --data-root: no such folder\n") == 1
    assert done.output.count("start\n") == 2 and "never reached" not in done.output


def training(run_dir: Path, *args: Any, max_restarts: int = 3) -> list[str]:
    return helpers.torchrun_cmd(*args, script="scripts/ddp_torchrun.py", max_restarts=max_restarts, run_dir=run_dir)


def worker(process: helpers.Running, rank: int) -> psutil.Process:
    """The process of a rank: the agent's child with this number in its environment."""
    agent = psutil.Process(process.pid)
    return next(child for child in agent.children() if child.environ().get("RANK") == str(rank))


def report(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "report.json").read_text()))


DIES_WHILE_IT_TELLS = """
import os, signal
from pathlib import Path
from course_lib.engine import run

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def main():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path.{method} = die
        raise ValueError("boom")

run(main)
"""


@pytest.mark.parametrize("method", ["write_text", "replace"])
def test_a_worker_that_is_killed_while_it_writes_its_error_does_not_cost_the_job(
    torchrun: Launch, tmp_path: Path, method: str
) -> None:
    """An agent that finds half an error file ends, with restarts left."""
    (tmp_path / "job.py").write_text(DIES_WHILE_IT_TELLS.replace("{method}", method))
    done = torchrun(script=tmp_path / "job.py", nproc=1, max_restarts=1)
    assert done.returncode == 0, done.tail()


def test_no_worker_outlives_its_agent(tmp_path: Path, running: Callable[..., Any]) -> None:
    with running(training(tmp_path, "--epochs", 500), env=helpers.torchrun_env()) as process:
        process.wait_for("epoch 1/500")
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait().returncode == -signal.SIGKILL  # it fails when a worker is left after five seconds


SLOW_START = BOOM.replace("run(main)", "import time\nprint('importing', flush=True)\ntime.sleep(1)\nrun(main)")


def test_no_worker_outlives_an_agent_that_died_while_it_was_importing(
    tmp_path: Path, running: Callable[..., Any]
) -> None:
    (tmp_path / "job.py").write_text(SLOW_START)
    with running(helpers.torchrun_cmd(script=tmp_path / "job.py"), env=helpers.torchrun_env()) as process:
        process.wait_for("importing\nimporting\n")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
