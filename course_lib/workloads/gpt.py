"""A GPT: characters in, scores for the character that follows each of them out.

It has GPT-2's form (A. Radford et al., Language Models are Unsupervised Multitask Learners, 2019): learned positions,
norms before the layers, an MLP four times as wide as the rest, biases. Attention is torch's own
`scaled_dot_product_attention`, which picks the fastest kernel that there is for the device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from course_lib.engine.errors import UsageError

# GPT-2's, as minGPT-ddp has them.
INIT_STD = 0.02
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0


@dataclass(frozen=True)
class Shape:
    """The size of a GPT; `block` is the most characters that it sees at once."""

    layers: int
    heads: int
    width: int
    block: int


# `seed` is what minGPT-ddp trains (gpt2_train_cfg.yaml in pytorch/examples, distributed/minGPT-ddp, 2023).
SHAPES = {
    "nano": Shape(layers=2, heads=4, width=64, block=64),
    "micro": Shape(layers=4, heads=4, width=128, block=128),
    "seed": Shape(layers=8, heads=8, width=512, block=128),
}


def build_gpt(shape: Shape, vocabulary: int, seed: int, dropout: float = 0.0) -> "GPT":
    """A GPT for so many different characters, from tokens (N, T) to scores (N, T, vocabulary).

    The weights are a function of the arguments alone; the caller's random state stays as it was.
    """
    # Only the CPU's generator is touched: torch.manual_seed would reseed every GPU's as well.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return GPT(shape, vocabulary, dropout)


class GPT(nn.Module):
    """The whole model; its head has weights of its own, not those of the embedding."""

    def __init__(self, shape: Shape, vocabulary: int, dropout: float) -> None:
        super().__init__()
        if shape.width % shape.heads:
            raise UsageError(f"a width of {shape.width} cannot be shared among {shape.heads} heads")
        self.block = shape.block
        self.characters = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.block, shape.width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(Layer(shape, dropout) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Each layer adds twice to the residual stream; smaller sums keep its size the same whatever the depth.
        for layer in self.layers.children():
            for last in (layer.get_submodule("attention.out"), layer.get_submodule("mlp.out")):
                assert isinstance(last, nn.Linear)
                nn.init.normal_(last.weight, std=INIT_STD / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (N, T, vocabulary) for the character after each of `tokens` (N, T), T at most `block`."""
        here = self.positions.weight[: tokens.shape[1]]
        stream = self.layers(self.dropout(self.characters(tokens) + here))
        scores: Tensor = self.head(self.norm(stream))
        return scores


class Layer(nn.Module):
    """Attention and an MLP, each beside a residual connection and behind a norm."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape.width, shape.heads, dropout)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape.width, dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.norm1(stream))
        result: Tensor = stream + self.mlp(self.norm2(stream))
        return result


class Attention(nn.Module):
    """Each position looks at itself and at those before it, in several heads at once."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        # (N, T, 3W) -> three of (N, heads, T, W / heads)
        query, key, value = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropped = self.dropout.p if self.training else 0.0  # a function knows nothing of eval()
        seen = scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        together: Tensor = self.dropout(self.out(seen.transpose(1, 2).reshape(n, t, width)))
        return together


class Mlp(nn.Module):
    """What each position does with what it has seen."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.out(gelu(self.into(x))))
        return result


def next_loss(scores: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy in nats, of scores (N, T, vocabulary) for the characters (N, T) that follow."""
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def adamw(model: nn.Module, lr: float, weight_decay: float = WEIGHT_DECAY) -> torch.optim.AdamW:
    """AdamW whose weight decay pulls at the matrices only.

    A smaller bias, or a norm's scale nearer to 0, is no simpler model; and the embedding of a rare character would
    fade, as it hardly ever gets a gradient that pulls it back.
    """
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    decays = {id(weight) for weight in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in decays]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)


@torch.no_grad()
def generate(
    model: GPT, tokens: Tensor, count: int, *, seed: int = 0, temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    """`tokens` (N, T) and `count` more, (N, T + count), each drawn from what the model expects after those before.

    Temperature 0 takes the likeliest each time; `top_k` draws among the k likeliest. The draws come from `seed` and
    from a CPU's generator, whatever the device; the global random state stays as it was, and so does the mode.
    """
    generator = torch.Generator().manual_seed(seed)
    training = model.training
    model.eval()
    try:
        for _ in range(count):
            # Not model(…): if it is compiled, each length would be compiled anew.
            scores = model.forward(tokens[:, -model.block :])[:, -1].double().cpu()
            following = _draw(scores, generator, temperature, top_k)
            tokens = torch.cat([tokens, following.to(tokens.device)], dim=1)
    finally:
        model.train(training)
    return tokens


def _draw(scores: Tensor, generator: torch.Generator, temperature: float, top_k: int | None) -> Tensor:
    """One token (N, 1) for each row of scores (N, vocabulary)."""
    if temperature == 0:
        return scores.argmax(dim=1, keepdim=True)
    likeliest, tokens = scores.topk(scores.shape[1] if top_k is None else min(top_k, scores.shape[1]))
    drawn = torch.multinomial((likeliest / temperature).softmax(dim=1), 1, generator=generator)
    return tokens.gather(1, drawn)


def parameter_table(shape: Shape, vocabulary: int) -> list[tuple[str, int, int]]:
    """What a GPT of this shape is made of: (part, parameters in minGPT-ddp, parameters here).

    The "27.32M" that minGPT-ddp prints are those of its blocks alone, whatever the vocabulary: the embeddings, the
    last norm and the head are not counted. Each of its blocks has one matrix more than a GPT-2 layer:
    `nn.MultiheadAttention` brings an output projection with it, and the class around it adds another behind that,
    with nothing in between that two matrices in a row could not do as one.
    Source: mingpt/model.py in pytorch/examples, distributed/minGPT-ddp, commit 77f55b9, 2025.
    """
    layers, width = shape.layers, shape.width

    def linear(inputs: int, outputs: int) -> int:
        return layers * (inputs * outputs + outputs)

    inside = [
        ("two norms a layer", layers * 4 * width),
        ("queries, keys, values", linear(width, 3 * width)),
        ("output projection", linear(width, width)),
        ("MLP", linear(width, 4 * width) + linear(4 * width, width)),
    ]
    outside = [
        ("embedding of characters", vocabulary * width),
        ("embedding of positions", shape.block * width),
        ("last norm", 2 * width),
        ("head", vocabulary * width),
    ]
    second = linear(width, width)
    layers_here, rest = (sum(count for _, count in rows) for rows in (inside, outside))
    return [
        *((part, count, count) for part, count in inside),
        ("second output projection", second, 0),
        ("all layers", layers_here + second, layers_here),
        *((part, count, count) for part, count in outside),
        ("all", layers_here + second + rest, layers_here + rest),
    ]
