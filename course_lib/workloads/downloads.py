"""Fashion-MNIST and CIFAR-10, in torchvision's own format on disk, through torchvision's own classes.

Sources: H. Xiao, K. Rasul and R. Vollgraf, Fashion-MNIST, 2017; A. Krizhevsky, Learning Multiple Layers of
Features from Tiny Images, 2009.
"""

import math
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from course_lib.engine.errors import UsageError
from course_lib.workloads.fetch import fetch_once
from course_lib.workloads.images import Pixels
from course_lib.workloads.optional import reason, require

CLASS_OF = {"fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10"}
SIZE = 32
# What unpickling or parsing damaged files raises in torchvision.
BROKEN_FILES = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    EOFError,
    pickle.UnpicklingError,
)


def prepare_download(name: str, root: Path) -> None:
    """Have the files of ``name`` in ``root``, downloading and checking them if need be.

    Errors: ``UsageError`` with what to do when they are neither there nor to be had.
    """
    source = _source(name)
    archives = _archives(name, source)
    fetch_once(
        name,
        root,
        complete=lambda: _complete(name, source, root),
        download=lambda folder: source(str(folder), train=False, download=True),
        archives=archives,
        cure=f"put {' and '.join(path.name for path in archives)} into {root / archives[0].parent}, "
        "or use --data digits, which needs no download",
    )


def load_download(name: str, root: Path) -> tuple[Pixels, Pixels, tuple[str, ...]]:
    """Training split, test split, (N, C, 32, 32) each, and the names of the classes.

    Fashion-MNIST's 28x28 images get a black margin of two pixels.
    Errors: ``UsageError`` when the files are not there or damaged.
    """
    source = _source(name)
    try:
        train, test = (source(str(root), train=part, download=False) for part in (True, False))
        splits = _pixels(train), _pixels(test)
    except BROKEN_FILES as error:
        raise UsageError(
            f"--data {name}: the files in {root} are missing or damaged ({reason(error)}): delete them, "
            "so that they are downloaded again, or use --data digits"
        ) from error
    return *splits, tuple(train.classes)


def _source(name: str) -> Any:
    cure = "pip install torchvision (of the same build as torch), or use --data digits"
    return getattr(require("torchvision.datasets", f"--data {name}", cure), CLASS_OF[name])


def _archives(name: str, source: Any) -> tuple[Path, ...]:
    """What torchvision downloads, as paths below the root."""
    if name == "cifar10":
        return (Path(source.filename),)
    return tuple(Path(source.__name__, "raw", file) for file, _ in source.resources)


def _complete(name: str, source: Any, root: Path) -> bool:
    """Whether every file is there and whole, read without the network."""
    if name == "fashion_mnist":
        # torchvision has checksums for the archives only and takes any file of the right name for whole.
        return all(_whole_idx((root / path).with_suffix("")) for path in _archives(name, source))
    check = require("torchvision.datasets.utils", f"--data {name}", "pip install torchvision").check_integrity
    files = [*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])]
    return all(check(str(root / source.base_folder / file), md5) for file, md5 in files)


def _whole_idx(path: Path) -> bool:
    """Whether an IDX file is as long as its head says: 0, 0, 8, number of dimensions, big-endian sizes."""
    try:
        with path.open("rb") as file:
            kind, dimensions = struct.unpack(">3sB", file.read(4))
            sizes = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    except (OSError, struct.error):
        return False
    return bool(kind == b"\0\0\x08" and path.stat().st_size == 4 + 4 * dimensions + math.prod(sizes))


def _pixels(data: Any) -> Pixels:
    """torchvision's ``data``, (N, H, W, 3) numpy or (N, H, W) torch bytes, as channels first and 32x32."""
    images = torch.as_tensor(data.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    margin = (SIZE - images.shape[-1]) // 2
    images = functional.pad(images, [margin] * 4).contiguous()
    labels = torch.as_tensor(data.targets, dtype=torch.int64)
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images but {len(labels)} labels")
    return Pixels(images, labels)
