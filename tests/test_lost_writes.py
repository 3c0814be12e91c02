"""What a machine that dies may leave, against lists made by hand."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from course_lib.lab.crash_points import Recorder
from course_lib.lab.lost_writes import BLOCK, FOLDER, Image, moments, restore, snapshot
from course_lib.lab.recorded_calls import recording


def write(path: Path, content: bytes, sync: bool = True) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def left(root: Path, work: Callable[[], object]) -> list[Image]:
    """What may be there when the machine dies after `work`; what is below `root` before is on the disk."""
    start = snapshot(root)
    recorder = Recorder(root)
    with recording(recorder):
        work()
    *_, disk = moments(recorder.operations, start)
    assert disk.now() == snapshot(root)
    images: list[Image] = []
    images.extend(image for image in disk.images() if image not in images)
    return images


def words(images: list[Image]) -> set[str]:
    """Each image as "name=content …"."""
    return {" ".join(f"{name}={(text or b'').decode()}" for name, text in sorted(image.items())) for image in images}


def test_a_file_that_nobody_synced_may_be_gone_empty_cut_zeros_or_there(tmp_path: Path) -> None:
    images = left(tmp_path, lambda: write(tmp_path / "a", b"12", sync=False))
    assert words(images) == {"", "a=", "a=1", "a=\0\0", "a=12"}


def test_synced_bytes_without_a_synced_name_are_whole_or_gone(tmp_path: Path) -> None:
    assert words(left(tmp_path, lambda: write(tmp_path / "a", b"12"))) == {"", "a=12"}


def test_with_both_there_is_one_state(tmp_path: Path) -> None:
    assert words(left(tmp_path, lambda: [write(tmp_path / "a", b"12"), sync(tmp_path)])) == {"a=12"}


def test_later_blocks_may_be_there_without_earlier_ones(tmp_path: Path) -> None:
    content = b"1" * BLOCK + b"2" * BLOCK + b"3" * 10
    held = [image.get("a") for image in left(tmp_path, lambda: write(tmp_path / "a", content, sync=False))]
    zeros = bytes(BLOCK)
    for expected in (
        zeros + content[BLOCK:],
        content[:BLOCK] + zeros + b"3" * 10,
        zeros + zeros + b"3" * 10,
        content[:BLOCK],
        content[: BLOCK + BLOCK // 2],
        content[:-5],
        bytes(len(content)),
    ):
        assert expected in held


def test_what_was_synced_stays_when_more_is_written(tmp_path: Path) -> None:
    def append() -> None:
        with (tmp_path / "a").open("wb") as file:
            for part in (b"12", b"34"):
                file.write(part)
                file.flush()
                if part == b"12":
                    os.fsync(file.fileno())
        sync(tmp_path)

    assert words(left(tmp_path, append)) == {"a=12", "a=123", "a=12\0\0", "a=1234"}


def test_a_file_that_is_written_over_may_be_the_old_one_or_any_part_of_the_new_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    images = left(tmp_path, lambda: write(tmp_path / "a", b"12", sync=False))
    assert words(images) == {"a=old", "a=", "a=1", "a=\0\0", "a=12"}


def test_names_are_lost_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"1")
    (tmp_path / "new").write_bytes(b"2")

    def work() -> None:
        os.link(tmp_path / "new", tmp_path / "name")
        (tmp_path / "old").unlink()

    assert words(left(tmp_path, work)) == {"new=2 old=1", "name=2 new=2 old=1", "new=2", "name=2 new=2"}
    assert words(left(tmp_path, lambda: sync(tmp_path))) == {"name=2 new=2"}


@pytest.mark.parametrize("rename", ["rename", "replace"])
def test_a_rename_may_be_half_done_and_never_takes_the_name_away(tmp_path: Path, rename: str) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "b").write_bytes(b"new")
    images = left(tmp_path, lambda: getattr(os, rename)(tmp_path / "b", tmp_path / "a"))
    assert words(images) == {"a=old b=new", "a=new b=new", "a=old", "a=new"}


def test_a_folder_that_its_parent_does_not_know_takes_all_with_it(tmp_path: Path) -> None:
    inner = tmp_path / "one"

    def work(up_to: Path) -> None:
        inner.mkdir()
        write(inner / "a", b"12")
        sync(inner)
        if up_to == tmp_path:
            sync(tmp_path)

    assert left(tmp_path, lambda: work(inner)) == [{}, {"one": FOLDER, "one/a": b"12"}]
    shutil.rmtree(inner)
    assert left(tmp_path, lambda: work(tmp_path)) == [{"one": FOLDER, "one/a": b"12"}]


def test_an_image_is_rebuilt_as_it_is(tmp_path: Path) -> None:
    images: list[Image] = [
        {},
        {"one": FOLDER, "one/a": b"1"},
        {"one": FOLDER, "one/a": b"2", "b": b""},
        {"b": b"x"},
        {},
    ]
    for before, image in zip([{}, *images], images, strict=False):
        restore(tmp_path, image, before)
        assert snapshot(tmp_path) == image
