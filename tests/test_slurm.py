"""train.sbatch: run by bash as Slurm runs it, with stand-ins for Slurm's commands; torch and training are real."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import REPO, Completed, Running, running, torchrun_env
from jobs import report
from test_gpt_job import SHORT, result, text_file, undisturbed
from torch.distributed.run import parse_args

from course_lib.engine import read_events

SCRIPT = REPO / "scripts" / "cluster" / "train.sbatch"
PORTS = range(20000, 30000)  # of which the script takes one by the number of the job
CPU = ("--device", "cpu")  # two nodes that are one machine cannot share its GPU


@pytest.fixture
def batch(tmp_path: Path) -> Callable[..., Any]:
    """Starts the script, as the batch shell of a job on two nodes: `batch(*options, fake=…, state=…)` is a context.

    With `fake`, a shell's script stands for `python`, so that the agent costs nothing.
    """
    programs, folder = tmp_path / "bin", tmp_path / "slurm"
    programs.mkdir()
    folder.mkdir()
    stand_ins = Path(__file__).with_name("slurm_stand_ins.py")
    for name in ("srun", "scontrol", "scancel"):
        shell(programs / name, f'exec "{sys.executable}" "{stand_ins}" {name} "$@"')
    number = 7_000_000 + next(port for port in PORTS if is_free(port)) - PORTS.start

    def start(*options: object, fake: str | None = None, state: str = "RUNNING") -> Any:
        (folder / "state").write_text(state)
        shell(programs / "python", fake if fake is not None else f'exec "{sys.executable}" "$@"')
        variables = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "STAND_INS": str(folder),
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "127.0.0.[2-3]",
            "SLURM_JOB_END_TIME": str(int(time.time()) + 3600),
            "SLURM_GPUS_ON_NODE": None,
        }
        words = ["bash", str(SCRIPT), f"--run-dir={tmp_path / 'run'}", *map(str, options)]
        return running(words, env=torchrun_env(variables), cwd=REPO)

    return start


def shell(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def calls(tmp_path: Path, program: str) -> list[str]:
    """What Slurm was told."""
    path = tmp_path / "slurm" / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(program)]


def ended(batch: Callable[..., Any], *options: object, **how: Any) -> Completed:
    with batch(*options, **how) as process:
        return process.wait()


# --- the script as a text ---------------------------------------------------------------------------------------------


def test_shellcheck_has_nothing_to_say() -> None:
    program = Path(sys.executable).with_name("shellcheck")
    found = str(program) if program.exists() else shutil.which("shellcheck")
    assert found is not None, "shellcheck is missing: it comes with the extra `test`"
    done = subprocess.run([found, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_times_leave_room_for_each_other() -> None:
    text = SCRIPT.read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.M))
    assert re.search("^#SBATCH --requeue$", text, re.M) and asked["open-mode"] == "append"
    assert asked["ntasks-per-node"] == "1"
    target, seconds = re.fullmatch(r"B:(USR1)@(\d+)", asked["signal"]).groups()  # type: ignore[union-attr]
    own = re.search(r"- now - (\d+)\)\)$", text, re.M)
    assert target == "USR1" and own is not None
    # Slurm may send the signal 60 s early; then SIGTERM has torchrun's 30 s, and so has a snapshot.
    assert int(own[1]) > int(seconds) + 60 > 60 + 2 * 30
    first = next(n for n, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert not [line for line in text.splitlines()[first:] if line.startswith("#SBATCH")]  # Slurm reads none of them


# --- what it makes of an end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "state", "code", "requeued"),
    [
        ((0, 0), "RUNNING", 0, 0),
        ((143, 143), "RUNNING", 143, 1),
        ((143, 0), "RUNNING", 143, 1),
        ((1, 1), "RUNNING", 1, 0),
        ((2, 2), "RUNNING", 2, 0),
        ((0, 137), "RUNNING", 137, 0),
        ((143, 143), "CANCELLED", 143, 0),  # Slurm would take even this one back
    ],
)
def test_only_a_job_that_saved_goes_back_into_the_queue(
    batch: Callable[..., Any], tmp_path: Path, codes: tuple[int, int], state: str, code: int, requeued: int
) -> None:
    done = ended(batch, fake=f'[ "$SLURM_PROCID" = 0 ] && exit {codes[0]}; exit {codes[1]}', state=state)
    assert done.returncode == code, done.tail()
    assert [line.split()[1] for line in calls(tmp_path, "scontrol")] == ["requeue"] * requeued


FAKE = 'trap "sleep 0.5; exit 143" TERM; echo ready; while :; do sleep 0.1; done'


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_the_batch_shell_passes_the_warning_on_as_sigterm(
    batch: Callable[..., Any], tmp_path: Path, signum: signal.Signals
) -> None:
    """Twice, as a cluster may: at preemption and before the end. `kill` to srun would have killed both, with 137."""
    with batch(fake=FAKE) as process:
        process.wait_for("ready\nready")
        os.kill(process.pid, signum)
        time.sleep(0.2)
        os.kill(process.pid, signum)
        done = process.wait()
    assert done.returncode == 143, done.tail()
    assert len(calls(tmp_path, "scontrol requeue")) == 1
    assert all(line.startswith("scancel --signal=TERM 7") for line in calls(tmp_path, "scancel"))


def test_each_agent_gets_a_command_that_torchrun_understands(
    batch: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = ended(batch, "--preset=seed", fake='for word; do echo "$SLURM_NODEID $word"; done')
    lines = [line.split(" ", 1) for line in done.output.splitlines()]
    words = [word for number, word in lines if number == "1"]
    assert words == [word for number, word in lines if number == "0"] and len(words) > 10
    assert words[:2] == ["-m", "course_lib.engine.launch"]
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    args = parse_args(words[2:])  # type: ignore[no-untyped-call]
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "1", 3)
    assert (args.rdzv_backend, args.rdzv_id[:3]) == ("c10d", "700")
    host, port = args.rdzv_endpoint.split(":")
    assert host == "127.0.0.2" and int(port) in PORTS
    assert args.training_script == "scripts/gpt_torchrun.py" and args.training_script_args[-1] == "--preset=seed"
    limit = next(w for w in args.training_script_args if w.startswith("--time-limit="))
    assert 3240 <= int(limit.partition("=")[2]) <= 3300


# --- training ---------------------------------------------------------------------------------------------------------


def train(batch: Callable[..., Any], folder: Path, *options: object) -> Any:
    return batch("--text", text_file(folder), *SHORT, *CPU, *options)


def until_fault(process: Running, run_dir: Path) -> None:
    while not read_events(run_dir).named("fault"):
        assert time.monotonic() < process.deadline and process.popen.poll() is None, process.output()
        time.sleep(0.05)


SLOW = ("--fault", "slow:rank=1,seconds=3,step=3")  # so that the signal comes in the middle


def test_preempted_it_saves_and_goes_on_to_the_same_bits(batch: Callable[..., Any], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with train(batch, tmp_path, *SLOW) as process:
        until_fault(process, run_dir)
        os.kill(process.pid, signal.SIGUSR1)
        stopped = process.wait()
    assert stopped.returncode == 143, stopped.tail()
    assert len(calls(tmp_path, "scontrol requeue 7")) == 1 and not (run_dir / "report.json").exists()
    with train(batch, tmp_path) as process:
        resumed = process.wait()
    assert resumed.returncode == 0, resumed.tail()
    assert len(calls(tmp_path, "scontrol")) == 1
    found = report(run_dir)
    assert (found["steps_replayed"], found["generations"], found["world_sizes"]) == (0, 2, [2, 2])
    assert result(run_dir) == undisturbed(2, *CPU)  # of one node with two processes


def test_bad_input_is_said_once_a_node_and_stays_out_of_the_queue(batch: Callable[..., Any], tmp_path: Path) -> None:
    done = ended(batch, "--text", tmp_path / "nowhere")
    assert done.returncode == 2, done.tail()
    assert calls(tmp_path, "scontrol") == []
    assert [line.split(":")[0] for line in done.output.splitlines() if "nowhere" in line] == ["error"] * 2


@pytest.mark.slow
def test_a_warning_to_all_processes_of_a_step_is_a_preemption_too(batch: Callable[..., Any], tmp_path: Path) -> None:
    """Without `B:` Slurm sends USR1 to agents, fork servers, workers and guards (G8): they save, and none is left."""
    with train(batch, tmp_path, *SLOW) as process:
        until_fault(process, tmp_path / "run")
        os.kill(int((tmp_path / "slurm" / "step").read_text()), signal.SIGUSR1)
        done = process.wait()
    assert done.returncode == 143, done.tail()
    assert len(calls(tmp_path, "scontrol requeue")) == 1
