"""The file of decoded pictures: made once, by one process, whole; and never used when it is not what it should be."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bad_disks import fill, mounted, tmpfs
from test_data_folders import picture, raw, read, tree
from torch.utils.data import DataLoader

from course_lib.engine.errors import UsageError
from course_lib.workloads import cache, pictures
from course_lib.workloads.cache import BESIDE, OWN, cache_files, note_use
from course_lib.workloads.data import DataSpec, ImageData, load, prepare
from course_lib.workloads.folders import list_folder

FORKS = multiprocessing.get_context("forkserver")
PATIENCE = 90.0  # seconds, far above what anything here takes
CLEAN = {"train", "test", ".image_folder.lock", BESIDE}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each picture that is decoded in this process."""
    found: list[int] = []
    real = pictures._fit

    def counted(*args: Any) -> torch.Tensor:
        found.append(1)
        return real(*args)

    monkeypatch.setattr(pictures, "_fit", counted)
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def right(data: ImageData, root: Path) -> bool:
    """Whether these are the pictures that are in `root` now."""
    images, digest = pictures._decode_all(list_folder(root), pictures.SIZE)
    return torch.equal(torch.cat([raw(data.train), raw(data.test)]), images) and data.identity.endswith(digest[:16])


def test_what_is_decoded_once_is_mapped_from_then_on(tmp_path: Path, decodings: list[int]) -> None:
    root = tree(tmp_path / "tree")
    plain = load(DataSpec("image_folder", root))  # nothing was prepared
    assert names(root) == {"train", "test"} and len(decodings) == 7
    data = read(root)
    assert len(decodings) == 14 and names(root) == CLEAN
    assert data.identity == plain.identity and torch.equal(raw(data.train), raw(plain.train))
    raw(data.train).fill_(7)  # a private mapping: the file and other readers stay as they are
    again = read(root)
    assert len(decodings) == 14 and right(again, root)
    assert [int(label) for label in again.train.pixels.labels] == [0, 0, 0, 1, 1]  # type: ignore[attr-defined]
    images, _ = next(iter(DataLoader(again.train, batch_size=5, num_workers=1, multiprocessing_context="fork")))
    assert torch.equal(images, torch.stack([plain.train[i][0] for i in range(5)]))


def flipped(place: int) -> Callable[[Path, Path], object]:
    def act(path: Path, _: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return act


# What is done to the file; the second path is that of another tree with as many pictures.
DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the pixels": flipped(4000),
    "a bit of the key": flipped(-150),
    "a bit of the data set's digest": flipped(-100),
    "a bit of the seal": flipped(-1),
    "shorter": lambda path, _: os.truncate(path, path.stat().st_size - 1),
    "without its foot": lambda path, _: os.truncate(path, 7 * 3072),
    "empty": lambda path, _: path.write_bytes(b""),
    "zeros, as after a power cut": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "a pipe": lambda path, _: (path.unlink(), os.mkfifo(path)),
    "of other pictures": lambda path, other: shutil.copyfile(other, path),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_is_not_right_is_not_used_and_made_again(kind: str, tmp_path: Path, decodings: list[int]) -> None:
    root, other = tree(tmp_path / "tree"), tree(tmp_path / "other")
    picture(other / "train/cat/0.png", (1, 2, 3))
    read(root), read(other)
    DAMAGE[kind](root / BESIDE, other / BESIDE)
    assert right(load(DataSpec("image_folder", root)), root)
    prepare(DataSpec("image_folder", root))
    del decodings[:]
    data = load(DataSpec("image_folder", root))
    assert not decodings and right(data, root) and names(root) == CLEAN


def rewritten(path: Path) -> None:
    """Another picture of the same size in bytes, with the old one's time of change."""
    before = path.stat()
    picture(path, (1, 2, 3))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


CHANGES: dict[str, Callable[[Path], object]] = {
    "rewritten": lambda root: rewritten(root / "train/cat/0.bmp"),
    "replaced by a copy": lambda root: shutil.copy2(root / "train/cat/0.bmp", root / "train/cat/1.bmp"),
    "added": lambda root: picture(root / "test/dog/9.bmp", (4, 4, 4)),
    "removed": lambda root: (root / "train/cat/2.bmp").unlink(),
    "renamed": lambda root: (root / "train/cat/2.bmp").rename(root / "train/cat/3.bmp"),
    "of another class": lambda root: (root / "train/cat/2.bmp").rename(root / "train/dog/2.bmp"),
    "exchanged": lambda root: (
        (root / "train/cat/2.bmp").rename(root / "x"),
        (root / "test/cat/0.bmp").rename(root / "train/cat/2.bmp"),
        (root / "x").rename(root / "test/cat/0.bmp"),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_pictures_are_decoded_again(kind: str, tmp_path: Path, decodings: list[int]) -> None:
    root = tree(tmp_path / "tree", ".bmp")
    before = read(root).identity
    CHANGES[kind](root)
    assert right(load(DataSpec("image_folder", root)), root)
    del decodings[:]
    data = read(root)
    assert len(decodings) == len(data.train) + len(data.test)  # type: ignore[arg-type]  # they have lengths
    assert right(data, root) and data.identity != before
    assert names(root) == CLEAN  # in the place of the old one


def test_a_name_alone_makes_a_difference(tmp_path: Path) -> None:
    """A file system need not note a renaming in the picture itself."""
    listing = list_folder(tree(tmp_path))
    (first, label), *others = listing.train
    renamed = replace(listing, train=((first._replace(name="train/cat/x.png"), label), *others))
    moved = replace(listing, train=tuple(others), test=((first, label), *listing.test))
    assert len({listing.stamp(), renamed.stamp(), moved.stamp()}) == 3


def test_pictures_that_change_while_they_are_read_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, real = tree(tmp_path / "tree"), pictures._fit

    def fit(*args: Any) -> torch.Tensor:
        picture(root / "train/cat/0.png", (1, 2, 3))
        return real(*args)

    monkeypatch.setattr(pictures, "_fit", fit)
    data = read(root)
    (line,) = capsys.readouterr().err.splitlines()
    assert "changed while they were read" in line and names(root) == CLEAN - {BESIDE}
    monkeypatch.undo()
    assert right(data, root) and read(root).identity == data.identity


def test_another_decoder_decodes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decodings: list[int]) -> None:
    identity = read(tree(tmp_path)).identity
    monkeypatch.setattr("PIL.__version__", "99.0")
    assert read(tmp_path).identity == identity and len(decodings) == 14


# --- several processes, and their deaths ---------------------------------------------------------------------------


def child(root: Path, log: Path, prelude: Callable[..., object], *args: Any) -> None:
    """What a process does: prepare and load, saying into `log` what it would say on stderr."""
    torch.set_num_threads(1)
    with log.open("a", buffering=1) as sys.stderr:
        prelude(*args)
        try:
            print("identity", read(root).identity, file=sys.stderr)
        except UsageError as error:
            print("refused:", error, file=sys.stderr)
            os._exit(2)


def nothing() -> None:
    """A process as it is."""


@contextmanager
def process(root: Path, log: Path, *prelude: Any) -> Iterator[ForkServerProcess]:
    """Such a process; none is left behind. It inherits this one's environment."""
    FORKS.set_forkserver_preload(["torch.utils.data"])
    started = FORKS.Process(target=child_at_home, args=(os.environ["XDG_CACHE_HOME"], root, log, *prelude))
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


def child_at_home(home: str, *args: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = home
    child(*args)


def ended(started: ForkServerProcess) -> int | None:
    started.join(PATIENCE)
    return started.exitcode


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in {log.name}"
        time.sleep(0.02)


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle() -> None:
    real, seen = pictures._fit, []

    def fit(*args: Any) -> torch.Tensor:
        seen.append(1)
        return real(*args) if len(seen) < 5 else die()  # type: ignore[return-value]

    pictures._fit = fit


def die_in(owner: Any, name: str) -> None:
    setattr(owner, name, die)


DEATHS: dict[str, tuple[Any, ...]] = {
    "with the lock": (die_in, cache, "write_durably"),
    "at the first picture": (die_in, pictures, "_fit"),
    "in the middle": (die_in_the_middle,),
    "before all is on the disk": (die_in, os, "fsync"),
    "before it has its name": (die_in, Path, "replace"),
    "before its name is on the disk": (die_in, cache, "sync_directory"),
}


def die_by_name(kind: str) -> None:
    function, *args = DEATHS[kind]
    function(*args)


@pytest.mark.parametrize("kind", DEATHS)
def test_killed_while_it_makes_the_file(kind: str, tmp_path: Path, decodings: list[int]) -> None:
    root = tree(tmp_path / "tree")
    with process(root, tmp_path / "log", die_by_name, kind) as maker:
        assert ended(maker) == -signal.SIGKILL
    assert (BESIDE in names(root)) == (kind == "before its name is on the disk")
    assert right(load(DataSpec("image_folder", root)), root)
    prepare(DataSpec("image_folder", root))
    del decodings[:]
    data = load(DataSpec("image_folder", root))
    assert not decodings and right(data, root) and names(root) == CLEAN


def wait_at_the_first_picture(here: Any, gate: Any) -> None:
    real = pictures._fit

    def fit(*args: Any) -> torch.Tensor:
        here.set()
        gate.wait(PATIENCE)
        return real(*args)

    pictures._fit = fit


@pytest.mark.parametrize("end", ["made", "killed", "damaged picture"])
def test_one_decodes_and_the_other_waits(end: str, tmp_path: Path) -> None:
    root, logs = tree(tmp_path / "tree"), (tmp_path / "first", tmp_path / "second")
    here, gate = FORKS.Event(), FORKS.Event()
    if end == "damaged picture":
        (root / "test/dog/0.png").write_bytes(b"no picture")
    with process(root, logs[0], wait_at_the_first_picture, here, gate) as first:
        assert here.wait(PATIENCE)
        with process(root, logs[1], nothing) as second:
            wait_for(f"waiting for another process to decode the pictures in {root}", logs[1])
            first.kill() if end == "killed" else gate.set()
            codes = ended(first), ended(second)
    said = [log.read_text().splitlines() for log in logs]
    made = f"decoded 7 pictures into {root / BESIDE}"
    if end == "damaged picture":
        refusal = said[0][-1]
        assert codes == (2, 2) and refusal.startswith("refused:") and "replace or remove it" in refusal
        assert said[1][1:] == [refusal]  # without reading a picture, since it says the same about the same one
        assert names(root) == CLEAN - {BESIDE}
        return
    identity = f"identity {load(DataSpec('image_folder', root)).identity}"
    if end == "killed":
        assert codes == (-signal.SIGKILL, 0) and said[1][1:] == [made, identity]
    else:
        assert codes == (0, 0) and said[0] == [made, identity] and said[1][1:] == [identity]
    assert names(root) == CLEAN


# --- where nothing can be written ----------------------------------------------------------------------------------


def test_a_read_only_tree_is_kept_in_the_users_cache(
    tmp_path: Path, home: Path, decodings: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    real, place = tree(tmp_path / "tree"), tmp_path / "place"
    with mounted(place, "--bind", "-o", "ro", real):
        assert right(read(place), real) and names(real) == {"train", "test"}
        (kept,) = (path for path in (home / OWN).iterdir() if path.suffix == ".pixels")
        assert str(kept) in capsys.readouterr().err
        del decodings[:]
        data = read(place)
        assert not decodings and right(data, real)

        shutil.rmtree(home)
        home.write_text("not a folder")
        data = read(place)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and "decoding at every start" in said[0] and "Read-only" in said[0]
        assert right(data, real)

        read(real)  # somebody else may write there
        del decodings[:]
        assert right(read(place), real) and len(decodings) == 7  # for `right` alone


@pytest.mark.parametrize("known", [True, False])
def test_a_full_disk(
    known: bool,
    tmp_path: Path,
    home: Path,
    decodings: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tmpfs(tmp_path / "disk", "1m") as disk:
        root = tree(disk / "tree")
        fill(disk)
        if not known:
            usage = shutil.disk_usage(tmp_path)
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        home.write_text("not a folder")
        prepare(DataSpec("image_folder", root))
        assert (len(decodings) == 0) == known  # none for nothing
        assert right(load(DataSpec("image_folder", root)), root)
        (line,) = capsys.readouterr().err.splitlines()
        assert "No space left on device" in line and str(home) in line
        home.unlink()
        assert right(read(root), root) and names(root) == CLEAN - {BESIDE}
        assert len([path for path in (home / OWN).iterdir() if path.suffix == ".pixels"]) == 1


def test_what_the_user_no_longer_needs_leaves_the_cache(tmp_path: Path, home: Path) -> None:
    beside, kept = cache_files(tmp_path / OWN, "0" * 64)
    names_then = {kept.name, BESIDE, "1.pixels", "1.lock", ".2.pixels.abc.tmp", "young.pixels"}
    for folder in (kept.parent, beside.parent):
        folder.mkdir(parents=True)
        for name in names_then:
            (folder / name).touch()
            os.utime(folder / name, None if name == "young.pixels" else (0, 0))
    note_use(kept)
    assert names(kept.parent) == {kept.name, "young.pixels"}
    note_use(beside)  # a folder of pictures, whatever its name
    assert names(beside.parent) == names_then


@pytest.mark.parametrize("given", [None, "", "relative"])
def test_the_users_cache_is_where_the_specification_has_it(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME") if given is None else monkeypatch.setenv("XDG_CACHE_HOME", given)
    key = "ab" * 32
    assert cache_files(Path("pictures"), key)[1] == Path("/somebody/.cache/train-through-failure", f"{key[:32]}.pixels")
