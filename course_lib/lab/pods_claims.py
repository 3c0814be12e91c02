"""What a run's record says of a text model's held-out loss; each function checks the whole record first."""

import math
from pathlib import Path

from course_lib.engine.report import surviving_steps
from course_lib.lab.claims import events_used_once
from course_lib.workloads.gpt import SHAPES
from course_lib.workloads.text import PYDOC, TextData, bigram_loss, load_text


def course_text(block: int = SHAPES["nano"].block) -> TextData:
    """The text that the jobs of notebook 07 train on."""
    return load_text(PYDOC, block)


def held_out_losses(run: Path | str) -> list[float]:
    """The loss on the held-out part after each epoch, in nats a character."""
    events = events_used_once(run)
    found = {event["epoch"]: float(event["test_loss"]) for event in events if event["event"] == "epoch"}
    return [found[epoch] for epoch in sorted(found)]


def beats_pairs(run: Path | str) -> bool:
    """Whether a finished run ended below what a table of character pairs reaches on the same held-out text."""
    return held_out_losses(run)[-1] < bigram_loss(course_text())


def began_near_uniform(run: Path | str) -> bool:
    """Whether the first step's loss was that of a model that knows nothing: within 5 % of the logarithm of the number
    of different characters."""
    first = surviving_steps(events_used_once(run))[0]["loss"]
    return math.isclose(first, math.log(len(course_text().vocabulary)), rel_tol=0.05)
