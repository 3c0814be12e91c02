"""The event log: whole lines whatever happens, nothing on disk too early, and never a reason to stop."""

import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import REPO, Completed
from hypothesis import given
from hypothesis import strategies as st

from course_lib.engine import UsageError
from course_lib.engine.progress import last_words
from course_lib.engine.runlog import RunLog, read_events
from course_lib.engine.watchdog import process_start_time
from course_lib.lab.recorded import read_history

Launch = Callable[..., Completed]

OWN_NAME = f"{socket.gethostname()}-{os.getpid()}.jsonl"


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank from outside, and the newest log of the process as it was."""
    monkeypatch.setattr(RunLog, "current", None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def line(**fields: Any) -> bytes:
    return json.dumps({"t": 1.0, "event": "x", "rank": 0, "world_size": 1, "generation": 1, **fields}).encode()


def write(run_dir: Path, content: bytes, name: str = "host-1.jsonl") -> None:
    (run_dir / "events").mkdir(parents=True, exist_ok=True)
    (run_dir / "events" / name).write_bytes(content)


def test_nothing_is_on_disk_before_open_and_all_of_it_after(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = RunLog(run_dir)
    log("group_ready")
    assert not run_dir.exists()
    log.open()
    log.open()
    log("step", step=0, loss=0.5)
    assert [e["event"] for e in read_events(run_dir).events] == ["process_start", "imported", "group_ready", "step"]
    assert [path.name for path in run_dir.rglob("*.jsonl")] == [OWN_NAME]


@pytest.mark.parametrize("event", ["fault", "error"])
def test_what_may_be_the_last_word_is_written_at_once(tmp_path: Path, event: str) -> None:
    log = RunLog(tmp_path)
    log(event, kind="kill", at="load", step=0)
    assert [e["event"] for e in read_events(tmp_path).events] == ["process_start", "imported", event]


def test_each_event_says_when_who_and_of_which_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    log = RunLog(tmp_path)
    log.open()
    log.generation = 4
    log("step", step=7, loss=float("nan"))
    start, imported, step = read_events(tmp_path).events
    assert [e["generation"] for e in (start, imported, step)] == [None, None, 4]
    assert all((e["rank"], e["world_size"]) == (2, 3) for e in (start, imported, step))
    assert start["t"] <= imported["t"] <= step["t"] <= time.time()
    assert step["loss"] != step["loss"]
    assert log.last_step == 7 and RunLog.current is log


def test_the_start_of_the_process_is_the_kernels() -> None:
    assert (
        abs(process_start_time(os.getpid()) - psutil.Process().create_time()) < 5
    )  # both round to whole ticks, or seconds


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path)
    log.open()
    written: list[bytes] = []

    def record(_: int, data: bytes) -> int:
        written.append(bytes(data))
        return len(data)

    monkeypatch.setattr(os, "write", record)
    for step in range(3):
        log("step", step=step, text="two\nlines" * 50_000)
    assert len(written) == 3
    assert all(data.endswith(b"}\n") and data.count(b"\n") == 1 for data in written)


def test_a_write_that_the_kernel_cuts_short_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    log = RunLog(tmp_path)
    log.open()
    log("step", step=0)
    assert [e["event"] for e in read_events(tmp_path).events] == ["process_start", "imported", "step"]


def test_a_log_without_a_directory_keeps_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    log = RunLog(None)
    log.open()
    log("step", step=3)
    assert log.last_step == 3 and log.path is None and len(log._waiting) <= 2
    assert capfd.readouterr() == ("", "")


def blocked_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("in the way")


def on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / OWN_NAME).symlink_to("/dev/full")


@pytest.mark.parametrize("unwritable", [blocked_by_a_file, on_a_full_disk])
def test_a_log_that_cannot_be_written_costs_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], unwritable: Callable[[Path], None]
) -> None:
    unwritable(tmp_path)
    log = RunLog(tmp_path)
    log.open()
    for step in range(3):
        log("step", step=step)
    log("fault", kind="kill", at="load", step=0)
    log.open()
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("rank 0: no event log any more: [Errno ")
    assert log.last_step == 2 and log.path is None


def test_a_disk_that_fills_up_later_costs_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path)
    log.open()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file or 0)
    os.close(full)
    for step in range(3):
        log("step", step=step)
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert len(read_events(tmp_path).events) == 2


def test_a_process_with_the_name_of_a_dead_one_does_not_go_on_in_its_torn_line(tmp_path: Path) -> None:
    write(tmp_path, line(t=0.5) + b"\n" + line()[:20], OWN_NAME)
    RunLog(tmp_path).open()
    read = read_events(tmp_path)
    assert [e["event"] for e in read.events] == ["x", "process_start", "imported"]
    assert read.bad_lines == 1


def test_every_prefix_of_a_log_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    lines = [line(t=float(i)) for i in range(4)]
    content = b"\n".join(lines) + b"\n"
    ends = [len(b"\n".join(lines[: i + 1])) for i in range(4)]
    for length in range(len(content) + 1):
        write(tmp_path, content[:length])
        read = read_events(tmp_path)
        whole = sum(end <= length for end in ends)
        assert [e["t"] for e in read.events] == list(range(whole))
        assert read.bad_lines == (0 if length in (0, *ends, *(end + 1 for end in ends)) else 1)


BROKEN = [
    line()[:-1],
    line()[5:],
    line()[:30] + line(),
    line() + line(),
    line().replace(b'"rank"', b'"ra\xffk"'),
    b"\0" * 4096,
    b"\0\0" + line(),
    b"null",
    b"[1]",
    b'"text"',
    b"[" * 100_000,
    b'{"t": 1.0}',
    line(t="noon"),
    line(t=float("nan")),
    line(t=10**400),
    line(rank=None),
    line(generation="1"),
    line(event="step"),
    line(event="step", step="7"),
    line(event=[]),
    line(generation=""),
    line(generation=[]),
    *(line(event="step", step=7, seconds=odd) for odd in (None, "1", [], float("inf"), -1.0, 10**400)),
    line(event="step", step=7, loss="low"),
    *(line(**({"event": "snapshot_loaded", "step": 7} | odd)) for odd in ({"step": None}, {"world_size": "2"})),
    line(event="snapshot_loaded", step=7, generation=None),
    *(line(**({"event": "fault", "kind": "kill", "at": "load", "step": 0} | odd)) for odd in ({"kind": {}}, {"at": 1})),
    line(event="fault", kind="kill", at="load"),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda data: repr(data[:40]))
def test_a_broken_line_is_skipped_and_counted_wherever_it_is(tmp_path: Path, broken: bytes) -> None:
    good = [line(t=float(i)) for i in range(3)]
    for place in range(4):
        write(tmp_path, b"\n".join([*good[:place], broken, *good[place:]]) + b"\n")
        read = read_events(tmp_path)
        assert [e["t"] for e in read.events] == [0.0, 1.0, 2.0]
        assert read.bad_lines == 1


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    """A pipe would keep its reader waiting for ever."""
    write(tmp_path, line(t=1.0) + b"\n")
    folder = tmp_path / "events"
    os.mkfifo(folder / "a.jsonl")
    (folder / "b.jsonl").mkdir()
    (folder / "c.jsonl").symlink_to("nowhere")
    assert [e["t"] for e in read_events(tmp_path).events] == [1.0]
    assert last_words(tmp_path, [1]) == {1: None}
    with pytest.raises(UsageError, match="no file that you can read"):
        read_history(tmp_path)


@given(noise=st.binary(max_size=60))
def test_noise_costs_no_good_line(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    run_dir = tmp_path_factory.mktemp("noise")
    write(run_dir, line(t=1.0) + b"\n" + noise + b"\n" + line(t=2.0) + b"\n")
    assert [e["t"] for e in read_events(run_dir).events] == [1.0, 2.0]


def test_the_files_of_all_processes_are_merged_by_time(tmp_path: Path) -> None:
    assert read_events(tmp_path).events == []
    write(tmp_path, b"\n".join([line(t=1.0), line(t=3.0, n=0), line(t=3.0, n=1)]), "a-1.jsonl")
    write(tmp_path, line(t=2.0, event="fault", kind="kill", at="load", step=0) + b"\n\n", "b-1.jsonl")
    write(tmp_path, b"somebody's notes", "notes.txt")
    read = read_events(tmp_path)
    assert [e["t"] for e in read.events] == [1.0, 2.0, 3.0, 3.0]
    assert [e["n"] for e in read.events[2:]] == [0, 1]
    assert [e["t"] for e in read.named("fault")] == [2.0] and read.bad_lines == 0


def kill_writers(directory: str, times: int) -> None:
    """In a process of its own: fork a writer of long lines and SIGKILL it at a random moment, `times` times."""
    for life in range(times):
        run_dir = Path(directory) / str(life)
        pid = os.fork()
        if pid == 0:
            log = RunLog(run_dir)
            log.open()
            for step in range(10**9):
                log("step", step=step, text="x" * 300_000)
        while not list(run_dir.glob("events/*")):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        read = read_events(run_dir)
        steps = [e["step"] for e in read.named("step")]
        assert steps == list(range(len(steps))), steps
        assert all(len(e["text"]) == 300_000 for e in read.named("step"))
        assert read.bad_lines <= 1, read.bad_lines
    print("all whole")


def test_sigkill_at_any_moment_leaves_whole_lines(launch: Launch, tmp_path: Path) -> None:
    code = f"import test_runlog; test_runlog.kill_writers({str(tmp_path)!r}, 10)"
    done = launch([sys.executable, "-c", code], env={"PYTHONPATH": f"{REPO}:{REPO / 'tests'}"})
    assert (done.returncode, done.tail(1)) == (0, "all whole"), done.tail()
