"""The first cell, commands that fail loudly, and kernels that leave nothing behind: in real kernels and under nbval."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import REPO, launch, running
from kernels import IGNORE, SETUP, STEPS, STUBBORN, Kernel, kernel, nbval, notebook

import course_lib.lab.notebook as lab
from course_lib.engine import UsageError
from course_lib.lab import processes

NOTEBOOKS = sorted((REPO / "notebooks").glob("[0-9][0-9]_*.ipynb"))
TORCHRUN = "torchrun --standalone --nproc-per-node 2"
LAUNCHER = "from course_lib.lab.launch import start\n"


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A folder with a torchrun and a python that do nothing, and end as if all had gone well."""
    folder = tmp_path / "decoys"
    folder.mkdir()
    for name in ("torchrun", "python"):
        (folder / name).write_text("#!/bin/sh\necho a decoy\n")
        (folder / name).chmod(0o755)
    return folder


# --- setup --------------------------------------------------------------------------------------------------------


def test_the_root_is_found_from_anywhere(tmp_path: Path) -> None:
    for start in (REPO, REPO / "notebooks", REPO / "course_lib" / "lab", tmp_path, Path("/")):
        assert lab.find_root(start) == REPO


def test_a_kernel_of_another_checkout_is_refused(tmp_path: Path) -> None:
    for part in ("course_lib/lab", "scripts", "notebooks"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(lab.SetupFailed, match="make lab"):
        lab.find_root(tmp_path / "notebooks")


def test_a_failed_import_names_the_interpreter_and_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "find_spec", lambda name: None if name == "matplotlib" else True)
    with pytest.raises(lab.SetupFailed) as caught:
        lab._check_packages()
    text = str(caught.value)
    assert "matplotlib cannot be imported" in text and f"{sys.executable} -m pip install -e '.[course]'" in text

    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(lab, "import_module", broken)
    with pytest.raises(lab.SetupFailed, match=r"torch cannot be imported \(OSError: libcudart") as caught:
        lab._check_packages()
    assert sys.executable in str(caught.value)


def test_the_environment_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = str(Path(sys.executable).parent)
    monkeypatch.setattr(os, "environ", env := {"PATH": f"{tmp_path}:/bin:{mine}", "PET_NNODES": "3", "RANK": "1"})
    env |= {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "TORCHELASTIC_RUN_ID": "y",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/h",
    }
    for _ in range(2):
        lab._set_environment(REPO, "cpu")
        assert env["PATH"] == f"{mine}:{tmp_path}:/bin"
        assert env["PYTHONPATH"] == str(REPO) and env["CUDA_VISIBLE_DEVICES"] == "" and env["HOME"] == "/h"
        assert not env.keys() & {"PET_NNODES", "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
        assert all(env[name] == "1" for name in ("OMP_NUM_THREADS", "TQDM_DISABLE"))
        assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    lab._set_environment(REPO, "cuda")
    assert "CUDA_VISIBLE_DEVICES" not in env
    env["CUDA_VISIBLE_DEVICES"] = "3"
    lab._set_environment(REPO, "cuda")
    assert env["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_wrong_device_is_refused() -> None:
    with pytest.raises(lab.SetupFailed, match="'gpu'"):
        lab.setup("gpu")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp", ".hidden", "a b"])
def test_fresh_takes_plain_names_only(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    with pytest.raises(UsageError, match="plain name"):
        lab.fresh(name)
    assert not (tmp_path / "runs").exists()


def test_fresh_honours_course_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path))
    run = lab.fresh("04-crash")
    assert run == tmp_path / "04-crash" and run.is_dir()
    (run / "events").mkdir()
    (run / "events" / "x.jsonl").write_text("{}\n")
    assert list(lab.fresh("04-crash").iterdir()) == []


# --- in a kernel --------------------------------------------------------------------------------------------------


def failure(outputs: list[dict[str, Any]]) -> str:
    """ "NAME: message" of the error among a cell's outputs."""
    return next((f"{o['ename']}: {o['evalue']}" for o in outputs if o["type"] == "error"), "no error")


def test_commands_and_jobs_in_a_kernel_that_has_another_torchrun_first(tmp_path: Path, decoys: Path) -> None:
    # One kernel for all: its start and torch's import are what takes time.
    env = {"PATH": f"{decoys}:/usr/bin:/bin", "SHELL": "/bin/sh", "COURSE_RUNS": str(tmp_path / "runs")}
    with kernel(Path("/"), env) as it:
        expansion = "!echo {cmd} $cmd {command.lower()} '{{x}}' {tail} {1 + 1}"
        variables = "cmd, command, tail, original, system = 'A', 'B', 'C', 'D', 'E'\n"
        plain = it.text(f"{variables}{expansion}")
        assert "no error" in failure(it.run("!exit 7"))  # IPython as it is
        assert it.text(f"{SETUP}\nsetup()") == ""
        assert it.text(f"{variables}{expansion}") == plain == "A A b {x} C 2\r\n"
        assert it.text("!echo '$1' {0") == "$1 {0\r\n"  # what cannot be expanded stays as it is
        assert it.text("def f(cmd):\n    !echo {cmd}\nf('local')") == "local\r\n"
        assert it.text("import os; print(os.getcwd())") == f"{REPO}\n"
        mine = Path(sys.executable).parent
        assert it.text("!command -v torchrun; command -v python") == f"{mine}/torchrun\r\n{mine}/python\r\n"

        assert it.text("!exit 0") == ""
        failed = it.run("!echo one; echo two >&2; exit 7")
        assert failure(failed).startswith("CommandFailed: exit code 7 after 0 s: echo one; echo two >&2; exit 7")
        assert failure(failed).endswith("Its last lines:\n  one\n  two")
        assert "".join(o["text"] for o in failed if o["type"] == "stream") == "one\r\ntwo\r\n"
        missing = failure(it.run("!torchrunn --standalone x.py"))
        assert "exit code 127" in missing and "torchrunn: not found" in missing and str(mine) in missing
        assert "exit code -9 (SIGKILL)" in failure(it.run("!kill -9 $$"))
        assert it.text("with expect_failure() as failed:\n    !exit 3\nprint(failed.exit_code)") == "3\n"
        assert "expected to fail" in failure(it.run("with expect_failure():\n    !true"))

        assert it.text(f"{LAUNCHER}job = start('python -c \"print(6 * 7)\"')\njob.wait()") == "42\n"
        (tmp_path / "steps.py").write_text(STEPS)
        code = f"start('python {tmp_path}/steps.py --steps 70 --run-dir {tmp_path}/run').watch()"
        shown = [o for o in it.run(code) if o["type"] != "stream"]
        assert [o["type"] for o in shown[:2]] == ["display_data", "update_display_data"], shown
        assert {o["type"] for o in shown[1:]} == {"update_display_data"}
        assert len({o["transient"]["display_id"] for o in shown}) == 1 and all("image/png" in o["data"] for o in shown)
        it.assert_nothing_is_left()


FAMILY = 7  # the agent, two workers, and two helpers of each


def begin(it: Kernel, code: str, processes: int = FAMILY) -> str:
    """Run a cell that starts STUBBORN, and return its request once all processes are up."""
    request = it.send(code)
    limit = time.monotonic() + 60
    while len(it.processes()) < processes and time.monotonic() < limit:
        time.sleep(0.05)
    assert len(it.processes()) >= processes  # a shell may be one more
    return request


@pytest.fixture
def stubborn(tmp_path: Path) -> Path:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    return script


def test_the_stop_button_ends_all_that_the_cell_started(tmp_path: Path, stubborn: Path) -> None:
    with kernel(tmp_path, {"COURSE_RUNS": str(tmp_path / "runs")}) as it:
        it.text(SETUP + "\n" + LAUNCHER)
        request = begin(it, f"!{TORCHRUN} {stubborn}")
        it.manager.interrupt_kernel()
        assert failure(it.outputs(request)).startswith("CommandFailed")
        it.assert_nothing_is_left()

        request = begin(it, f"job = start('{TORCHRUN} {stubborn}')\njob.wait()")
        it.manager.interrupt_kernel()
        assert failure(it.outputs(request)).startswith("KeyboardInterrupt")
        it.assert_nothing_is_left()
        assert it.text("print(job.exit_code)") == "-9\n"


@pytest.mark.parametrize("how", ["restart", "shutdown", "kill"])
def test_nothing_outlives_the_kernel(how: str, tmp_path: Path, stubborn: Path) -> None:
    with kernel(tmp_path, {"COURSE_RUNS": str(tmp_path / "runs")}) as it:
        it.text(SETUP + "\n" + LAUNCHER)
        it.text(f"job = start('{TORCHRUN} {stubborn}')")
        begin(it, f"!{TORCHRUN} {stubborn}", 2 * FAMILY)
        if how == "restart":
            it.manager.restart_kernel(now=True)
        elif how == "shutdown":
            it.manager.shutdown_kernel()
        else:
            os.kill(it.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[union-attr,arg-type]
        it.assert_nothing_is_left()


def test_plain_ipython_in_a_terminal(tmp_path: Path) -> None:
    code = f"{SETUP}\nsetup()\nget_ipython().run_cell('!echo before; exit 7')\nget_ipython().run_cell('!echo after')"
    env = {"IPYTHONDIR": str(tmp_path / "ipython")}
    done = launch([sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code], 60, env, tmp_path)
    assert "CommandFailed: exit code 7" in done.output and "after" in done.output.splitlines()


def test_marked_processes_are_found_by_ps_too(stubborn: Path) -> None:
    mark, value = processes.launch_mark()
    with running([sys.executable, stubborn], 60, {processes.MARK: value}) as started:
        started.wait_for("all are up")
        by_proc = {(p.pid, p.parent) for p in processes._from_proc(mark)}
        by_ps = processes._from_ps(mark)
        assert len(by_proc) == 3 and {(p.pid, p.parent) for p in by_ps} == by_proc
        assert {p.environment[processes.MARK] for p in by_ps} == {value}
        assert len(processes.kill_marked(mark, quiet=2)) == 3 and processes.marked(mark) == []


# --- under nbval --------------------------------------------------------------------------------------------------


def said_under_nbval(path: Path, tmp_path: Path, failed: int, passed: int, python: Path = Path(sys.executable)) -> str:
    """What nbval says of a notebook in which so many cells fail and pass."""
    env = {"COURSE_RUNS": str(tmp_path / "runs"), "PATH": "/usr/bin:/bin"}
    done = nbval(path, env=env, cwd=tmp_path, python=python)
    assert f"{failed} failed, {passed} passed" in done.output, done.tail()
    return re.sub(r"\x1b\[[0-9;]*m", "", done.output)


def test_each_kind_of_failure_fails_its_cell_and_says_what_happened(tmp_path: Path) -> None:
    (tmp_path / "seven.py").write_text("print('last words', flush=True)\nraise SystemExit(7)")
    (tmp_path / "broken.py").write_text("print('a parenthesis'\nx = 1")
    (tmp_path / "boom.py").write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('boom')")
    (tmp_path / "hang.py").write_text("import time\nprint('still here', flush=True)\ntime.sleep(300)")
    path = notebook(
        tmp_path / "broken.ipynb",
        SETUP + "\n" + LAUNCHER,
        ("!nonesuch --standalone x.py", IGNORE),
        (f"!python {tmp_path}/seven.py", IGNORE),
        (f"!{TORCHRUN} --max-restarts 1 {tmp_path}/broken.py", IGNORE),
        (f"start('{TORCHRUN} --max-restarts 1 {tmp_path}/boom.py').wait()", IGNORE),
        (f"start('python {tmp_path}/hang.py', limit_s=1).wait()", IGNORE),
        (f"start('python {tmp_path}/hang.py --run-dir {tmp_path}/run').wait_for(step=3, timeout_s=1)", IGNORE),
        "print('and the kernel is fine')",
        outputs=[""] * 7 + ["and the kernel is fine\n"],
    )
    output = said_under_nbval(path, tmp_path, failed=6, passed=2)
    for words in (
        "CommandFailed: exit code 127 after 0 s: nonesuch --standalone x.py",
        "nonesuch: not found",
        "CommandFailed: exit code 7",
        "last words",
        "CommandFailed: exit code 1 after",
        "SyntaxError: '(' was never closed\n  Root Cause (first observed failure):",
        "JobFailed: the job ended with exit code 1: torchrun",
        "ValueError: boom",
        "rank      : 1 (local_rank: 1)",
        "JobFailed: the job did not end within its limit of 1 s, and was killed: python",
        "JobFailed: the job was killed: 1 s passed before step 3 was done: python",
        "still here",
    ):
        assert words in output, f"{words!r} is not in\n{output}"


def test_without_torchrun_the_cell_that_needs_it_fails_and_says_so(tmp_path: Path) -> None:
    """An environment that has everything but the command `torchrun`."""
    copy = tmp_path / "venv"
    (copy / "bin").mkdir(parents=True)
    (copy / "bin" / "python").symlink_to(sys.executable)
    (copy / "pyvenv.cfg").write_bytes((Path(sys.prefix) / "pyvenv.cfg").read_bytes())
    (copy / "lib").symlink_to(Path(sys.prefix) / "lib")
    (tmp_path / "x.py").write_text("print('hello')")
    path = notebook(tmp_path / "x.ipynb", SETUP, (f"!torchrun --standalone {tmp_path}/x.py", IGNORE))
    output = said_under_nbval(path, tmp_path, failed=1, passed=1, python=copy / "bin" / "python")
    assert f"CommandFailed: exit code 127 after 0 s: torchrun --standalone {tmp_path}/x.py" in output
    assert "torchrun: not found" in output and f"This environment's commands are in {copy}/bin." in output


CASES = {  # where nbval runs, and what stands on PATH before the system's own
    "another folder": ("/", "{mine}:"),
    "a foreign torchrun first": ("{own}", "{decoys}:{mine}:"),
    "not the environment": ("{own}", ""),
}


def somewhere_else(case: str, own: Path, decoys: Path) -> tuple[Path, str]:
    """The working directory of a case, and its PATH."""
    cwd, before = (text.format(own=own, decoys=decoys, mine=Path(sys.executable).parent) for text in CASES[case])
    return Path(cwd), f"{before}/usr/bin:/bin"


@pytest.mark.parametrize("case", CASES)
def test_a_notebook_passes_from_any_folder_whatever_is_on_path(case: str, tmp_path: Path, decoys: Path) -> None:
    (tmp_path / "hello.py").write_text("import course_lib, os\nprint(course_lib.__file__, os.getcwd())")
    (tmp_path / "rank.py").write_text("import os, pathlib, sys\npathlib.Path(sys.argv[1], os.environ['RANK']).touch()")
    mine = Path(sys.executable).parent
    path = notebook(
        tmp_path / "any" / "where.ipynb",
        SETUP,
        f"!python {tmp_path}/hello.py",
        "!command -v torchrun",
        "run = fresh('here')\nprint(run)",
        (f"!{TORCHRUN} {tmp_path}/rank.py {{run}}", IGNORE),
        "print('ranks that ran:', sorted(path.name for path in run.iterdir()))",
        outputs=[
            "",
            f"{REPO}/course_lib/__init__.py {REPO}\r\n",
            f"{mine}/torchrun\r\n",
            f"{tmp_path}/runs/here\n",
            "",
            "ranks that ran: ['0', '1']\n",
        ],
    )
    cwd, search = somewhere_else(case, path.parent, decoys)
    done = nbval(path, env={"PATH": search, "COURSE_RUNS": str(tmp_path / "runs")}, cwd=cwd)
    assert "6 passed" in done.output, done.tail()


@pytest.mark.slow
@pytest.mark.timeout(0)  # nbval bounds each cell
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_notebook_of_the_course_does(path: Path, case: str, tmp_path: Path, decoys: Path) -> None:
    cwd, search = somewhere_else(case, path.parent, decoys)
    env = {"PATH": search, "COURSE_RUNS": str(tmp_path / "runs")}
    done = nbval(path, env=env, cwd=cwd, cell_timeout_s=120, timeout_s=900)
    assert re.search(r"\d+ passed in", done.output) and done.returncode == 0, done.tail()


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_by_nbval_and_named(tmp_path: Path, stubborn: Path) -> None:
    path = notebook(tmp_path / "hang.ipynb", SETUP, (f"!{TORCHRUN} {stubborn}", IGNORE))
    done = nbval(path, env={}, cwd=tmp_path, cell_timeout_s=15)
    assert "1 failed, 1 passed" in done.output and "all are up" in done.output, done.tail()
    assert re.search(r"CommandFailed.*: exit code -\d+ \(SIG\w+\) after \d+ s: torchrun", done.output), done.tail()
