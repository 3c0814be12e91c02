"""The simulated death of the machine, and what the checks of notebook 05 make of a publish and of a fall-back."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from course_lib.engine.snapshots.files import publish as engine_publish
from course_lib.lab import fallback, publishing
from course_lib.lab.crash_disk import Image, Recording, record
from course_lib.lab.exercises import n05


def images(recording: Recording, line: int | None) -> list[Image]:
    """What may be on the disk when the function has done this line for the last time."""
    return [moment for moment in recording.moments if moment.line == line][-1].images()


# --- the simulator ------------------------------------------------------------------------------------------------


def test_an_unsynced_file_may_be_anything_but_a_synced_one_is_whole(tmp_path: Path) -> None:
    def write() -> None:
        with (tmp_path / "a").open("wb") as file:
            file.write(b"12345678")
            file.flush()
            os.fsync(file.fileno())
        number = os.open(tmp_path, os.O_RDONLY)
        os.fsync(number)
        os.close(number)

    seen = record(write, folder=tmp_path)
    assert seen.moments[0].line == 2 and seen.moments[0].images() == [{}, {"a": b""}]  # opened, and empty
    assert images(seen, 3) == [{}, {"a": b""}]  # Python's own buffer has it
    assert images(seen, 4) == [{}, {"a": b""}, {"a": b"1234"}, {"a": bytes(8)}, {"a": b"12345678"}]
    assert images(seen, 5) == [{}, {"a": b"12345678"}]
    assert images(seen, 7) == images(seen, None) == [{"a": b"12345678"}]
    assert seen.syncs == (b"12345678", None)


def test_names_reach_the_disk_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"o")

    def rename() -> None:
        (tmp_path / "old").rename(tmp_path / "new")
        (tmp_path / "new").unlink()

    seen = record(rename, folder=tmp_path)
    either = [{"old": b"o"}, {"new": b"o", "old": b"o"}, {}, {"new": b"o"}]
    assert sorted(map(sorted, images(seen, 2))) == sorted(map(sorted, either))
    assert sorted(map(sorted, images(seen, None))) == sorted(map(sorted, either))


def test_what_was_there_is_safe_until_it_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old!")

    def overwrite() -> None:
        (tmp_path / "a").write_bytes(b"new!")

    held = [image["a"] for image in images(record(overwrite, folder=tmp_path), None)]
    assert held == [b"old!", b"ne", bytes(4), b"new!"]


def test_a_file_without_a_name_keeps_its_number(tmp_path: Path) -> None:
    """A file system gives the number of a removed file to the next one, which must not pass for the old one."""

    def again() -> None:
        for content in (b"first", b"second"):
            (tmp_path / "a").unlink(missing_ok=True)
            with (tmp_path / "a").open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    held = {image.get("a") for image in images(record(again, folder=tmp_path), None)}
    assert held == {None, b"first", b"second"}


def test_sync_is_a_sync_of_everything_and_fdatasync_one_of_the_bytes(tmp_path: Path) -> None:
    def write() -> None:
        with (tmp_path / "a").open("wb") as file:
            file.write(b"12")
            file.flush()
            os.fdatasync(file)
        (tmp_path / "b").write_bytes(b"34")
        os.sync()

    seen = record(write, folder=tmp_path)
    assert images(seen, 5) == [{}, {"a": b"12"}]
    assert images(seen, None) == [{"a": b"12", "b": b"34"}]


def test_an_error_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / "a").write_bytes(b"1")
        raise ValueError("no")

    before, tracer, real = len(list(Path("/dev/fd").iterdir())), sys.gettrace(), os.fsync
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            record(fail, folder=tmp_path)
    assert len(list(Path("/dev/fd").iterdir())) == before and sys.gettrace() is tracer and os.fsync is real


# --- publish ------------------------------------------------------------------------------------------------------


def test_the_engines_publish_keeps_the_promise_that_the_learner_is_asked_for() -> None:
    assert publishing.judge(engine_publish) is None
    assert publishing.verdict(engine_publish).startswith("keeps its promise at all")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("_in_place", "an empty file"),
        ("_no_fsync", "memory only until os.fsync"),
        ("_no_flush", "flush it first"),
        ("_name_first", "had its name before its bytes"),
        ("_no_folder_sync", "until its folder was synced"),
        ("_folder_synced_too_early", "after it got the name"),
        ("_replaces", "the name is taken, and publish writes over it"),
        ("_looks_then_replaces", "another process takes the name meanwhile"),
        ("_leaves_its_temporary", "step-20.new is left over"),
    ],
)
def test_the_check_names_what_is_missing(name: str, hint: str) -> None:
    said = publishing.judge(getattr(n05, name))
    assert said is not None and hint in said and "\n" not in said


def test_other_publishes_that_break_the_promise() -> None:
    def makes_room(path: Path, content: bytes) -> None:
        for old in path.parent.glob("*.pt"):
            old.unlink()
        engine_publish(path, content)

    def says_nothing(path: Path, content: bytes) -> None:
        if not path.exists():
            engine_publish(path, content)

    def another_error(path: Path, content: bytes) -> None:
        if path.exists():
            raise RuntimeError("taken")
        engine_publish(path, content)

    hints = {makes_room: "the older snapshot lost", says_nothing: "FileExistsError", another_error: "RuntimeError"}
    publishes: dict[Callable[[Path, bytes], None], str] = hints
    for publish, hint in publishes.items():
        assert hint in str(publishing.judge(publish)), publish
    assert "does not hold the content" in str(publishing.judge(lambda path, content: path.write_bytes(content[:-1])))
    assert publishing.judge(None) == "give the function itself, without calling it"  # type: ignore[arg-type]


def test_the_rows_follow_the_lines_as_they_are_done() -> None:
    rows = publishing.crash_rows(n05._in_place)
    assert [row.found for row in rows if row.line is None] == [("whole",)]
    assert any("the file is closed" in row.code for row in rows)
    assert all(row.bad for row in rows if "empty" in row.found)


# --- fall back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (fallback._by_text, "100 comes before 40"),
        (fallback._quietly_none, "quietly begins again"),
        (fallback._newest_only, "it raises RuntimeError"),
        (fallback._unchecked, "gives step-100.pt"),
        (fallback._trusts_manifests, "it raises"),
    ],
)
def test_the_check_names_the_case(answer: Callable[[Path], Path | None], hint: str) -> None:
    said = fallback.judge(answer)
    assert said is not None and hint in said and "\n" not in said


def test_other_ways_to_fall_back_wrongly() -> None:
    def tidies(folder: Path) -> Path | None:
        for payload in folder.glob("*.pt"):
            if not payload.with_suffix(".json").exists():
                payload.unlink()
        return fallback.newest_good(folder)

    assert "changed the folder" in str(fallback.judge(tidies))
    assert "return the path" in str(fallback.judge(lambda folder: "step-100.pt" if any(folder.iterdir()) else None))  # type: ignore[arg-type, return-value]
    assert "return None" in str(fallback.judge(lambda folder: folder / "step-0.pt"))
    assert "without calling it" in str(fallback.judge(None))  # type: ignore[arg-type]
