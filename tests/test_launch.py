"""Jobs that a notebook starts: watched, broken, bounded in time, and gone afterwards."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import REPO
from kernels import STEPS

from course_lib.engine import UsageError
from course_lib.lab import claims
from course_lib.lab.follow import EventFollower, Follower
from course_lib.lab.job import Job, JobFailed
from course_lib.lab.launch import fresh_directory, start
from course_lib.lab.live import live_figure
from course_lib.lab.processes import Process, describe_exit, marked
from course_lib.lab.tree import draw_tree, local_size, ranks_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the script above and one that hangs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "hang.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(300)")


def gone(job: Job) -> bool:
    return not job.running and marked(job._mark) == []


# --- what start() takes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "no shell"),
        ("python steps.py | head", "no shell"),
        ("python steps.py && ls", "no shell"),
        ("python steps.py ; ls", "no shell"),
        ("python steps.py > log", "no shell"),
        ("python 'steps.py", "cannot be read"),
        ("torchrun --standalone scripts/nonesuch.py", "there is no scripts/nonesuch.py in "),
        ("nonesuch --option", "there is no command 'nonesuch'"),
    ],
)
def test_a_command_that_cannot_run_is_refused(command: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        start(command)
    assert not (tmp_path / "runs").exists()


def test_python_is_this_one_and_the_environment_is_the_courses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PET_NNODES", "3")
    monkeypatch.setenv("GONE", "1")
    names = ["OMP_NUM_THREADS", "PET_NNODES", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "GONE", "NEW"]
    (tmp_path / "say.py").write_text(
        f"import os, sys\nprint(sys.executable, sys.argv[1], [os.environ.get(n) for n in {names}])"
    )
    with start("python say.py 'two words'", environment={"GONE": None, "NEW": "x"}) as job:
        job.wait(show=False)
    assert job.output() == f"{sys.executable} two words {['1', None, '1', None, 'x']}"
    assert job.logs == Path("runs/logs/1") and (job.logs / "agent.log").read_text().startswith(sys.executable)


def test_logs_of_a_run_lie_in_its_directory(tmp_path: Path) -> None:
    for number in (1, 2):
        with start(
            "python steps.py --steps 1 --run-dir=run" if number == 1 else "python steps.py --run-dir run"
        ) as job:
            assert job.run_dir == Path("run") and job.logs == Path(f"run/logs/{number}")


# --- waiting ------------------------------------------------------------------------------------------------------


def test_output_is_shown_while_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    job = start("python steps.py --steps 3 --run-dir run")
    job.wait()
    assert capsys.readouterr().out == "step 0\nstep 1\nstep 2\nthe end\n"
    assert job.output() == "step 0\nstep 1\nstep 2\nthe end" and job.output(lines=1) == "the end"
    assert job.exit_code == 0 and "ended with exit code 0" in repr(job) and gone(job)
    assert [e["step"] for e in job.events if e["event"] == "step"] == [0, 1, 2]


def test_wait_for_a_step_of_this_job_only() -> None:
    start("python steps.py --steps 30 --run-dir run").wait(show=False)
    with start("python steps.py --steps 300 --generation 2 --run-dir run") as job:
        assert "(running)" in repr(job)
        job.wait_for(step=5)
        done = [e["step"] for e in job.events if e["event"] == "step"]
        assert 5 <= max(done) < 100, "the earlier job's steps don't count, and it does not wait for the end"
        with pytest.raises(
            JobFailed, match=r"was killed: 0.2 s passed before step 9 was done \(the last step .* is \d"
        ):
            job.wait_for(step=9, restarts=1, timeout_s=0.2)
        assert gone(job)


def test_a_job_that_ends_before_the_step() -> None:
    job = start("python steps.py --steps 2 --run-dir run --exit 7")
    with pytest.raises(JobFailed) as caught:
        job.wait_for(step=5)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("the job ended with exit code 7 before step 5 was done (the last step that it did is 1): ")
    assert lines == ["  step 0", "  step 1", "  the end"]
    with pytest.raises(JobFailed, match="ended with exit code 7"):
        job.wait()
    job.wait(check=False)


def test_a_job_without_events_has_no_steps() -> None:
    with start("python hang.py") as job, pytest.raises(UsageError, match="--run-dir"):
        job.wait_for(step=1)
    with start("python hang.py") as job, pytest.raises(UsageError, match="--run-dir"):
        job.watch()


def test_the_time_limit_holds_although_nobody_waits() -> None:
    job = start("python hang.py", limit_s=0.5)
    deadline = time.monotonic() + 20
    while job.running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(job)
    with pytest.raises(JobFailed, match="did not end within its limit of 0.5 s, and was killed"):
        job.wait(check=False)


def test_signals_reach_the_job(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import signal, sys, time\n"
        "def told(number, frame):\n    print('told', number, flush=True)\n    sys.exit(3)\n"
        "signal.signal(signal.SIGINT, told)\nsignal.signal(signal.SIGTERM, told)\n"
        "print('up', flush=True)\ntime.sleep(300)"
    )
    for tell, number in ((Job.interrupt, 2), (Job.terminate, 15)):
        with start("python told.py") as job:
            while "up" not in job.output() and job.running:
                time.sleep(0.02)
            tell(job)
            job.wait(check=False, show=False)
            assert job.output().endswith(f"told {number}") and job.exit_code == 3
    job.interrupt()  # one that has ended has nobody to tell
    job.terminate()
    job.kill()


def test_leaving_the_block_kills_and_exit_codes_are_told() -> None:
    with start("python hang.py") as job:
        assert job.running
    assert gone(job) and job.exit_code == -9 and "exit code -9 (SIGKILL)" in repr(job)
    with pytest.raises(JobFailed, match="has ended .* so there is no process to find"):
        job.pid(rank=0)
    assert describe_exit(143) == "exit code 143 (SIGTERM)" and describe_exit(1) == "exit code 1"


def test_watch_outside_of_a_notebook_waits() -> None:
    job = start("python steps.py --steps 20 --run-dir run")
    job.watch(step=3)
    assert job.running
    job.watch()
    assert job.exit_code == 0
    with pytest.raises(JobFailed, match="exit code 4"):
        start("python steps.py --steps 1 --run-dir other --exit 4").watch()


# --- directories --------------------------------------------------------------------------------------------------


def test_a_fresh_directory_is_refused_while_a_job_of_ours_uses_it() -> None:
    run = fresh_directory(Path("run"))
    with start("python hang.py --run-dir ./run"), pytest.raises(UsageError, match=r"job\.kill\(\)"):
        fresh_directory(run)
    assert list(fresh_directory(run).iterdir()) == []


def test_only_runs_are_emptied(tmp_path: Path) -> None:
    for names, is_run in ((["logs"], True), (["logs", "faults"], True), (["logs", "mine.txt"], False), (["x"], False)):
        for name in names:
            (tmp_path / "d" / name).mkdir(parents=True, exist_ok=True)
        if is_run:
            assert list(fresh_directory(tmp_path / "d").iterdir()) == []
        else:
            with pytest.raises(UsageError, match="something else than a run"):
                fresh_directory(tmp_path / "d")
            assert all((tmp_path / "d" / name).exists() for name in names)


# --- following files ----------------------------------------------------------------------------------------------


def test_lines_are_given_once_and_whole(tmp_path: Path) -> None:
    follower = Follower(lambda: tmp_path.glob("*.log"))
    a, b = tmp_path / "a.log", tmp_path / "b.log"
    assert follower.new_lines() == []
    a.write_bytes(b"one\ntw")
    assert follower.new_lines() == [(a, "one")]
    with a.open("ab") as file:
        file.write(b"o\r\n\nthree\xff")
    b.write_bytes(b"x\n")
    assert follower.new_lines() == [(a, "two"), (a, ""), (b, "x")]
    assert follower.new_lines() == []
    assert follower.new_lines(rest=True) == [(a, "three\ufffd")]
    assert follower.new_lines(rest=True) == []


def test_events_of_a_later_job_and_the_ranks_that_wrote_them(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    (folder / "h-1.jsonl").write_text('{"event": "step", "step": 90, "rank": 0, "generation": 1}\n')
    follower = EventFollower(tmp_path)
    assert follower.update() == [] and follower.last_step is None and not follower.reached(0)
    lines = [
        {"event": "snapshot_loaded", "rank": 0, "generation": 2},
        {"event": "step", "step": 3, "rank": 1, "generation": 2},
        {"event": "snapshot_loaded", "rank": 1, "generation": 3},
    ]
    (folder / "h-2-77.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\nnot json\n[1]\n{}\n")
    follower.update()
    assert follower.last_step == 3 and follower.rank_of_pid == {77: 1}
    assert follower.reached(3) and not follower.reached(4) and not follower.reached(3, restarts=1)


def test_the_live_figure_draws_any_state_of_a_run() -> None:
    def step(number: int, generation: int) -> dict[str, Any]:
        common = {"rank": 0, "world_size": 1, "generation": generation}
        return {"event": "step", "t": number, "step": number, "epoch": 0, "loss": 1.0, "samples": [0, 1], **common}

    load = {"event": "snapshot_loaded", "t": 9, "rank": 0, "world_size": 1, "generation": 2, "step": 2}
    for events, running, title in (
        ([], True, "running: 0 steps done"),
        ([], False, "ended after 0 steps"),
        ([step(0, 1)], True, "running: 1 steps done"),
        ([*(step(n, 1) for n in range(5)), load, step(2, 2)], True, "running: 3 steps done; start 2: resumed from"),
    ):
        figure = live_figure(events, running)
        figure.canvas.draw()
        assert title in figure.axes[0].get_title(loc="left")


# --- torchrun -----------------------------------------------------------------------------------------------------


def test_two_ranks_lines_stay_whole_and_their_children_are_no_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talk.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "rank = os.environ['RANK']\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'])\n"
        "for n in range(500):\n    print('line', n, 'of rank', rank, 'x' * 50)\n"
        "pathlib.Path(f'up-{rank}').touch()\n"
        "while not pathlib.Path('go').exists():\n    time.sleep(0.02)\n"
        "child.kill()\n"
        "print('the last word of', rank, end='')\n"
    )
    with start("torchrun --standalone --nproc-per-node 2 talk.py") as job:
        tree = job.tree()
        workers = job.workers()
        assert list(workers) == [0, 1]
        for rank, pid in workers.items():
            assert job.pid(rank) == pid
            assert psutil.Process(pid).environ()["RANK"] == str(rank) and psutil.Process(pid).ppid() == job._popen.pid
        with pytest.raises(JobFailed, match="the job has no rank 2; its ranks are 0, 1: torchrun"):
            job.pid(rank=2)
        lines = tree.splitlines()
        assert re.fullmatch(r"agent  pid \d+  torch\.distributed\.run", lines[0])
        ranked = [line for line in lines if "rank" in line]
        assert [line[:10] for line in ranked] == ["├── rank 0", "└── rank 1"] and ranked[0].endswith("talk.py")
        while not all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)) and job.running:
            time.sleep(0.02)
        assert len(job.processes()) == 5
        (tmp_path / "go").touch()
        job.wait()
    shown = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        expected = [f"line {n} of rank {rank} {'x' * 50}" for n in range(500)] + [f"the last word of {rank}"]
        assert [line for line in shown if line in set(expected)] == expected
        assert job.output(rank=rank).splitlines() == expected
    assert len(shown) == 1002
    assert gone(job)


def test_a_rank_is_killed_and_the_job_is_interrupted_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    run = tmp_path / "run"
    options = f"--device cpu --epochs 2 --snapshot-every 5 --run-dir {run}"
    command = f"torchrun --standalone --nproc-per-node 2 --max-restarts 3 scripts/ddp_torchrun.py {options}"
    with start(command) as job:
        job.wait_for(step=7)
        victim = job.pid(rank=1)
        os.kill(victim, signal.SIGKILL)
        job.wait_for(step=12, restarts=1)
        assert job.pid(rank=1) != victim
        job.interrupt()
        job.wait(check=False)
    assert gone(job) and job.exit_code == 1 and "stopped as asked" in job.output(rank=0)
    assert "-9" in job.output(), "the agent's words are in the whole output"
    with start(command) as again:
        again.watch()
    assert "resumed from" in again.output(rank=0) and again.output(rank=1) == ""
    assert claims.restarts(run) == 2 and claims.every_sample_once(run) and claims.world_sizes(run) == [2, 2, 2]
    assert 1 <= claims.replayed(run) <= 10 and claims.accuracy(run) > 0.5


def test_who_is_who_without_an_agent() -> None:
    def process(pid: int, parent: int, *command: str, **environment: str) -> Process:
        return Process(pid, parent, command, environment)

    main = process(10, 1, "python", "-u", "scripts/ddp_spawn.py")
    spawned = [process(11, 10, "python", "-c", "spawn"), process(12, 10, "python", "-c", "tracker")]
    assert ranks_of([main, *spawned], {11: 0, 99: 1}) == {11: 0} and local_size([main, *spawned]) == 1
    assert draw_tree([main, *spawned], {11: 0}).splitlines() == [
        "main  pid 10  scripts/ddp_spawn.py",
        "├── rank 0  pid 11  python",
        "└── helper  pid 12  python",
    ]
    worker = ("python", "-c", "spawn", "--multiprocessing-fork")
    family = [main, process(13, 10, *worker), process(14, 10, *worker), process(15, 14, *worker)]
    assert local_size(family) == 2, "a loader below a spawned worker is none"
    agent = process(20, 1, "python", "-m", "torch.distributed.run", "x.py")
    orphan = process(22, 1, "python", "x.py", RANK="1", LOCAL_WORLD_SIZE="3")
    loader = process(23, 22, "python", "x.py", RANK="1", LOCAL_WORLD_SIZE="3")
    assert local_size([agent]) == 0 and local_size([]) == 0 and draw_tree([], {}) == ""
    assert local_size([agent, orphan, loader]) == 3 and ranks_of([agent, orphan, loader], {}) == {22: 1}
    assert draw_tree([orphan, loader], {22: 1}) == "rank 1  pid 22  x.py\n└── helper  pid 23  x.py"
