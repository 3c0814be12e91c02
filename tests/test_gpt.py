"""The GPT: its size, its start, what it may see, what decays, and that it learns to sort."""

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.engine.errors import UsageError
from course_lib.engine.tree import digest
from course_lib.workloads.gpt import (
    GPT,
    SHAPES,
    Shape,
    adamw,
    build_gpt,
    generate,
    next_loss,
    parameter_table,
)
from course_lib.workloads.precision import autocast
from course_lib.workloads.vision import schedule

TINY = Shape(layers=2, heads=2, width=16, block=8)
KINDS = 11


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(dropout: float = 0.0, seed: int = 0) -> GPT:
    return build_gpt(TINY, KINDS, seed, dropout)


def tokens(rows: int = 3, length: int = TINY.block) -> Tensor:
    return torch.randint(KINDS, (rows, length), generator=torch.Generator().manual_seed(2))


def test_the_table_says_what_the_original_is_made_of_and_what_ours_has() -> None:
    """Its 27.32 M are those of the blocks, which no vocabulary changes; there are 59 characters in its text's part."""
    table = {part: counts for part, *counts in parameter_table(SHAPES["seed"], 59)}
    assert table["all layers"] == [27_320_320, 25_219_072]
    assert table["all"] == [27_447_296, 25_346_048]
    assert table["second output projection"] == [8 * (512 * 512 + 512), 0]
    other = {part: counts for part, *counts in parameter_table(SHAPES["seed"], 103)}
    assert other["all layers"] == table["all layers"]


@pytest.mark.parametrize(("name", "count"), [("nano", 117_376), ("micro", 836_096), ("seed", 25_391_104)])
def test_a_preset_has_the_parameters_that_the_table_says(name: str, count: int) -> None:
    model = build_gpt(SHAPES[name], 103, seed=0)
    assert sum(p.numel() for p in model.parameters()) == count == parameter_table(SHAPES[name], 103)[-1][2]
    assert list(model.buffers()) == []  # a mask is nothing that a snapshot must hold


def test_a_width_that_the_heads_cannot_share_is_refused() -> None:
    with pytest.raises(UsageError, match="width of 16 cannot be shared among 3 heads"):
        build_gpt(Shape(1, 3, 16, 8), KINDS, 0)


def test_it_starts_knowing_nothing_and_every_parameter_gets_a_gradient() -> None:
    model, batch = tiny(), tokens()
    scores = model(batch)
    assert scores.shape == (3, TINY.block, KINDS)
    loss = next_loss(scores, batch.roll(-1, dims=1))
    assert float(loss.detach()) == pytest.approx(math.log(KINDS), abs=0.02)  # all characters are as likely
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("at", range(TINY.block))
def test_no_score_depends_on_a_later_character(at: int) -> None:
    model, batch = tiny(), tokens()
    changed = batch.clone()
    changed[:, at] = (changed[:, at] + 1) % KINDS
    with torch.no_grad():
        before, after = model(batch), model(changed)
        short = model(batch[:, : at + 1])
    assert torch.equal(before[:, :at], after[:, :at])
    assert all(not torch.equal(before[:, i], after[:, i]) for i in range(at, TINY.block))
    torch.testing.assert_close(short, before[:, : at + 1])


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(1)
    first = tiny(seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert digest(first.state_dict()) == digest(tiny(seed=5).state_dict())
    assert torch.equal(state, torch.get_rng_state())
    other = tiny(seed=6)
    for (name, a), b in zip(first.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) == (a.ndim == 1), name  # norms and biases start at 1 and 0


def test_only_matrices_decay() -> None:
    model = tiny()
    decaying, rest = adamw(model, lr=0.1, weight_decay=0.5).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    linear = ["attention.qkv", "attention.out", "mlp.into", "mlp.out"]
    matrices = {f"layers.{layer}.{part}.weight" for layer in range(TINY.layers) for part in linear} | {"head.weight"}
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    assert {names[id(p)] for p in decaying["params"]} == matrices
    assert {names[id(p)] for p in rest["params"]} == set(names.values()) - matrices
    assert len(decaying["params"]) + len(rest["params"]) == len(names)


def test_dropout_is_for_training_only() -> None:
    model, batch = tiny(dropout=0.5), tokens()
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))
    assert torch.equal(model(batch), tiny().eval()(batch))  # what is dropped is made up for
    attention = model.get_submodule("layers.0.attention")  # a function drops here, and no module
    x = torch.randn(2, TINY.block, TINY.width)
    assert torch.equal(attention(x), attention(x))
    attention.training = True
    assert not torch.equal(attention(x), attention(x))


def test_sampling_is_seeded_and_leaves_no_trace() -> None:
    model, start = tiny(dropout=0.3), tokens(2, 3)
    state = torch.get_rng_state()
    once = generate(model, start, 12, seed=4)
    assert once.shape == (2, 15) and torch.equal(once[:, :3], start)
    assert torch.equal(once, generate(model, start, 12, seed=4))
    assert not torch.equal(once, generate(model, start, 12, seed=5))
    assert torch.equal(state, torch.get_rng_state())
    assert all(part.training for part in model.modules())


def test_temperature_and_top_k_choose_among_the_likeliest() -> None:
    model, start = tiny(), tokens(1, 4)
    greedy = generate(model, start, 20, temperature=0)
    assert torch.equal(greedy, generate(model, start, 20, seed=9, top_k=1))
    assert torch.equal(greedy, generate(model, start, 20, seed=9, temperature=1e-6))
    with torch.no_grad():
        likeliest = model.eval()(start)[0, -1].topk(3).indices.tolist()
    drawn = {int(generate(model, start, 1, seed=seed, top_k=3)[0, -1]) for seed in range(60)}
    assert drawn == set(likeliest)
    assert len({int(generate(model, start, 1, seed=seed)[0, -1]) for seed in range(60)}) > 3


def test_shorter_floats_give_float32_scores() -> None:
    model, batch = tiny(), tokens()
    exact = model(batch)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    autocast(model, "bf16", "cpu")
    scores = model(batch)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, exact)
    torch.testing.assert_close(scores, exact, atol=0.02, rtol=0.02)
    assert {name: p.stride() for name, p in model.named_parameters()} == strides


# --- sorting: a task whose answers are right or wrong ------------------------------------------------------

DIGITS, LENGTH = 4, 6


def sorting_windows() -> tuple[Tensor, Tensor]:
    """All sequences of digits followed by the same digits in order, (N, 2 * LENGTH): to train on, and held out.

    Which are held out depends on how often each digit occurs, so that no answer to a held-out question was ever seen.
    """
    questions = torch.tensor(list(product(range(DIGITS), repeat=LENGTH)))
    whole = torch.cat([questions, questions.sort(dim=1).values], dim=1)
    content = (whole[:, LENGTH:] * DIGITS ** torch.arange(LENGTH)).sum(dim=1)
    kinds = content.unique()
    apart = kinds[torch.randperm(len(kinds), generator=torch.Generator().manual_seed(0))[: len(kinds) // 5]]
    held_out = torch.isin(content, apart)
    return whole[~held_out], whole[held_out]


def answer_loss(model: GPT, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the answer's digits alone: nobody can foresee those of the question."""
    scores = model(windows[:, :-1])[:, LENGTH - 1 :]
    return cross_entropy(scores.flatten(0, 1), windows[:, LENGTH:].flatten())


def test_it_learns_to_sort() -> None:
    train, held_out = sorting_windows()
    assert len(train) + len(held_out) == DIGITS**LENGTH and len(held_out) > 500
    model = build_gpt(Shape(layers=2, heads=4, width=32, block=2 * LENGTH - 1), DIGITS, seed=0)
    optimizer = adamw(model, lr=1e-2)
    steps = 600
    scheduler = schedule(optimizer, steps)
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = train[torch.randint(len(train), (64,), generator=draws)]
        optimizer.zero_grad()
        answer_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        assert float(answer_loss(model.eval(), held_out)) < 0.01
    answers = generate(model, held_out[:, :LENGTH], LENGTH, temperature=0)
    assert torch.equal(answers, held_out)
