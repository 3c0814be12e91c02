"""Text as training reads it: characters as numbers, windows of them, and a part that training never sees.

Window i of a part asks for the characters i * block + 1 to (i + 1) * block, each from those before it in the window. So
windows overlap in no character that is asked for, and an epoch asks for each character once; what is left over at the
end of a part, less than a block, is left out.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from course_lib.engine.errors import UsageError
from course_lib.workloads.optional import reason

PYDOC = "pydoc"
HELD_OUT = 10  # one character of so many is held out: the last ones
SMOOTHING = 0.1


@dataclass(frozen=True)
class Vocabulary:
    """The characters of a text in the order of their code points; a token is a place in it.

    It goes into the snapshot (`extra=` of a TrainState): without it nobody could read what the model writes.
    """

    characters: str

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The tokens (T,) of a text. Errors: ``UsageError`` for a character that is not in the vocabulary."""
        places = {character: place for place, character in enumerate(self.characters)}
        for character in text:
            if character not in places:
                raise UsageError(f"the model knows no {character!r}: its text had none")
        return torch.tensor([places[character] for character in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (T,)."""
        return "".join(self.characters[token] for token in tokens.tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"characters": self.characters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse another vocabulary with a ``UsageError``: the model's numbers would mean other characters."""
        there = state_dict["characters"]
        if there != self.characters:
            other = sorted(set(there) ^ set(self.characters))
            raise UsageError(
                f"the snapshot's vocabulary has {len(there)} characters, this text's {len(self)}; "
                f"only one has {' '.join(map(repr, other[:5]))}: use the --text it was trained on"
            )


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The windows of a part of a text: (characters, the characters that follow them), int64 of shape (block,) each."""

    draws = False  # the engine need not seed each fetch

    def __init__(self, tokens: Tensor, block: int) -> None:
        self.tokens = tokens
        self.block = block

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block
        window = self.tokens[start : start + self.block + 1].long()
        return window[:-1], window[1:]


@dataclass(frozen=True)
class TextData:
    """A text ready for training.

    ``identity`` is the same wherever the same text is loaded and differs when it differs, so that a snapshot is not
    resumed on another one.
    """

    train: Windows
    held_out: Windows
    vocabulary: Vocabulary
    identity: str


def load_text(source: str, block: int) -> TextData:
    """Read a text: ``pydoc``, or the path of a UTF-8 file.

    Errors: ``UsageError`` naming ``--text`` and what is wrong with it.
    """
    text = _pydoc() if source == PYDOC else _read(Path(source).expanduser())
    least = 2 * (block + 1)
    if len(text) < least:
        raise UsageError(
            f"--text {source}: {len(text)} characters are too few; a block of {block} needs {least}, "
            "half of them to train on and half to hold out"
        )
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    kinds, places = np.unique(codes, return_inverse=True)
    vocabulary = Vocabulary("".join(map(chr, kinds.tolist())))
    tokens = torch.from_numpy(places.astype(np.int32))
    cut = len(text) - max(block + 1, len(text) // HELD_OUT)
    return TextData(Windows(tokens[:cut], block), Windows(tokens[cut:], block), vocabulary, _identity(text, vocabulary))


def _identity(text: str, vocabulary: Vocabulary) -> str:
    digest = hashlib.sha256(f"{vocabulary.characters}\0{text}".encode()).hexdigest()
    return f"of {len(text)} characters, {len(vocabulary)} different ones, digest {digest[:16]}"


def _pydoc() -> str:
    """The Python language reference as ``help()`` shows it: each interpreter has that of its own version."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            f"--text {PYDOC}: this Python comes without its language reference ({reason(error)}): "
            "give the path of a text file"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--text {path}: no text can be read there ({reason(error)})") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path}: not UTF-8 (byte {error.start}): give a plain text file") from error


def bigram_loss(data: TextData) -> float:
    """What a table of character pairs reaches on the held-out windows: its mean loss, in nats a character.

    It is the baseline that a model must beat to have learnt more than which character likes to follow which. The
    table counts the pairs of the training part; ``SMOOTHING`` is added to each count, so that a pair that was never
    seen is unlikely and not impossible.
    """
    size = len(data.vocabulary)
    seen = _pairs(data.train.tokens, size)
    pairs, counts = np.unique(seen, return_counts=True)
    firsts = np.bincount(seen // size, minlength=size)
    asked = _pairs(data.held_out.tokens[: len(data.held_out) * data.held_out.block + 1], size)
    at = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    together = np.where(pairs[at] == asked, counts[at], 0)
    likely = (together + SMOOTHING) / (firsts[asked // size] + SMOOTHING * size)
    return float(-np.log(likely).mean()) + 0.0  # not -0.0, of a text of one character


def _pairs(tokens: Tensor, size: int) -> NDArray[np.int64]:
    """Each character and the one after it, as one number."""
    numbers = tokens.numpy().astype(np.int64)
    return numbers[:-1] * size + numbers[1:]
