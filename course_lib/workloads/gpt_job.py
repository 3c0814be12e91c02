"""What the GPT script needs beside its loop: text, model, optimizer, evaluation, and a sample of what it writes."""

from typing import Any

import torch
from torch import Tensor, nn

from course_lib.engine import Plan, UsageError, World, evaluate
from course_lib.engine.state import unwrap
from course_lib.engine.world import shared
from course_lib.workloads.gpt import GPT, SHAPES, adamw, build_gpt, generate, next_loss
from course_lib.workloads.gpt_options import GptOptions
from course_lib.workloads.precision import settle
from course_lib.workloads.text import TextData, Vocabulary, bigram_loss, load_text
from course_lib.workloads.vision import schedule

SAMPLE = 200  # characters


def load_everywhere(options: GptOptions, world: World) -> TextData:
    """The text, on every rank; a node that has another one would train on other characters, and nobody would see it.

    Raises UsageError on all ranks when one cannot read it or reads something else.
    """
    text = world.agree(lambda: load_text(options.text, SHAPES[options.preset].block))
    theirs = sorted(set(world.gather(text.identity)))
    if len(theirs) > 1:
        raise shared(UsageError(f"--text {options.text}: the nodes have different texts ({'; '.join(theirs)})"))
    return text


def gpt_model(options: GptOptions, text: TextData, device: torch.device) -> nn.Module:
    """The network that the options ask for, for this text, on this device."""
    model = build_gpt(SHAPES[options.preset], len(text.vocabulary), options.seed, options.dropout)
    return settle(model, device, options.amp, options.deterministic, options.compile)


def optimizer_of(
    options: GptOptions, text: TextData, model: nn.Module
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW, and the schedule of its learning rate, to be stepped after each optimizer step."""
    optimizer = adamw(model, options.lr, options.weight_decay)
    plan = Plan(len(text.train), options.global_batch_size)
    return optimizer, schedule(optimizer, options.epochs * plan.steps_per_epoch)


def guessed(scores: Tensor, following: Tensor) -> Tensor:
    """The share of its characters that each window's likeliest guesses hit, summed over the windows; a 0-d tensor."""
    return (scores.argmax(dim=2) == following).double().mean(dim=1).sum()


def held_out_metrics(model: nn.Module, text: TextData, world: World) -> dict[str, float]:
    """Nats a character, and the share of characters guessed, on the part held out; the same on every rank."""

    def totals(module: nn.Module, batch: Any) -> dict[str, Tensor]:
        characters, following = batch
        scores = module(characters)
        loss = next_loss(scores, following) * len(characters)  # all windows are equally long
        return {"test_loss": loss, "test_accuracy": guessed(scores, following)}

    return evaluate(model, text.held_out, world, totals)


def compare(test_loss: float, text: TextData) -> str:
    """A line that says what the model's loss is worth."""
    return f"test loss {test_loss:.4f} nats a character; a table of character pairs reaches {bigram_loss(text):.4f}"


def sample(model: nn.Module, vocabulary: Vocabulary, seed: int, count: int = SAMPLE) -> str:
    """Text that the model writes after a line break (or its first character, if it knows none)."""
    inner = unwrap(model)
    assert isinstance(inner, GPT)
    start = vocabulary.encode("\n" if "\n" in vocabulary.characters else vocabulary.characters[0])
    device = inner.positions.weight.device
    return vocabulary.decode(generate(inner, start[None].to(device), count, seed=seed)[0])


def write_sample(model: nn.Module, vocabulary: Vocabulary, options: GptOptions) -> str:
    """Leave a sample in the run directory and return a line that says so; a full disk costs nothing else."""
    path = options.run_dir / "sample.txt"
    try:
        path.write_text(sample(model, vocabulary, options.seed), encoding="utf-8")
    except OSError as error:
        return f"no sample: {error}"
    return f"what it writes: {path}"
