"""Workers forked from a server that has imported everything: the same job in all but the time that a restart takes."""

import json
import os
import signal
import textwrap
from pathlib import Path

import helpers
import psutil
import pytest
from jobs import SCRIPT, SHORT, assert_same_result, undisturbed

from course_lib.engine.warm import imports_of

AGENT = "course_lib.engine.launch"


def command(script: Path | str, *options: str | float, ours: tuple[str, ...] = (), **given: object) -> list[str]:
    """torchrun's command line with our launcher in its place, whose own options come first."""
    words = helpers.torchrun_cmd(*options, script=script, **given)  # type: ignore[arg-type]  # passed on as they are
    at = words.index("torch.distributed.run")
    return [*words[:at], AGENT, *ours, *words[at + 1 :]]


def run(script: Path | str, *options: str | float, ours: tuple[str, ...] = (), **given: object) -> helpers.Completed:
    return helpers.launch(command(script, *options, ours=ours, **given), 120, helpers.torchrun_env())


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What a script sees of itself under torchrun, under the cold and under the warm launcher."""
    folder = tmp_path_factory.mktemp("seen")
    script = write(
        folder / "look.py",
        """
        import json, os, sys, threading
        from pathlib import Path
        import torch
        facts = {
            "environment": sorted(name for name in os.environ if not name.startswith("COURSE_")),
            "ranks": [os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")],
            "argv": sys.argv, "name": __name__, "file": __file__, "place": sys.path[0], "cwd": os.getcwd(),
            "signals": [str(__import__("signal").getsignal(n)) for n in (2, 15)], "threads": threading.active_count(),
            "omp": torch.get_num_threads(), "tasks": len(os.listdir("/proc/self/task")),
        }
        Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(facts))
        """,
    )
    seen: dict[str, dict[str, object]] = {}
    for name, start in {
        "torchrun": lambda out: helpers.torchrun(str(out), "--x", script=script),
        "cold": lambda out: run(script, str(out), "--x", ours=("--cold",)),
        "warm": lambda out: run(script, str(out), "--x", ours=("--preload", "json")),
    }.items():
        out = folder / name
        out.mkdir()
        done = start(out)
        assert done.returncode == 0, done.tail()
        seen[name] = json.loads((out / "1").read_text())
        seen[name]["argv"] = ["out" if word == str(out) else word for word in seen[name]["argv"]]
    return seen


@pytest.mark.parametrize("name", ["cold", "warm"])
def test_a_worker_sees_what_it_sees_under_torchrun(world: dict[str, dict[str, object]], name: str) -> None:
    expected = dict(world["torchrun"])
    between = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}  # of agents, not of workers
    assert set(world[name].pop("environment")) - between == set(expected.pop("environment")) - between
    assert world[name] == expected


def test_a_killed_job_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    done = run(SCRIPT, *SHORT, "--fault", "kill:rank=1,step=3", run_dir=tmp_path, max_restarts=1)
    assert done.returncode == 0, done.tail()
    assert assert_same_result(tmp_path, undisturbed())["generations"] == 2
    assert "start_method: forkserver" in done.output  # it was warm, and the agent's log has no traceback of its own
    assert "ProcessExitedException" not in done.output


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit()", 0), ("sys.exit(0)", 0), ("os._exit(0)", 0), ("sys.exit(5)", 1), ("os._exit(5)", 1), ("1 / 0", 1)],
)
def test_a_script_may_end_as_it_likes(tmp_path: Path, ending: str, code: int) -> None:
    script = write(tmp_path / "end.py", f"import os, sys\nprint('here', flush=True)\n{ending}\n")
    done = run(script, nproc=1)
    assert done.returncode == code, done.tail()
    assert "here" in done.output
    assert ("ZeroDivisionError" in done.output) == (ending == "1 / 0")


def test_closed_streams_are_no_workers_output(tmp_path: Path) -> None:
    script = write(tmp_path / "speak.py", f"print('x' * 9, file=open({str(tmp_path / 'said')!r}, 'a')), print('y')")
    started = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command(script)]
    done = helpers.launch(started, 120, helpers.torchrun_env())
    assert (done.returncode, done.output) == (0, "") and (tmp_path / "said").read_text().split() == ["x" * 9] * 2


def test_bad_input_is_said_once_and_is_2(tmp_path: Path) -> None:
    done = run(SCRIPT, "--epochs", 0, run_dir=tmp_path, max_restarts=3)
    assert done.returncode == 2, done.tail()
    assert done.output.count("error: argument --epochs") == 1


def test_a_module_that_uses_the_gpu_at_its_import_is_refused(tmp_path: Path) -> None:
    """A CUDA context does not survive the fork; here torch is only made to believe that there is one."""
    write(tmp_path / "hasty.py", "import torch\ntorch.cuda.is_initialized = lambda: True\n")
    script = write(tmp_path / "train.py", "import hasty\nprint('trained', flush=True)\n")
    done = run(script, nproc=1)
    assert done.returncode == 1
    assert "hasty uses the GPU as it is imported, before the fork: launch with --cold" in done.output
    assert "trained" not in done.output
    assert run(script, nproc=1, ours=("--cold",)).returncode == 0


def test_no_process_outlives_the_agent(tmp_path: Path) -> None:
    with helpers.running(command(SCRIPT, *SHORT, "--epochs", 60, run_dir=tmp_path), env=helpers.torchrun_env()) as job:
        job.wait_for("epoch 2/60")
        family = job.processes()
        assert len(family) >= 6  # agent, fork server, two workers and their guards
        os.kill(job.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive


def test_loaders_are_their_workers_children_and_go_with_them(tmp_path: Path) -> None:
    """multiprocessing would make the server's own method the worker's default: its loaders would outlive it."""
    options = (*SHORT, "--num-workers", 1, "--fault", "kill:rank=1,step=3")
    done = run(SCRIPT, *options, run_dir=tmp_path, max_restarts=1)  # fails when a process is left behind
    assert done.returncode == 0, done.tail()
    assert_same_result(tmp_path, undisturbed())


def test_each_failure_of_a_plain_script_is_shown_and_what_it_registered_runs(tmp_path: Path) -> None:
    script = write(
        tmp_path / "plain.py",
        """
        import atexit, os
        import numpy as np
        atexit.register(lambda: print("registered", flush=True))
        print("drew", np.random.rand(), "as", __file__, flush=True)
        raise ValueError("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"])
        """,
    )
    done = run(script, nproc=1, max_restarts=1)
    assert done.returncode == 1
    assert all(f"ValueError: attempt {number}" in done.output for number in (0, 1))
    assert done.output.count("registered") == 2
    drawn = [line.split()[1] for line in done.output.splitlines() if line.startswith("drew")]
    assert len(set(drawn)) == 2  # the state of numpy's generator is not what was copied


def test_a_module_that_exits_is_the_workers_to_report(tmp_path: Path) -> None:
    write(tmp_path / "leaves.py", "import sys\nsys.exit('no licence')\n")
    done = run(write(tmp_path / "train.py", "import leaves\n"), nproc=1)
    assert done.returncode == 1
    assert "no licence" in done.output and "EOFError" not in done.output


def test_an_interrupted_worker_has_failed(tmp_path: Path) -> None:
    script = write(tmp_path / "wait.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    assert run(script, nproc=1).returncode == 1


def test_a_worker_whose_fork_server_died_leaves_with_it(tmp_path: Path) -> None:
    """Then the agent starts another one, and the job goes on."""
    words = command(SCRIPT, *SHORT, "--epochs", 20, run_dir=tmp_path, max_restarts=1)
    with helpers.running(words, env=helpers.torchrun_env()) as job:
        job.wait_for("epoch 2/20")
        server = next(p for p in job.processes() if p.ppid() == job.pid and len(p.children()) > 1)
        server.kill()
        done = job.wait()
    assert done.returncode == 0, done.tail()
    assert json.loads((tmp_path / "report.json").read_text())["generations"] == 2


def test_what_is_imported_beforehand(tmp_path: Path) -> None:
    text = """
    from __future__ import annotations
    import os, json.decoder as d
    from course_lib.engine import run
    from . import sibling
    if True:
        import never
    """
    assert imports_of(write(tmp_path / "a.py", text)) == ["os", "json.decoder", "course_lib.engine"]
    assert imports_of(write(tmp_path / "b.py", "import (")) == []
    assert imports_of(tmp_path / "missing.py") == []
