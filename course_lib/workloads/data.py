"""The data sets by name: ``prepare`` does what may be slow, ``load`` gives what training reads."""

from dataclasses import dataclass
from pathlib import Path

import torch

from course_lib.engine.errors import UsageError
from course_lib.workloads.digits import CLASSES, digits_file, load_digits
from course_lib.workloads.downloads import load_download, prepare_download
from course_lib.workloads.folders import list_folder
from course_lib.workloads.images import Augment, ImageData, fingerprint, image_data
from course_lib.workloads.pictures import load_pictures, prepare_pictures

__all__ = ["NAMES", "DataSpec", "ImageData", "load", "prepare"]

NAMES = ("digits", "fashion_mnist", "cifar10", "image_folder")
DOWNLOADED = ("fashion_mnist", "cifar10")
DEFAULT_ROOT = Path("data")

# A mirrored digit is no digit, a mirrored animal is an animal. Four pixels are customary for 32x32 images;
# where the subject fills the frame, fewer.
AUGMENT = {
    "digits": Augment(shift=2, flip=False),
    "fashion_mnist": Augment(shift=2, flip=False),
    "cifar10": Augment(shift=4, flip=True),
    "image_folder": Augment(shift=4, flip=True),
}


@dataclass(frozen=True)
class DataSpec:
    """Which data set, and in what form.

    ``root`` is the folder of its files: ``digits`` needs none, and for a download ``None`` means ``data`` in
    the working directory. ``augment`` varies the training images (never the test images); ``dtype`` is that
    of the images.
    """

    name: str
    root: Path | None
    augment: bool = False
    dtype: torch.dtype = torch.float32


def prepare(spec: DataSpec) -> None:
    """Have the files ready: find them, or download or decode them in one process while the others wait.

    Every process calls it before the process group exists, for it may take longer than a collective may.
    Errors: ``UsageError`` with one line that says what is missing and what to do.
    """
    if spec.name == "digits":
        digits_file()
    elif spec.name in DOWNLOADED:
        prepare_download(spec.name, _root(spec))
    elif spec.name == "image_folder":
        prepare_pictures(list_folder(spec.root and spec.root.expanduser()))
    else:
        raise UsageError(f"--data {spec.name}: no such data set; choose one of {', '.join(NAMES)}")


def load(spec: DataSpec) -> ImageData:
    """Read a prepared data set into memory, or map it; it is 32x32 whatever its source. It touches no network.

    Errors: ``UsageError`` naming the file that is missing or damaged.
    """
    digest = None
    if spec.name == "digits":
        train, test = load_digits()
        classes = CLASSES
    elif spec.name in DOWNLOADED:
        train, test, classes = load_download(spec.name, _root(spec))
    elif spec.name == "image_folder":
        listing = list_folder(spec.root and spec.root.expanduser())
        train, test, digest = load_pictures(listing)
        classes = listing.classes
    else:
        raise UsageError(f"--data {spec.name}: no such data set; choose one of {', '.join(NAMES)}")
    augment = AUGMENT[spec.name] if spec.augment else None
    return image_data(spec.name, train, test, classes, spec.dtype, augment, digest or fingerprint(train, test))


def _root(spec: DataSpec) -> Path:
    return (spec.root or DEFAULT_ROOT).expanduser()
