"""The command line of the script that trains a GPT."""

from dataclasses import dataclass
from typing import Any

from course_lib.workloads.gpt import WEIGHT_DECAY
from course_lib.workloads.text import PYDOC
from course_lib.workloads.training_options import (
    TrainingOptions,
    add_training_options,
    apply_preset,
    new_parser,
    share,
    values,
)

# The shapes are in gpt.py. `seed` has the options of minGPT-ddp, one of whose processes takes 216 windows a step; on a
# CPU give it a smaller batch. (Source: gpt2_train_cfg.yaml and model.py in pytorch/examples, distributed/minGPT-ddp.)
PRESETS: dict[str, dict[str, Any]] = {
    "nano": {"epochs": 8, "global_batch_size": 64, "lr": 6e-3, "dropout": 0.0, "snapshot_every": 50},
    "micro": {"epochs": 10, "global_batch_size": 64, "lr": 2e-3, "dropout": 0.1, "snapshot_every": 50},
    "seed": {"epochs": 10, "global_batch_size": 216, "lr": 3e-4, "dropout": 0.1, "snapshot_every": 50},
}


@dataclass(frozen=True, kw_only=True)
class GptOptions(TrainingOptions):
    """What the script can be asked for; `parse_options` documents each."""

    text: str
    preset: str
    dropout: float
    weight_decay: float

    def for_trainer(self, text_identity: str) -> dict[str, Any]:
        """The Trainer's keyword arguments for a run on this text."""
        names = ("preset", "dropout", "weight_decay")
        return self.trainer_options(text=text_identity, **{name: getattr(self, name) for name in names})


def parse_options(description: str, *groups: str, argv: list[str] | None = None) -> GptOptions:
    """The options of the script; `groups` names the parts it has beside the common ones: group, snapshots.

    Raises UsageError, in one line, for an unknown option or value.
    """
    parser = new_parser(description)
    add = parser.add_argument
    add("--text", default=PYDOC, metavar="PATH", help=f"a UTF-8 file, or {PYDOC}: the Python language reference")
    add("--preset", choices=tuple(PRESETS), default="nano", help="size of the network; sets other options' defaults")
    add("--dropout", type=share, metavar="P", help="share of activations that a training step drops")
    add("--weight-decay", type=share, default=WEIGHT_DECAY, metavar="X", help="AdamW's, on matrices only")
    add_training_options(parser, *groups)
    apply_preset(parser, PRESETS, argv)
    return GptOptions(**values(parser, GptOptions, argv))
