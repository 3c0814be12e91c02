"""Trees of pictures: what is found, how it is read, and one clear line for each thing that can be wrong."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from course_lib.engine.errors import UsageError
from course_lib.workloads.data import DataSpec, ImageData, load, prepare
from course_lib.workloads.folders import list_folder
from course_lib.workloads.images import ImageSet
from course_lib.workloads.pictures import load_pictures


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (32, 32), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def tree(root: Path, suffix: str = ".png") -> Path:
    """Red cats and blue dogs: 3 + 2 to train, 1 + 1 to test, each of a slightly different shade."""
    for split, counts in (("train", (3, 2)), ("test", (1, 1))):
        for i in range(counts[0]):
            picture(root / split / "cat" / f"{i}{suffix}", (200 + i, 0, 9))
        for i in range(counts[1]):
            picture(root / split / "dog" / f"{i}{suffix}", (0, 0, 200 + i))
    return root


def read(root: Path) -> ImageData:
    prepare(DataSpec("image_folder", root))
    return load(DataSpec("image_folder", root))


def raw(data: object) -> torch.Tensor:
    assert isinstance(data, ImageSet)
    return data.pixels.images


def test_train_and_test_folders(tmp_path: Path) -> None:
    data = read(tree(tmp_path))
    assert data.classes == ("cat", "dog") and data.shape == (3, 32, 32)
    assert isinstance(data.train, ImageSet) and isinstance(data.test, ImageSet)
    assert [data.train[i][1] for i in range(len(data.train))] == [0, 0, 0, 1, 1]
    assert [data.test[i][1] for i in range(len(data.test))] == [0, 1]
    assert raw(data.train)[2, :, 5, 5].tolist() == [202, 0, 9]
    assert raw(data.test)[1, :, 5, 5].tolist() == [0, 0, 200]
    mean = torch.stack([data.train[i][0] for i in range(5)]).mean(dim=(0, 2, 3))
    torch.testing.assert_close(mean, torch.zeros(3), atol=1e-5, rtol=0)


def test_any_size_mode_and_spelling(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "train/cat/.DS_Store").write_bytes(b"x")
    (root / "train/cat/._0.png").write_bytes(b"not a picture")
    (root / "train/.cache").mkdir()
    (root / "train/cat/notes.txt").write_text("none")
    picture(root / "train/cat/a/deeper.JPG", (250, 0, 0), size=(90, 40))
    picture(root / "train/dog/grey.png", (60, 60, 60), size=(7, 11), mode="L")
    picture(root / "train/dog/see-through.png", (10, 20, 30), size=(64, 64), mode="RGBA")
    picture(root / "train/dog/palette.gif", (0, 0, 255), mode="P")
    images = raw(read(root).train)
    assert images.shape == (9, 3, 32, 32)
    assert images[6, :, 0, 0].tolist() == [60, 60, 60]  # dog: 0.png, 1.png, grey, palette, see-through
    assert images[7, :, 0, 0].tolist() == [0, 0, 255]
    assert images[8, :, 31, 31].tolist() == [10, 20, 30]


def test_a_wide_picture_is_cropped_in_the_middle_and_not_squeezed(tmp_path: Path) -> None:
    root = tree(tmp_path)
    wide = Image.new("RGB", (96, 32), (255, 0, 0))
    wide.paste((0, 255, 0), (32, 0, 64, 32))
    wide.save(root / "train/cat/wide.png")
    images, _, _ = load_pictures(list_folder(root))
    assert images.images[3, :, 3:29, 3:29].reshape(3, -1).float().mean(1).tolist() == [0, 255, 0]


def test_a_photo_is_turned_upright(tmp_path: Path) -> None:
    root = tree(tmp_path)
    photo = Image.new("RGB", (32, 32), (0, 0, 0))
    photo.paste((255, 255, 255), (0, 0, 32, 16))  # the upper half is white
    exif = photo.getexif()
    exif[0x0112] = 3  # orientation: held upside down
    photo.save(root / "train/cat/photo.png", exif=exif)
    images, _, _ = load_pictures(list_folder(root))
    assert images.images[3, 0, 2, 2] == 0 and images.images[3, 0, 29, 29] == 255


def test_classes_alone_are_split_once(tmp_path: Path) -> None:
    for i in range(10):
        picture(tmp_path / "cat" / f"{i}.bmp", (i, 0, 0))
        picture(tmp_path / "dog" / f"{i}.bmp", (i + 100, 0, 0))
    picture(tmp_path / "rare" / "one.bmp", (255, 0, 0))
    listing = list_folder(tmp_path)
    torch.manual_seed(5)
    assert listing == list_folder(tmp_path)
    assert [label for _, label in listing.train] == [0] * 8 + [1] * 8 + [2]
    assert [label for _, label in listing.test] == [0] * 2 + [1] * 2
    assert len({*listing.train, *listing.test}) == 21
    assert len(raw(read(tmp_path).train)) == 17


def test_identity_follows_the_pictures_and_not_their_place(tmp_path: Path) -> None:
    first = tree(tmp_path / "first", ".bmp")
    identity = read(first).identity
    changes: list[Callable[[Path], object]] = [
        lambda root: picture(root / "train/cat/0.bmp", (1, 2, 3)),  # the same name and the same size in bytes
        lambda root: (root / "train/cat/0.bmp").rename(root / "train/cat/00.bmp"),
        lambda root: (root / "train/cat/0.bmp").rename(root / "train/dog/9.bmp"),
        lambda root: (root / "test/dog/0.bmp").rename(root / "test/dog/1.bmp"),
        lambda root: picture(root / "test/cat/7.bmp", (9, 9, 9)),
    ]
    seen = {identity}
    for i, change in enumerate(changes):
        copy = Path(shutil.copytree(first, tmp_path / f"copy{i}"))
        assert read(copy).identity == identity
        change(copy)
        seen.add(read(copy).identity)
    assert len(seen) == 1 + len(changes)


def test_augmentation_mirrors(tmp_path: Path) -> None:
    data = load(DataSpec("image_folder", tree(tmp_path), augment=True))
    assert isinstance(data.train, ImageSet) and data.train.augment is not None and data.train.augment.flip
    assert isinstance(data.test, ImageSet) and data.test.augment is None


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def made_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


# What is done to the tree, the folder that the message must name, and a word of the cure.
BREAKS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (shutil.rmtree, ".", "train/<class>/"),
    "a file": (made_a_file, ".", "train/<class>/"),
    "empty": (emptied, ".", "class folders"),
    "no test": (lambda root: shutil.rmtree(root / "test"), "test", "needs both"),
    "no train": (lambda root: shutil.rmtree(root / "train"), "train", "needs both"),
    "empty train": (lambda root: emptied(root / "train"), "train", "0 class"),
    "one class": (lambda root: shutil.rmtree(root / "train/dog"), "train", "1 class"),
    "no images": (lambda root: (root / "test/dog/0.png").unlink(), "test/dog", "add some"),
    "strange class": (lambda root: (root / "test/dog").rename(root / "test/dogs"), "test/dogs", "rename"),
}


@pytest.mark.parametrize("act", [prepare, load])
@pytest.mark.parametrize("kind", BREAKS)
def test_a_tree_that_cannot_be_used(kind: str, act: Callable[[DataSpec], object], tmp_path: Path) -> None:
    root = tree(tmp_path / "tree")
    change, where, cure = BREAKS[kind]
    change(root)
    with pytest.raises(UsageError) as caught:
        act(DataSpec("image_folder", root))
    message = str(caught.value)
    assert str(root / where) in message and cure in message and "\n" not in message


def test_too_few_to_split(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        picture(tmp_path / name / "0.png", (1, 1, 1))
    with pytest.raises(UsageError, match="too few to split"):
        prepare(DataSpec("image_folder", tmp_path))


@pytest.mark.parametrize("kind", ["empty", "text", "torn png", "torn jpg", "garbage after the header"])
def test_a_corrupt_picture_is_named(kind: str, tmp_path: Path) -> None:
    root = tree(tmp_path)
    path = root / "train" / "dog" / ("bad.jpg" if "jpg" in kind else "bad.png")
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    noise.save(path)
    good = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "text": b"hello", "garbage after the header": good[:24] + b"\xff" * 500}.get(
            kind, good[: len(good) // 2]
        )
    )
    for act in (prepare, load):
        with pytest.raises(UsageError, match="replace or remove") as caught:
            act(DataSpec("image_folder", root))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert {path.name for path in root.iterdir()} == {"train", "test", ".image_folder.lock"}


@pytest.mark.parametrize("act", [prepare, load])
def test_no_root(act: Callable[[DataSpec], object]) -> None:
    with pytest.raises(UsageError, match="--data-root DIR"):
        act(DataSpec("image_folder", None))
