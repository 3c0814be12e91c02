"""The command line that all training scripts share, whatever they train."""

import argparse
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from course_lib.engine import UsageError
from course_lib.workloads.precision import AMP
from course_lib.workloads.vision import DEFAULT_BATCH, DEFAULT_LR


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What every training script can be asked for, whatever it trains; `add_training_options` documents each."""

    epochs: int
    global_batch_size: int
    max_local_batch: int | None
    lr: float
    seed: int
    num_workers: int
    device: str
    run_dir: Path
    fault: str | None
    amp: str
    deterministic: bool
    compile: bool = False
    snapshot_every: int = 10
    keep: int = 3
    snapshot_strict: bool = False
    virtual_shards: int | None = None
    time_limit: float | None = None
    collective_timeout: float = 60.0

    def trainer_options(self, **identity: Any) -> dict[str, Any]:
        """The Trainer's keyword arguments that are options of the command line.

        `identity` is what a resumed run must share with its snapshot; what may change, and is then logged, goes with it
        as `settings`.
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
            "identity": identity | {"amp": self.amp},
            "settings": {"num_workers": self.num_workers, "max_local_batch": self.max_local_batch},
        }


class _Parser(argparse.ArgumentParser):
    """A mistake is one line and exit code 2, and the caller decides how to leave."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def new_parser(description: str) -> argparse.ArgumentParser:
    """A parser without options yet, whose mistakes are UsageErrors."""
    return _Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)


def add_training_options(parser: argparse.ArgumentParser, *groups: str) -> None:
    """The options of every training script, and those of the groups: group, snapshots."""
    _training(parser, AMP if "snapshots" in groups else AMP[:2])
    if "group" in groups:
        parser.add_argument(
            "--collective-timeout",
            type=positive,
            default=60.0,
            metavar="SECONDS",
            help="seconds until a collective without an answer fails",
        )
    if "snapshots" in groups:
        _snapshots(parser)


def values(parser: argparse.ArgumentParser, options: type[TrainingOptions], argv: list[str] | None) -> dict[str, Any]:
    """What the command line gives for the fields of an options class."""
    given = vars(parser.parse_args(argv))
    return {field.name: given[field.name] for field in fields(options) if field.name in given}


def apply_preset(
    parser: argparse.ArgumentParser, presets: Mapping[str, Mapping[str, Any]], argv: list[str] | None
) -> None:
    """Let the preset that `argv` asks for, else the parser's own, set defaults: what is given beside it counts."""
    asked = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    asked.add_argument("--preset", default=parser.get_default("preset"))
    with suppress(argparse.ArgumentError, SystemExit):  # the parser itself says what is wrong
        parser.set_defaults(**presets.get(asked.parse_known_args(argv)[0].preset, {}))


def _training(parser: argparse.ArgumentParser, precisions: tuple[str, ...]) -> None:
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=4, help="passes over the training set")
    add(
        "--global-batch-size",
        type=at_least(1),
        default=DEFAULT_BATCH,
        metavar="B",
        help="samples a step, over all ranks",
    )
    add("--max-local-batch", type=at_least(1), metavar="N", help="most samples of a rank at once; more are split")
    add("--lr", type=positive, default=DEFAULT_LR, help="peak learning rate")
    add("--seed", type=at_least(0), default=0, help="seed of weights, order, augmentation and dropout")
    add("--num-workers", type=at_least(0), default=0, metavar="K", help="processes a rank that load data")
    add("--amp", choices=precisions, default="off", help="compute the forward pass in a shorter floating-point type")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs when there is one for each rank")
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="GPUs: only kernels that give the same bits each time, as an exact resume needs",
    )
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
    add("--snapshot-every", type=at_least(1), default=10, metavar="STEPS", help="optimizer steps between snapshots")
    add("--keep", type=at_least(1), default=3, metavar="K", help="good snapshots to keep")
    add(
        "--virtual-shards",
        type=at_least(1),
        metavar="V",
        help="cut a step into V parts: same bits on any number of ranks",
    )
    add(
        "--time-limit",
        type=positive,
        metavar="SECONDS",
        help="then stop with a snapshot, as if preempted (exit code 143)",
    )
    add("--compile", action="store_true", help="compile the network first (torch.compile): each start takes longer")
    add("--snapshot-strict", action="store_true", help="stop when a snapshot cannot be written")


def at_least(least: int) -> Any:
    def whole_number(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to 2**63 - 1")
        return number

    return whole_number


def positive(text: str) -> float:
    number = _number(text)
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of at most 1e6")
    return number


def share(text: str) -> float:
    number = _number(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the folder's name is empty")
    return Path(text)
