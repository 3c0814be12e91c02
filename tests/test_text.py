"""Text as training reads it: the windows, the split, the vocabulary, the baseline, and texts that cannot be used."""

import math
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import launch

from course_lib.engine.errors import UsageError
from course_lib.workloads.text import Vocabulary, bigram_loss, load_text

BLOCK = 8
TEXT = "the quick brown fox jumps over the lazy dog; ünïcödé ≠ ascii 🙂\n" * 4


def written(path: Path, text: str = TEXT) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_an_epoch_asks_for_each_character_once_and_the_held_out_ones_are_apart(tmp_path: Path) -> None:
    data = load_text(written(tmp_path / "text"), BLOCK)
    decode = data.vocabulary.decode
    cut = len(TEXT) - len(TEXT) // 10
    parts = ((data.train, TEXT[:cut]), (data.held_out, TEXT[cut:]))
    for windows, part in parts:
        assert decode(windows.tokens) == part
        assert len(windows) == (len(part) - 1) // BLOCK > 1
        pairs = [windows[i] for i in range(len(windows))]
        assert all(x.shape == y.shape == (BLOCK,) and x.dtype == torch.int64 for x, y in pairs)
        assert all(torch.equal(x[1:], y[:-1]) for x, y in pairs)
        assert "".join(decode(x) for x, _ in pairs) == part[: len(windows) * BLOCK]
        assert "".join(decode(y) for _, y in pairs) == part[1 : len(windows) * BLOCK + 1]


def test_the_vocabulary_is_in_order_and_goes_both_ways(tmp_path: Path) -> None:
    vocabulary = load_text(written(tmp_path / "text"), BLOCK).vocabulary
    assert vocabulary.characters == "".join(sorted(set(TEXT)))
    assert vocabulary.decode(vocabulary.encode(TEXT)) == TEXT
    with pytest.raises(UsageError, match="'@'"):
        vocabulary.encode("fox@dog")


def test_four_processes_with_other_hashes_have_the_same_vocabulary_and_weights() -> None:
    """Case H7: a vocabulary from an unordered set has another order in each process."""
    program = (
        "from course_lib.engine.tree import digest\n"
        "from course_lib.workloads.gpt import SHAPES, build_gpt\n"
        "from course_lib.workloads.text import load_text\n"
        "text = load_text('pydoc', 64)\n"
        "model = build_gpt(SHAPES['nano'], len(text.vocabulary), 0)\n"
        "whole = {'characters': text.vocabulary.characters, 'tokens': text.train.tokens}\n"
        "print(digest(whole), digest(model.state_dict()), text.identity)\n"
    )
    done = [launch([sys.executable, "-c", program], 60, {"PYTHONHASHSEED": str(seed)}) for seed in range(4)]
    assert all(d.returncode == 0 for d in done), done[0].tail()
    assert len({d.output for d in done}) == 1


def test_an_identity_belongs_to_one_text_wherever_it_lies(tmp_path: Path) -> None:
    here = load_text(written(tmp_path / "here"), BLOCK)
    assert load_text(written(tmp_path / "there"), BLOCK).identity == here.identity
    others = [TEXT + "!", TEXT.replace("fox", "fux"), TEXT[::-1], load_text("pydoc", BLOCK)]
    identities = {load_text(written(tmp_path / "other", o), BLOCK).identity for o in others if isinstance(o, str)}
    assert len(identities | {here.identity, load_text("pydoc", BLOCK).identity}) == 5


def test_another_vocabulary_in_a_snapshot_is_refused() -> None:
    vocabulary = Vocabulary("abc")
    vocabulary.load_state_dict(Vocabulary("abc").state_dict())
    with pytest.raises(UsageError, match="has 4 characters, this text's 3; only one has 'd'"):
        vocabulary.load_state_dict(Vocabulary("abcd").state_dict())
    with pytest.raises(UsageError, match="vocabulary"):
        vocabulary.load_state_dict(Vocabulary("bac").state_dict())


@pytest.mark.parametrize("extra", [-1, 0])
def test_a_text_must_have_a_block_to_train_on_and_one_to_hold_out(tmp_path: Path, extra: int) -> None:
    source = written(tmp_path / "text", "ab" * BLOCK + "abc"[: 2 + extra])
    if extra < 0:
        with pytest.raises(UsageError, match=f"^--text {source}: 17 characters are too few; a block of 8 needs 18"):
            load_text(source, BLOCK)
    else:
        data = load_text(source, BLOCK)
        assert (len(data.train), len(data.held_out)) == (1, 1)


def test_texts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("Zürich ".encode("latin-1") * 20)
    written(tmp_path / "empty", "")
    for name, words in {
        "missing": "No such file",
        ".": "Is a directory",
        "empty": "0 characters are too few",
        "latin": r"not UTF-8 \(byte 1\)",
    }.items():
        with pytest.raises(UsageError, match=f"^--text {tmp_path / name}.*{words}") as caught:
            load_text(str(tmp_path / name), BLOCK)
        assert "\n" not in str(caught.value)


def test_a_python_without_its_reference_is_named() -> None:
    with patch.dict(sys.modules, {"pydoc_data": None, "pydoc_data.topics": None}), pytest.raises(UsageError) as caught:
        load_text("pydoc", BLOCK)
    assert "--text pydoc" in str(caught.value) and "give the path of a text file" in str(caught.value)


def test_the_baseline_is_the_table_of_pairs(tmp_path: Path) -> None:
    """Against the definition, pair by pair, with a pair that training has not seen."""
    text = "abbabaabab" * 6 + "aacbbacba"
    data = load_text(written(tmp_path / "text", text), BLOCK)
    train, asked = text[:60], text[60:]
    losses = []
    for first, second in zip(asked[:-1], asked[1:], strict=True):
        together = sum(train[i : i + 2] == first + second for i in range(len(train) - 1))
        losses.append(-math.log((together + 0.1) / (train[:-1].count(first) + 0.3)))
    assert bigram_loss(data) == pytest.approx(sum(losses) / len(losses), abs=1e-12)
    assert bigram_loss(load_text(written(tmp_path / "even", "ab" * 400), BLOCK)) < 0.01
