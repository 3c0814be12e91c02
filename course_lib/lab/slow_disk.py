"""Samples that take their time, as files on a disk do."""

import time
from typing import Any

from torch.utils.data import Dataset


class SlowDisk(Dataset[Any]):
    """The samples of another data set, each `seconds` later.

    It stands in a file, since a loader process imports the class of its data set wherever processes aren't forked.
    """

    def __init__(self, samples: Dataset[Any], seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.samples[index]
