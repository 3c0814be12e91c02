"""That no operation on files escapes the record, and a death at each of them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import helpers
import pytest
from helpers import REPO

from course_lib.lab.crash_points import Killed, Operation, Recorder, no_kill, raise_killed
from course_lib.lab.crash_syscalls import CannotTrace, strace
from course_lib.lab.crash_trials import Trial, record
from course_lib.lab.crash_ways import WAYS
from course_lib.lab.recorded_calls import recording


def work_to_kill(root: Path) -> None:
    with (root / "a").open("wb") as file:
        file.write(b"1234")
        file.flush()
        os.fsync(file.fileno())
    os.link(root / "a", root / "b")
    (root / "a").unlink()


def contents(root: Path) -> str:
    """Each file as "name=content"."""
    return " ".join(f"{path.name}={path.read_text()}" for path in sorted(root.iterdir()))


def test_a_death_at_each_place_does_what_came_before_and_no_more(tmp_path: Path) -> None:
    seen = []
    for place in range(1, 8):
        (root := tmp_path / str(place)).mkdir()
        recorder = Recorder(root, place, raise_killed if place < 7 else no_kill)
        try:
            with recording(recorder):
                work_to_kill(root)
        except Killed:
            pass
        seen.append((recorder.died, contents(root)))
    assert seen == [
        ("before open a", ""),
        ("before write a of 4 bytes at 0", "a="),
        ("in the middle of write a of 4 bytes at 0", "a=12"),
        ("before fsync file 1", "a=1234"),
        ("before link a as b", "a=1234"),
        ("before unlink a", "a=1234 b=1234"),
        ("", "b=1234"),
    ]


def test_the_dead_do_nothing_more(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 5, raise_killed)
    with recording(recorder):
        with pytest.raises(Killed):
            work_to_kill(tmp_path)
        with pytest.raises(Killed):
            (tmp_path / "a").unlink()
        recorder.revive()
        (tmp_path / "a").unlink()
    assert recorder.operations[-1] == Operation("unlink", "a") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "unknown",
    [
        lambda path: os.truncate(path, 0),
        lambda path: path.open("ab"),
        lambda path: path.write_text("x"),
        lambda path: path.symlink_to("x"),
    ],
)
def test_what_the_model_does_not_know_is_not_passed_over(tmp_path: Path, unknown: Callable[[Path], object]) -> None:
    (tmp_path / "a").write_bytes(b"1")
    with recording(Recorder(tmp_path)), pytest.raises(AssertionError, match="does not know"):
        unknown(tmp_path / "a")


def test_outside_of_the_folder_all_is_as_ever(tmp_path: Path) -> None:
    (inside := tmp_path / "in").mkdir()
    recorder = Recorder(inside)
    with recording(recorder):
        (tmp_path / "a").write_text("1")
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "b").unlink()
    assert recorder.operations == [] and not list(inside.iterdir())


# --- that the record holds all that the process asks of the kernel ------------------------------------------------

_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_READING = ("stat", "lstat", "fstat", "newfstatat", "statx", "readlink", "access", "faccessat2")
_KINDS = {"link": "link", "linkat": "link", "unlink": "unlink", "unlinkat": "unlink", "write": "write"}
_KINDS |= {"mkdir": "mkdir", "mkdirat": "mkdir", "renameat2": "rename", "fsync": "fsync"}


def calls(log: Path, root: Path) -> Iterator[str]:
    """What strace saw that changes or syncs something below `root`, in the words of an Operation's kind."""
    for line in log.read_text().splitlines():
        match = _CALL.match(line)
        if match is None or match[3].startswith("-") or match[1] in _READING or str(root) not in match[2]:
            continue
        folder = re.match(r"\d+<([^>]*)>", match[2])
        if match[1] == "openat":
            if "O_CREAT" in match[2] or "O_TRUNC" in match[2]:
                yield "open"
        elif match[1] == "fsync" and folder and Path(folder[1]).is_dir():
            yield "sync"
        else:
            yield _KINDS.get(match[1], f"unknown: {match[1]}")


def life(root: str) -> None:
    """In a process of its own: wait to be looked at, then start and save."""
    print("ready", flush=True)
    sys.stdin.readline()
    Trial(WAYS["store"]).live(Path(root), lambda step: None)


def test_strace_sees_nothing_that_is_not_recorded(tmp_path: Path) -> None:
    (recorded := tmp_path / "recorded").mkdir()
    (traced := tmp_path / "traced").mkdir()
    expected = [operation.kind for operation in record(Trial(WAYS["store"]), recorded)[0].operations]
    command = [sys.executable, "-c", f"import test_recorded_calls as t; t.life({str(traced)!r})"]
    environment = helpers.torchrun_env({"PYTHONPATH": f"{REPO}:{REPO / 'tests'}"})
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout and process.stdin and process.stdout.readline() == "ready\n"
        changing = "trace=%file,write,pwrite64,writev,fsync,fdatasync,ftruncate,fallocate,sync_file_range,syncfs,sync"
        with strace(process.pid, tmp_path / "log", ["-y", "-e", changing]):
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(60) == 0
    except CannotTrace as error:
        pytest.skip(str(error))
    finally:
        process.kill()
        process.communicate()
    seen = list(calls(tmp_path / "log", traced))
    assert seen == expected
