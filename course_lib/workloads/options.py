"""The command line that all training scripts share."""

import argparse
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from course_lib.engine import UsageError
from course_lib.workloads.data import NAMES, DataSpec
from course_lib.workloads.vision import DEFAULT_BATCH, DEFAULT_LR, MODELS, NORMS

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Options:
    """What was asked for; `parse_options` documents each."""

    data: str
    data_root: Path | None
    augment: bool
    model: str
    norm: str
    epochs: int
    global_batch_size: int
    max_local_batch: int | None
    lr: float
    seed: int
    num_workers: int
    dtype: str
    device: str
    run_dir: Path
    fault: str | None
    lanes: int = 2
    processes: int = 2
    snapshot_every: int = 10
    keep: int = 3
    snapshot_strict: bool = False
    virtual_shards: int | None = None
    time_limit: float | None = None
    collective_timeout: float = 60.0

    @property
    def data_spec(self) -> DataSpec:
        return DataSpec(self.data, self.data_root, self.augment, DTYPES[self.dtype])

    def for_trainer(self, data_identity: str) -> dict[str, Any]:
        """The Trainer's keyword arguments that are options of the command line.

        `identity` is what a resumed run must share with its snapshot, `settings` what may change and is then logged.
        """
        return {
            "epochs": self.epochs,
            "global_batch_size": self.global_batch_size,
            "max_local_batch": self.max_local_batch,
            "seed": self.seed,
            "num_workers": self.num_workers,
            "snapshot_every": self.snapshot_every,
            "keep": self.keep,
            "strict": self.snapshot_strict,
            "virtual_shards": self.virtual_shards,
            "time_limit": self.time_limit,
            "identity": {"data": data_identity, "model": self.model, "norm": self.norm, "augment": self.augment},
            "settings": {"num_workers": self.num_workers, "max_local_batch": self.max_local_batch},
        }


class _Parser(argparse.ArgumentParser):
    """A mistake is one line and exit code 2, and the caller decides how to leave."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def parse_options(description: str, *groups: str, argv: list[str] | None = None) -> Options:
    """The options of a script; `groups` names the parts it has beside the common ones: lanes, spawn, group, snapshots.

    Raises UsageError, in one line, for an unknown option or value.
    """
    parser = _Parser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    _common(parser)
    if "lanes" in groups:
        parser.add_argument("--lanes", type=_at_least(1), default=2, help="parts of a batch where there is no GPU")
    if "spawn" in groups:
        parser.add_argument("--processes", type=_at_least(1), default=2, help="number of ranks to start")
    if "group" in groups:
        parser.add_argument(
            "--collective-timeout",
            type=_positive,
            default=60.0,
            metavar="SECONDS",
            help="seconds until a collective without an answer fails",
        )
    if "snapshots" in groups:
        _snapshots(parser)
    given = vars(parser.parse_args(argv))
    return Options(**{field.name: given[field.name] for field in fields(Options) if field.name in given})


def _common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", choices=NAMES, default="digits", help="the data set")
    add("--data-root", type=Path, metavar="DIR", help="folder of the data set's files; digits need none")
    add("--augment", action="store_true", help="vary the training images (shift; mirror where it makes sense)")
    add("--model", choices=MODELS, default="tiny", help="the network")
    add("--norm", choices=NORMS, default="batch", help="its normalisation layers")
    add("--epochs", type=_at_least(1), default=4, help="passes over the training set")
    add(
        "--global-batch-size",
        type=_at_least(1),
        default=DEFAULT_BATCH,
        metavar="B",
        help="samples a step, over all ranks",
    )
    add("--max-local-batch", type=_at_least(1), metavar="N", help="most samples of a rank at once; more are split")
    add("--lr", type=_positive, default=DEFAULT_LR, help="peak learning rate")
    add("--seed", type=_at_least(0), default=0, help="seed of weights, order, augmentation and dropout")
    add("--num-workers", type=_at_least(0), default=0, metavar="K", help="processes a rank that load data")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="floating-point type of weights and images")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs when there is one for each rank")
    add(
        "--run-dir",
        type=_folder,
        default=Path("runs") / Path(sys.argv[0]).stem,
        metavar="DIR",
        help="folder for events, snapshots, report",
    )
    add("--fault", metavar="SPEC", help="break one rank: KIND[:key=value,...], see course_lib/lab/faults.py")


def _snapshots(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--snapshot-every", type=_at_least(1), default=10, metavar="STEPS", help="optimizer steps between snapshots")
    add("--keep", type=_at_least(1), default=3, metavar="K", help="good snapshots to keep")
    add(
        "--virtual-shards",
        type=_at_least(1),
        metavar="V",
        help="cut a step into V parts: same bits on any number of ranks",
    )
    add(
        "--time-limit",
        type=_positive,
        metavar="SECONDS",
        help="then stop with a snapshot, as if preempted (exit code 143)",
    )
    add("--snapshot-strict", action="store_true", help="stop when a snapshot cannot be written")


def _at_least(least: int) -> Any:
    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to 2**63 - 1")
        return number

    return whole_number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of at most 1e6")
    return number


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the folder's name is empty")
    return Path(text)
