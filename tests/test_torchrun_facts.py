"""What the code relies on in torch and torchrun, so that a change of theirs is noticed here first.

Each test is of one measured fact. When one fails after an update of torch, the code that works around the fact may
have become superfluous, or insufficient.
"""

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo
from torch.distributed.run import get_args_parser

Launch = Callable[..., helpers.Completed]

# Two attempts, each of which fails; no torch in the workers, so that they start at once.
ATTEMPTS = """
import json, os, sys
names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
print(json.dumps([os.environ[name] for name in names]), flush=True)
sys.exit(5)
"""


def attempts(torchrun: Launch, tmp_path: Path, **env: str) -> tuple[int, list[list[str]]]:
    """torchrun's exit code, and of each attempt: its number, whether the agent serves the store, port, run id."""
    (tmp_path / "job.py").write_text(ATTEMPTS)
    done = torchrun(script=tmp_path / "job.py", nproc=1, max_restarts=1, env=env)
    return done.returncode, [json.loads(line) for line in done.output.splitlines() if line.startswith('["')]


def test_a_job_is_not_restarted_unless_one_asks_for_it() -> None:
    assert get_args_parser().get_default("max_restarts") == 0


def test_all_attempts_share_the_agents_store_and_torchrun_ends_with_1(torchrun: Launch, tmp_path: Path) -> None:
    code, (first, second) = attempts(torchrun, tmp_path)
    assert code == 1  # whatever the worker's was
    assert (first[0], second[0]) == ("0", "1")
    assert first[1:] == second[1:]
    assert first[1] == "True"


def test_a_variable_gives_each_attempt_a_store_of_its_own(torchrun: Launch, tmp_path: Path) -> None:
    _, (first, second) = attempts(torchrun, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert (first[1], second[1]) == ("False", "False")
    assert first[2] != second[2]  # rank 0 serves at another port in each attempt
    assert first[3] == second[3]


TORN = """
import os, signal
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write('{"message": {"mess')
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_torn_error_file_costs_a_job_that_has_restarts_left(torchrun: Launch, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TORN)
    done = torchrun(script=tmp_path / "job.py", nproc=1, max_restarts=3)
    assert done.returncode == 1 and "JSONDecodeError" in done.output


def test_torch_loads_a_flipped_bit_without_an_error() -> None:
    buffer = io.BytesIO()
    weights = torch.arange(1024, dtype=torch.float32)
    torch.save({"weights": weights}, buffer)
    content = bytearray(buffer.getvalue())
    start = content.index(weights.numpy().tobytes())
    content[start + 2000] ^= 1
    loaded = torch.load(io.BytesIO(bytes(content)), map_location="cpu", weights_only=True)["weights"]
    assert int((loaded != weights).sum()) == 1


def test_a_python_signal_handler_does_not_run_inside_a_collective() -> None:
    assert threading.current_thread() is threading.main_thread()
    store, handled, seen = HashStore(), threading.Event(), []

    def peer() -> None:
        group = ProcessGroupGloo(store, 1, 2, timedelta(seconds=30))
        entered.wait()
        time.sleep(0.2)  # the main thread is in its barrier now
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)
        seen.append(handled.is_set())
        group.barrier().wait()

    def handle(*_: Any) -> None:
        handled.set()

    entered = threading.Event()
    old = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=peer)
    thread.start()
    try:
        group = ProcessGroupGloo(store, 0, 2, timedelta(seconds=30))
        entered.set()
        group.barrier().wait()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, old)
    assert seen == [False] and handled.is_set()


def test_a_worker_outlives_its_agent_unless_it_sees_to_it_itself(
    tmp_path: Path, running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "GRACE", 0.5)
    (tmp_path / "job.py").write_text("import time\nprint('working', flush=True)\ntime.sleep(60)\n")
    with running(helpers.torchrun_cmd(script=tmp_path / "job.py", nproc=1), env=helpers.torchrun_env()) as process:
        process.wait_for("working")
        os.kill(process.pid, signal.SIGKILL)
        process.popen.wait(20)
        time.sleep(0.5)
        assert len(process.processes()) == 1
