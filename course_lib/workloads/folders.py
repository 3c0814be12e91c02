"""Any tree of pictures: ``root/train/<class>/*`` and ``root/test/<class>/*``, or ``root/<class>/*``."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib.engine.errors import UsageError
from course_lib.workloads.images import Pixels
from course_lib.workloads.optional import reason, require

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
SIZE = 32
SPLIT_SEED = 5
TEST_SHARE = 0.2
LAYOUT = "train/<class>/ and test/<class>/, or <class>/ alone, each with images"


@dataclass(frozen=True)
class Listing:
    """The pictures of a tree, not opened yet: (file, class index), sorted, in each split."""

    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]
    test: tuple[tuple[Path, int], ...]


def list_folder(root: Path | None) -> Listing:
    """Find the pictures and their classes.

    Without ``train`` and ``test`` folders a fifth of each class, always the same, becomes the test split.

    Errors: ``UsageError`` naming the folder that is missing, empty or out of place.
    """
    if root is None:
        raise UsageError(f"--data image_folder needs --data-root DIR: a folder with {LAYOUT}")
    if not root.is_dir():
        raise UsageError(f"--data-root {root} is not a folder: give one with {LAYOUT}")
    try:
        if (root / "train").is_dir() or (root / "test").is_dir():
            return _list_splits(root)
        return _split(root, _list_classes(root))
    except OSError as error:
        raise UsageError(f"--data-root {root} cannot be read ({reason(error)}): check its permissions") from error


def load_folder(listing: Listing, size: int = SIZE) -> tuple[Pixels, Pixels, str]:
    """Decode a tree: training split, test split, (N, 3, size, size) each, and a digest (hex) of it.

    The digest covers the files' names and bytes and not the decoded pixels, which another version of the
    decoder may round differently. Errors: ``UsageError`` naming a picture that cannot be read.
    """
    digest = hashlib.sha256(str(size).encode())
    train, test = (_decode_all(listing.root, part, size, digest) for part in (listing.train, listing.test))
    return train, test, digest.hexdigest()


def _list_splits(root: Path) -> Listing:
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise UsageError(f"{root / part} is missing: --data-root needs both train/<class>/ and test/<class>/")
    train, test = _list_classes(root / "train"), _list_classes(root / "test")
    for name in test:
        if name not in train:
            raise UsageError(f"{root / 'test' / name} has no counterpart {root / 'train' / name}: add or rename it")
    classes = tuple(train)
    return Listing(
        root,
        classes,
        tuple((file, classes.index(name)) for name, files in train.items() for file in files),
        tuple((file, classes.index(name)) for name, files in test.items() for file in files),
    )


def _split(root: Path, found: dict[str, list[Path]]) -> Listing:
    """Cut a fifth off each class, always the same one, so that every class is trained."""
    random = np.random.RandomState(SPLIT_SEED)  # its stream is frozen, unlike that of numpy's newer generators
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, files in enumerate(found.values()):
        chosen = set(random.permutation(len(files))[: int(TEST_SHARE * len(files))].tolist())
        for index, file in enumerate(files):
            (test if index in chosen else train).append((file, label))
    if not test:
        raise UsageError(f"{root} has fewer than 5 images in every class, too few to split: give train/ and test/")
    return Listing(root, tuple(found), tuple(train), tuple(test))


def _list_classes(folder: Path) -> dict[str, list[Path]]:
    """Class name → its pictures at any depth, both sorted; what is hidden is nobody's picture."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise UsageError(f"{folder} has {len(names)} class folders, and a classifier needs two or more: see {LAYOUT}")
    found = {}
    for name in names:
        files = [
            path
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
        ]
        if not files:
            raise UsageError(f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))}): add some or remove it")
        found[name] = files
    return found


def _decode_all(root: Path, files: tuple[tuple[Path, int], ...], size: int, digest: Any) -> Pixels:
    cure = "pip install pillow, or use --data digits"
    pillow, ops = (require(f"PIL.{part}", "--data image_folder", cure) for part in ("Image", "ImageOps"))
    images = torch.empty((len(files), 3, size, size), dtype=torch.uint8)
    for row, (path, _) in zip(images, files, strict=True):
        try:
            data = path.read_bytes()
            with pillow.open(io.BytesIO(data)) as picture:
                row.copy_(_fit(ops, picture, size))
        except Exception as error:  # on damaged bytes decoders raise what they like, down to struct.error
            raise UsageError(f"{path} cannot be read as an image ({reason(error)}): replace or remove it") from error
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode(errors="surrogateescape"))
        digest.update(data)
    return Pixels(images, torch.tensor([label for _, label in files], dtype=torch.int64))


def _fit(ops: Any, picture: Any, size: int) -> Tensor:
    """The middle square of a picture as the camera held it, (3, size, size) bytes."""
    upright = ops.exif_transpose(picture).convert("RGB")
    square = upright if upright.size == (size, size) else ops.fit(upright, (size, size))
    return torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1)
