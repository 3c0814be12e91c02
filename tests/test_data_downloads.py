"""Fashion-MNIST and CIFAR-10 from small sets in torchvision's format, without a network."""

import gzip
import hashlib
import io
import pickle
import re
import socket
import struct
import tarfile
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import helpers
import numpy as np
import pytest
import torch
import torchvision  # type: ignore[import-untyped]  # it ships no types

from course_lib.engine.entry import LEAVING
from course_lib.engine.errors import UsageError
from course_lib.workloads import fetch
from course_lib.workloads.data import DataSpec, load, prepare
from course_lib.workloads.images import ImageSet

NAMES = ("fashion_mnist", "cifar10")
RANDOM = np.random.RandomState(0)
COUNTS = {"train": 9, "t10k": 4}


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    head = struct.pack(f">3sB{array.ndim}I", b"\0\0\x08", array.ndim, *array.shape)
    return head + array.tobytes()


def fashion_files() -> dict[str, bytes]:
    files = {}
    for part, count in COUNTS.items():
        files[f"{part}-images-idx3-ubyte"] = idx(RANDOM.randint(0, 256, (count, 28, 28)).astype(np.uint8))
        files[f"{part}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


def cifar_files() -> dict[str, bytes]:
    files = {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = RANDOM.randint(0, 256, (2, 3072)).astype(np.uint8)
        files[name] = pickle.dumps({"data": pixels, "labels": [3, 7]})
    files["batches.meta"] = pickle.dumps({"label_names": [f"class {i}" for i in range(10)]})
    return files


FASHION, CIFAR = fashion_files(), cifar_files()


def cifar_archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in CIFAR.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


FASHION_ARCHIVES = {f"FashionMNIST/raw/{name}.gz": gzip.compress(data) for name, data in FASHION.items()}
CIFAR_ARCHIVES = {"cifar-10-python.tar.gz": cifar_archive()}
ARCHIVES = {"fashion_mnist": FASHION_ARCHIVES, "cifar10": CIFAR_ARCHIVES}
FILES = {
    "fashion_mnist": {f"FashionMNIST/raw/{name}": data for name, data in FASHION.items()},
    "cifar10": {f"cifar-10-batches-py/{name}": data for name, data in CIFAR.items()},
}


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.fixture(autouse=True)
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torchvision expect the checksums of our small files."""
    fashion, cifar = torchvision.datasets.FashionMNIST, torchvision.datasets.CIFAR10
    resources = [(Path(path).name, md5(data)) for path, data in FASHION_ARCHIVES.items()]
    monkeypatch.setattr(fashion, "resources", resources)
    batches = [[name, md5(data)] for name, data in CIFAR.items()]
    monkeypatch.setattr(cifar, "train_list", batches[:5])
    monkeypatch.setattr(cifar, "test_list", batches[5:6])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": batches[6][1]})
    monkeypatch.setattr(cifar, "tgz_md5", md5(CIFAR_ARCHIVES["cifar-10-python.tar.gz"]))


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There is no network; what was asked of it is recorded."""
    asked: list[str] = []

    def refuse(request: urllib.request.Request, *_: object, **__: object) -> None:
        asked.append(request.full_url)
        raise URLError("no network\nat all")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return asked


def put(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def names_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_there_need_no_network(name: str, tmp_path: Path, requests: list[str]) -> None:
    put(tmp_path, FILES[name])
    prepare(DataSpec(name, tmp_path))
    data = load(DataSpec(name, tmp_path, dtype=torch.float64))
    assert requests == [] and names_below(tmp_path) == set(FILES[name])  # not even a lock file
    assert data.shape == ((1 if name == "fashion_mnist" else 3), 32, 32) and len(data.classes) == 10
    assert data.train[0][0].dtype == torch.float64 and data.train[0][0].shape == data.shape


def test_fashion_mnist_pixels(tmp_path: Path) -> None:
    data = load(DataSpec("fashion_mnist", put(tmp_path, FILES["fashion_mnist"]), augment=True))
    assert isinstance(data.train, ImageSet) and isinstance(data.test, ImageSet)
    assert data.train.augment is not None and not data.train.augment.flip and data.test.augment is None
    images = data.train.pixels.images
    assert images.shape == (9, 1, 32, 32) and len(data.test) == 4
    assert images[:, :, 2:30, 2:30].numpy().tobytes() == FASHION["train-images-idx3-ubyte"][16:]
    assert int(images.sum()) == int(images[:, :, 2:30, 2:30].sum())  # the margin is black
    assert [data.test[i][1] for i in range(4)] == [0, 1, 2, 3] and data.classes[9] == "Ankle boot"


def test_cifar10_pixels(tmp_path: Path) -> None:
    data = load(DataSpec("cifar10", put(tmp_path, FILES["cifar10"]), augment=True))
    assert isinstance(data.train, ImageSet) and isinstance(data.test, ImageSet)
    assert data.train.augment is not None and data.train.augment.flip and data.test.augment is None
    stored = [pickle.loads(CIFAR[f"data_batch_{i}"])["data"] for i in range(1, 6)]
    assert data.train.pixels.images.numpy().tobytes() == np.vstack(stored).tobytes()
    assert [data.train[i][1] for i in range(10)] == [3, 7] * 5
    assert data.classes == tuple(f"class {i}" for i in range(10))


@pytest.mark.parametrize("name", NAMES)
def test_neither_files_nor_network(name: str, tmp_path: Path, requests: list[str]) -> None:
    root = tmp_path / "new"
    with pytest.raises(UsageError) as caught:
        prepare(DataSpec(name, root))
    message = str(caught.value)
    assert requests and "no network at all" in message and "\n" not in message
    assert f"--data {name}" in message and "--data digits" in message
    for archive in ARCHIVES[name]:
        assert Path(archive).name in message and str((root / archive).parent) in message
    assert names_below(root) == {f".{name}.lock"}
    with pytest.raises(UsageError, match="--data digits"):
        load(DataSpec(name, root))


def test_no_network_ends_all_ranks_with_one_line(tmp_path: Path) -> None:
    dead = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    (codes := tmp_path / "codes").mkdir()
    given = ("--data", "cifar10", "--data-root", tmp_path / "data")
    done = helpers.torchrun(
        *given,
        script="scripts/ddp_torchrun.py",
        max_restarts=3,
        run_dir=tmp_path / "run",
        env=dead | {LEAVING: str(codes)},
    )
    (line,) = re.findall(r"^error: .*", done.output, re.MULTILINE)
    assert "--data cifar10" in line and "put cifar-10-python.tar.gz into" in line and "--data digits" in line
    assert done.returncode == 1  # torchrun's own, whatever its workers returned
    assert {path.name for path in codes.iterdir()} == {"0-0", "0-1"}  # no restart
    assert (codes / "0-0").read_text() == "2"  # the agent that it ended may have ended the other first
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_archives_put_there_by_hand_are_enough(name: str, tmp_path: Path, requests: list[str]) -> None:
    put(tmp_path, ARCHIVES[name])
    prepare(DataSpec(name, tmp_path))
    assert requests == []
    assert len(load(DataSpec(name, tmp_path)).train) == (9 if name == "fashion_mnist" else 10)  # type: ignore[arg-type]
    assert names_below(tmp_path) == {*FILES[name], *ARCHIVES[name], f".{name}.lock"}


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_archive_is_not_used_and_not_touched(name: str, tmp_path: Path, requests: list[str]) -> None:
    bad = {path: data[:-9] for path, data in ARCHIVES[name].items()}
    put(tmp_path, bad)
    with pytest.raises(UsageError, match="no network"):
        prepare(DataSpec(name, tmp_path))
    assert requests
    assert all((tmp_path / path).read_bytes() == data for path, data in bad.items())


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "other": lambda path: path.write_bytes(b"<html>log in to this network first</html>"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_set_is_not_taken_for_whole(name: str, kind: str, tmp_path: Path, requests: list[str]) -> None:
    put(tmp_path, FILES[name])
    DAMAGE[kind](tmp_path / list(FILES[name])[-2])  # of the test split
    with pytest.raises(UsageError, match="missing or damaged"):
        load(DataSpec(name, tmp_path))
    with pytest.raises(UsageError, match="no network"):
        prepare(DataSpec(name, tmp_path))
    assert requests
    put(tmp_path, ARCHIVES[name])
    prepare(DataSpec(name, tmp_path))  # what is fetched replaces what was damaged
    assert {path: (tmp_path / path).read_bytes() for path in FILES[name]} == FILES[name]


@pytest.mark.parametrize("name", NAMES)
def test_identity_follows_the_contents(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = load(DataSpec(name, put(tmp_path / "a", FILES[name]))).identity
    assert load(DataSpec(name, put(tmp_path / "b", FILES[name]))).identity == identity
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda _: True)
    path = tmp_path / "b" / next(iter(FILES[name]))
    data = bytearray(path.read_bytes())
    at = data.index(pickle.loads(bytes(data))["data"].tobytes()) if name == "cifar10" else len(data) - 1
    data[at] ^= 1
    path.write_bytes(data)
    assert load(DataSpec(name, tmp_path / "b")).identity != identity


@pytest.mark.parametrize("name", NAMES)
def test_a_root_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("")
    with pytest.raises(UsageError, match="FileExistsError") as caught:
        prepare(DataSpec(name, root))
    assert str(root) in str(caught.value) and "\n" not in str(caught.value)


def test_a_source_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real urlopen
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "SILENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", [url])
        with pytest.raises(UsageError, match="timed out"):
            prepare(DataSpec("fashion_mnist", tmp_path))
    assert socket.getdefaulttimeout() is None
