"""The helpers that every other test leans on: what they start ends, and what does not end is found."""

import os
import signal
import sys
import uuid
from pathlib import Path

import helpers
import psutil
import pytest
from helpers import REPO

# A parent that starts a child in a session of its own, as torchrun starts its workers, and writes its pid.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
"""


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def child_pid(text: str) -> int:
    return int(text.split("child ", 1)[1].split()[0])


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_a_result_has_the_exit_code_and_both_streams(tmp_path: Path) -> None:
    source = "import os, sys; print(os.getcwd()); sys.stdout.flush(); print('oh', file=sys.stderr); sys.exit(7)"
    done = helpers.launch(python(source), cwd=tmp_path)
    assert done.returncode == 7
    assert done.output.splitlines() == [str(tmp_path), "oh"]
    assert done.tail(1) == "oh"


def test_the_signal_that_ended_it_is_negative() -> None:
    assert helpers.launch(python("import os; os.kill(os.getpid(), 9)")).returncode == -signal.SIGKILL


def test_env_adds_replaces_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_A", "outer")
    monkeypatch.setenv("COURSE_B", "outer")
    source = "import os; print(*(os.environ.get('COURSE_' + x) for x in 'ABC'))"
    assert helpers.launch(python(source), env={"COURSE_A": None, "COURSE_C": "new"}).output == "None outer new\n"


def test_a_child_runs_the_checkout_that_is_tested(tmp_path: Path) -> None:
    done = helpers.launch(python("import course_lib; print(course_lib.__file__)"), cwd=tmp_path)
    assert Path(done.output.strip()) == REPO / "course_lib" / "__init__.py"


def test_a_runaway_tree_is_killed_on_timeout_and_its_last_lines_shown() -> None:
    source = "print(*map('line {}'.format, range(60)), sep='\\n')" + PARENT + "time.sleep(600)"
    with pytest.raises(pytest.fail.Exception, match="did not end in time") as failure:
        helpers.launch(python(source), timeout=2)
    text = str(failure.value)
    assert "line 59" in text and "line 11\n" in text and "line 10\n" not in text
    assert "time.sleep(600)" in text.split("living then:")[1]
    assert not alive(child_pid(text.split("last 50 lines:")[1]))


def test_a_child_left_behind_is_a_failure_and_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "GRACE", 0.3)
    with pytest.raises(pytest.fail.Exception, match="ended with exit code 0 and left behind") as failure:
        helpers.launch(python(PARENT))
    assert not alive(child_pid(str(failure.value).split("last 50 lines:")[1]))


def test_a_child_that_leaves_within_the_grace_is_none() -> None:
    assert helpers.launch(python(PARENT.replace("600", "0.5"))).returncode == 0


def test_a_child_that_cleared_its_environment_is_found_by_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "GRACE", 0.3)
    source = PARENT.replace("start_new_session=True", "env={}")
    with pytest.raises(pytest.fail.Exception, match="left behind") as failure:
        helpers.launch(python(source))
    assert not alive(child_pid(str(failure.value).split("last 50 lines:")[1]))


def test_a_running_process_can_be_watched_and_signalled() -> None:
    with helpers.running(python(PARENT + "time.sleep(600)")) as process:
        process.wait_for("child ")
        child = child_pid(process.output())
        assert {p.pid for p in process.processes()} == {process.pid, child}
        os.kill(child, signal.SIGKILL)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait().returncode == -signal.SIGTERM


def test_waiting_for_a_line_that_never_comes_fails() -> None:
    with (
        pytest.raises(pytest.fail.Exception, match="exit code 3 and did not write 'ready'"),
        helpers.running(python("import sys; sys.exit(3)")) as process,
    ):
        process.wait_for("ready")


def test_leaving_the_block_by_an_error_leaves_nothing() -> None:
    with pytest.raises(KeyError), helpers.running(python(PARENT + "time.sleep(600)")) as process:
        process.wait_for("child ")
        raise KeyError
    assert process.processes() == []


def test_a_pytest_inside_a_test_is_found_by_the_outer_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = uuid.uuid4().hex
    monkeypatch.setenv(helpers.MARK, outer)
    with helpers.running(python("import time; print('up', flush=True); time.sleep(600)")) as process:
        process.wait_for("up")
        assert [p.pid for p in helpers.leftovers(outer)] == [process.pid]


def test_torchrun_is_plain_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PET_NNODES", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "9")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\ne = os.environ\n"
        "line = [e['RANK'], e['WORLD_SIZE'], e['OMP_NUM_THREADS'], e.get('PET_NNODES'),"
        " e.get('TORCH_DISABLE_SHARE_RDZV_TCP_STORE'), *sys.argv[1:]]\n"
        "open(f'{e[\"RANK\"]}.txt', 'w').write(' '.join(map(str, line)))\n"
    )
    done = helpers.torchrun("--epochs", 1, script=script, nproc=2, run_dir=tmp_path / "run", cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.tail()
    for rank in "01":
        assert (tmp_path / f"{rank}.txt").read_text() == f"{rank} 2 1 None None --epochs 1 --run-dir {tmp_path}/run"


def test_torchrun_gives_no_restart_unless_asked(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nopen('tries', 'a').write('x')\nos._exit(5)\n")
    done = helpers.torchrun(script=script, nproc=1, cwd=tmp_path, timeout=60)
    assert (done.returncode, (tmp_path / "tries").read_text()) == (1, "x"), done.tail()


def test_torchrun_has_no_fixed_port_by_default() -> None:
    with pytest.raises(ValueError, match="rendezvous"):
        helpers.torchrun_cmd(script="scripts/x.py", standalone=False)
    assert "--standalone" in helpers.torchrun_cmd(script="scripts/x.py")
    assert 0 < helpers.free_port() < 65536
