"""The digits, the samples that a data set gives, and what importing costs."""

import gzip
import json
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import Completed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from course_lib.engine.errors import UsageError
from course_lib.workloads import digits
from course_lib.workloads.data import NAMES, DataSpec, ImageData, load, prepare
from course_lib.workloads.images import Augment, ImageSet, Pixels, channel_statistics, fingerprint, vary

Launch = Callable[..., Completed]
DIGITS = DataSpec("digits", None)


def stacked(data: Dataset[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    pairs = [data[i] for i in range(len(data))]  # type: ignore[arg-type]  # Dataset has no __len__
    return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])


@pytest.fixture(scope="module")
def plain() -> ImageData:
    return load(DIGITS)


def output(launch: Launch, code: str) -> list[str]:
    """The lines that a fresh interpreter prints."""
    done = launch([sys.executable, "-c", code])
    assert done.returncode == 0, done.output
    return done.output.splitlines()


def test_digits_are_the_real_ones_split_once(plain: ImageData) -> None:
    train, test = plain.train, plain.test
    assert isinstance(train, ImageSet) and isinstance(test, ImageSet)
    assert (len(train), len(test)) == (1500, 297)
    assert plain.shape == (1, 32, 32) and plain.classes == tuple("0123456789")
    # The same enlargement, written as a matrix: pixel i of 32 lies at (i + 0.5) / 4 - 0.5 of 8.
    place = np.clip((np.arange(32) + 0.5) / 4 - 0.5, 0, 7)
    weights = np.maximum(0, 1 - np.abs(place[:, None] - np.arange(8)))
    table = np.loadtxt(digits.digits_file(), delimiter=",")
    large = weights @ table[:, :-1].reshape(-1, 8, 8) @ weights.T
    expected = [
        (np.rint(x * 255 / 16).astype(np.uint8).tobytes(), int(y)) for x, y in zip(large, table[:, -1], strict=True)
    ]
    got = [
        (image.numpy().tobytes(), int(label))
        for part in (train.pixels, test.pixels)
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert sorted(got) == sorted(expected)  # every digit once, with its own label: the splits do not overlap
    assert set(test.pixels.labels.tolist()) == set(range(10))


def test_training_images_are_normalised(plain: ImageData) -> None:
    images, _ = stacked(plain.train)
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 1e-5 and abs(float(images.std()) - 1) < 1e-3


def test_float64_has_the_same_values(plain: ImageData) -> None:
    image, label = load(DataSpec("digits", None, dtype=torch.float64)).train[7]
    assert image.dtype == torch.float64 and label == plain.train[7][1]
    torch.testing.assert_close(image.float(), plain.train[7][0], rtol=1e-5, atol=1e-6)


def test_split_and_identity_are_independent_of_seed_and_process(plain: ImageData, launch: Launch) -> None:
    torch.manual_seed(99)
    np.random.seed(99)
    again = load(DIGITS)
    assert again.identity == plain.identity and torch.equal(again.test[0][0], plain.test[0][0])
    code = (
        "import json, sys; from course_lib.workloads.data import *; before = list(sys.modules);"
        "d = load(DataSpec('digits', None)); prepare(DataSpec('digits', None));"
        "print(json.dumps([before, list(sys.modules), d.identity]))"
    )
    before, after, identity = json.loads(output(launch, code)[-1])
    assert identity == plain.identity
    for module in ("torchvision", "sklearn", "PIL"):
        assert module not in before and module not in after


def test_works_without_torchvision(launch: Launch) -> None:
    code = (
        "import sys; sys.modules['torchvision'] = None\n"
        "from course_lib.engine.errors import UsageError\n"
        "from course_lib.workloads.data import *\n"
        "print(len(load(DataSpec('digits', None)).train))\n"
        "try: prepare(DataSpec('cifar10', None))\n"
        "except UsageError as error: print(error)"
    )
    count, message = output(launch, code)[-2:]
    assert count == "1500"
    assert "--data cifar10" in message and "pip install torchvision" in message


def test_fingerprint_sees_every_part() -> None:
    images, labels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4)
    other = images.clone()
    other[3, 0, 1, 1] = 1
    seen = {
        fingerprint(Pixels(images, labels)),
        fingerprint(Pixels(other, labels)),
        fingerprint(Pixels(images, labels.flip(0))),
        fingerprint(Pixels(images.reshape(4, 1, 4, 1), labels)),
        fingerprint(Pixels(images[:3], labels[:3])),
        fingerprint(Pixels(images[:3], labels[:3]), Pixels(images[3:], labels[3:])),
    }
    assert len(seen) == 6
    assert fingerprint(Pixels(images.clone(), labels.clone())) in seen


def test_augmentation_is_a_function_of_the_global_seed() -> None:
    data = load(DataSpec("digits", None, augment=True)).train
    numpy_state, python_state = np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return data[3][0]

    assert all(torch.equal(draw(seed), draw(seed)) for seed in range(5))
    assert len({draw(seed).numpy().tobytes() for seed in range(40)}) > 10
    assert np.array_equal(numpy_state, np.random.get_state()[1])  # type: ignore[index]
    assert python_state == random.getstate()


def test_nothing_else_draws(plain: ImageData) -> None:
    varied = load(DataSpec("digits", None, augment=True))
    state = torch.get_rng_state()
    assert torch.equal(varied.test[5][0], plain.test[5][0])
    assert torch.equal(plain.train[5][0], plain.train[5][0])
    assert torch.equal(state, torch.get_rng_state())
    assert varied.identity == plain.identity


@pytest.mark.parametrize("flip", [False, True])
def test_vary_moves_without_changing(flip: bool) -> None:
    """A two-pixel pattern lands at every offset up to the shift, and mirrored only when that is asked for."""
    image = torch.zeros(1, 9, 9, dtype=torch.uint8)
    image[0, 4, 4], image[0, 4, 5] = 200, 100
    places, mirrored = set(), set()
    torch.manual_seed(0)
    for _ in range(600):
        moved = vary(image, Augment(shift=2, flip=flip))
        assert moved.shape == image.shape and sorted(moved[moved > 0].tolist()) == [100, 200]
        (y, x), (_, right) = (moved[0] == 200).nonzero()[0].tolist(), (moved[0] == 100).nonzero()[0].tolist()
        places.add((y - 4, x - 4))
        mirrored.add(right < x)
    assert places == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}
    assert mirrored == ({False, True} if flip else {False})


def test_channel_statistics_are_exact() -> None:
    images = torch.randint(0, 256, (50, 3, 4, 4), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    images[:, 2] = 7
    mean, std = channel_statistics(images)
    by_channel = images.double().transpose(0, 1).reshape(3, -1)
    torch.testing.assert_close(mean, by_channel.mean(1))
    torch.testing.assert_close(std[:2], by_channel.std(1, correction=0)[:2])
    assert std[2] == 1  # a channel that never varies must not divide by zero


def test_data_sets_pickle_and_reach_spawned_workers(plain: ImageData) -> None:
    copy = pickle.loads(pickle.dumps(plain.train))
    assert torch.equal(copy[11][0], plain.train[11][0])
    loader = DataLoader(
        plain.test, batch_size=8, num_workers=1, multiprocessing_context="spawn", timeout=90, sampler=range(8)
    )
    images, labels = next(iter(loader))
    for i in range(8):
        assert torch.equal(images[i], plain.test[i][0]) and int(labels[i]) == plain.test[i][1]


def test_an_index_past_the_end_is_an_error(plain: ImageData) -> None:
    assert isinstance(plain.test, ImageSet) and len(plain.test) == 297
    with pytest.raises(IndexError):
        plain.test[297]


@pytest.mark.parametrize("act", [prepare, load])
def test_unknown_name(act: Callable[[DataSpec], object]) -> None:
    with pytest.raises(UsageError, match="--data imagenet") as caught:
        act(DataSpec("imagenet", None))
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("act", [prepare, load])
def test_no_scikit_learn(act: Callable[[DataSpec], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError, match="pip install scikit-learn"):
        act(DIGITS)


@pytest.mark.parametrize("damage", ["torn", "empty", "text", "short", "range"])
def test_damaged_digits_file(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = digits.digits_file().read_bytes()
    lines = gzip.decompress(good).splitlines()
    bad = {
        "torn": good[: len(good) // 2],
        "empty": b"",
        "text": b"not a gzip file",
        "short": gzip.compress(b"\n".join(lines[:-1])),
        "range": gzip.compress(b"\n".join([*lines[:-1], b"99," + lines[-1].partition(b",")[2]])),
    }[damage]
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(bad)
    monkeypatch.setattr(digits, "digits_file", lambda: path)
    with pytest.raises(UsageError, match="reinstall scikit-learn") as caught:
        load(DIGITS)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
