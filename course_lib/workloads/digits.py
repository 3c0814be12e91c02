"""The handwritten digits that scikit-learn carries: 1,797 real images which need no network.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
1998 (its test part). Each is 8x8 pixels of value 0 to 16.
"""

import gzip
import importlib.util
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from course_lib.engine.errors import UsageError
from course_lib.workloads.images import Pixels
from course_lib.workloads.optional import reason

CLASSES = tuple("0123456789")
COUNT, SIDE, PEAK = 1797, 8, 16
TEST_COUNT = 297
SIZE = 32
SPLIT_SEED = 1797


def digits_file() -> Path:
    """Where scikit-learn keeps the digits, found without importing it (which takes over a second).

    Errors: ``UsageError`` when scikit-learn, or the file in it, is missing.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("--data digits reads a file of scikit-learn, which is missing: pip install scikit-learn")
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise UsageError(f"--data digits: {path} is missing: pip install --force-reinstall scikit-learn")
    return path


def load_digits() -> tuple[Pixels, Pixels]:
    """The digits as 1,500 training and 297 test images, (N, 1, 32, 32).

    The split never changes: it is no property of a run, so it has nothing to do with the run's seed.
    ``RandomState`` is the one numpy generator whose stream is frozen.
    """
    table = _read(digits_file())
    small = torch.from_numpy(table[:, :-1]).float().reshape(COUNT, 1, SIDE, SIDE)
    # Enlarging by four weighs whole numbers with multiples of 1/64, so no bit is rounded before ``round``
    # and every machine gets the same bytes.
    large = functional.interpolate(small, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    images = (large * 255 / PEAK).round().to(torch.uint8)
    labels = torch.from_numpy(table[:, -1]).long()
    order = torch.from_numpy(np.random.RandomState(SPLIT_SEED).permutation(COUNT))
    test, train = order[:TEST_COUNT], order[TEST_COUNT:]
    return Pixels(images[train], labels[train]), Pixels(images[test], labels[test])


def _read(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The table (1797, 65): 64 pixels and the digit. Errors: ``UsageError`` when it is anything else."""
    try:
        with gzip.open(path, "rt") as lines:
            table = np.array([line.split(",") for line in lines], dtype=np.float64).astype(np.int64)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UsageError(f"{path} is damaged ({reason(error)}): reinstall scikit-learn") from error
    if (
        table.shape != (COUNT, SIDE * SIDE + 1)
        or table.min() < 0
        or table[:, :-1].max() > PEAK
        or table[:, -1].max() >= len(CLASSES)
    ):
        raise UsageError(f"{path} does not hold the {COUNT} digits that belong there: reinstall scikit-learn")
    return table
