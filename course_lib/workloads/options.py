"""The command line of the image scripts."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from course_lib.engine import UsageError
from course_lib.workloads.data import NAMES, DataSpec
from course_lib.workloads.training_options import (
    TrainingOptions,
    add_training_options,
    apply_preset,
    at_least,
    new_parser,
    share,
    values,
)
from course_lib.workloads.vision import MODELS, NORMS, SCHEDULES, WEIGHT_DECAY

DTYPES = {"float32": torch.float32, "float64": torch.float64}

# The ResNet-34 of the series that this course began from. Its two ranks had 128 images a step each.
PRESETS: dict[str, dict[str, Any]] = {
    "series": {
        "data": "image_folder",
        "model": "resnet34",
        "epochs": 15,
        "global_batch_size": 256,
        "lr": 0.1,
        "schedule": "steps",
        "weight_decay": 0.0,
        "snapshot_every": 50,
    }
}


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions):
    """What the image scripts can be asked for; `parse_options` documents each."""

    data: str
    data_root: Path | None
    augment: bool
    model: str
    norm: str
    dtype: str
    schedule: str
    weight_decay: float
    lanes: int = 2
    processes: int = 2

    @property
    def data_spec(self) -> DataSpec:
        return DataSpec(self.data, self.data_root, self.augment, DTYPES[self.dtype])

    def for_trainer(self, data_identity: str) -> dict[str, Any]:
        """The Trainer's keyword arguments for a run on these data."""
        names = ("model", "norm", "augment", "schedule", "weight_decay")
        return self.trainer_options(data=data_identity, **{name: getattr(self, name) for name in names})


def parse_options(description: str, *groups: str, argv: list[str] | None = None) -> Options:
    """The options of an image script; `groups` names the parts it has beside the common ones.

    They are lanes, spawn, group, snapshots. Raises UsageError, in one line, for an unknown option or value.
    """
    parser = new_parser(description)
    _images(parser)
    add_training_options(parser, *groups)
    if "lanes" in groups:
        parser.add_argument("--lanes", type=at_least(1), default=2, help="parts of a batch where there is no GPU")
    if "spawn" in groups:
        parser.add_argument("--processes", type=at_least(1), default=2, help="number of ranks to start")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="the options of an experiment; others override them")
    apply_preset(parser, PRESETS, argv)
    options = Options(**values(parser, Options, argv))
    if options.amp != "off" and options.dtype != "float32":
        raise UsageError(f"--amp {options.amp} is for --dtype float32: leave one of the two out")
    return options


def _images(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", choices=NAMES, default="digits", help="the data set")
    add("--data-root", type=Path, metavar="DIR", help="folder of the data set's files; digits need none")
    add("--augment", action="store_true", help="vary the training images (shift; mirror where it makes sense)")
    add("--model", choices=MODELS, default="tiny", help="the network")
    add("--norm", choices=NORMS, default="batch", help="its normalisation layers")
    add(
        "--schedule",
        choices=SCHEDULES,
        default="cosine",
        help="learning rate: warm-up and cosine, or a tenth after every 5 epochs",
    )
    add("--weight-decay", type=share, default=WEIGHT_DECAY, metavar="X", help="SGD's weight decay")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="floating-point type of weights and images")
