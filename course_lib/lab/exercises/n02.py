"""Exercises of notebook 02, and the evidence of its last one."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from course_lib.lab.checks import Case, Exercise, match, predict, write
from course_lib.workloads import lanes
from course_lib.workloads.vision import build_model

Apply = Callable[[list[nn.Module], list[Tensor], nn.Module], list[Tensor]]


def _floor(batch: Tensor, parts: int) -> list[Tensor]:
    size = max(1, len(batch) // parts)
    return [batch[low : low + size] for low in range(0, len(batch), size)]


scatter = write(
    Case(lambda: (torch.arange(8), 2)),
    Case(lambda: (torch.arange(10), 4), hint="every part but the last has the same size, rounded up"),
    Case(lambda: (torch.arange(5), 4), hint="parts of 2 use up five samples before the fourth lane's turn"),
    Case(lambda: (torch.arange(6).reshape(3, 2), 4), hint="split along dimension 0; no part is empty"),
    solution=lanes.scatter,
    wrong=[lambda batch, parts: list(batch.tensor_split(parts)), _floor],
    why="this is how DataParallel deals out a batch, ragged end included",
)

idle = predict(
    3,
    wrong=[0, 7, 1],
    hints={
        0: "nine samples seem enough for eight GPUs; now let your scatter deal them out",
        7: "one GPU has one sample too many, you say; but the parts have one common size",
        5: "that many have work",
    },
    hint="run your scatter on torch.arange(9) for 8 lanes, and count the parts",
    why="parts of two make five parts, and three GPUs stand idle in every step",
)

gathered = predict(
    32 * 1024 * 50257 * 4 / 1e9,
    wrong=[32 * 1024 * 50257 * 4 / 1e9 / 4, 32 * 50257 * 4 / 1e9, 32 * 1024 * 50257 / 1e9],
    hints={
        32 * 1024 * 50257 * 4 / 1e9 / 4: "that is one GPU's own part; gather puts all four parts onto GPU 0",
        32 * 50257 * 4 / 1e9: "a language model has scores for every token of a sequence",
        32 * 1024 * 50257 / 1e9: "that many numbers; a float32 has four bytes",
    },
    hint="sequences x tokens x vocabulary x bytes of a number",
    close=0.02,
    why="on one GPU of four, and their gradient takes the same again",
)


# --- parallel_apply -----------------------------------------------------------------------------------------------


class _Meeting(nn.Module):
    """A layer whose replicas wait for each other, which only works when they run at the same time."""

    def __init__(self, barrier: threading.Barrier | None) -> None:
        super().__init__()
        self.weight, self.barrier = nn.Parameter(torch.tensor([2.0])), barrier

    def forward(self, part: Tensor) -> Tensor:
        if self.barrier is not None:
            self.barrier.wait()
        return part * self.weight


def _judge_apply(apply: Apply) -> str | None:
    module, parts = _Meeting(None), [torch.ones(2), 5 * torch.ones(1)]
    outputs = apply([module, _Meeting(None)], parts, module)
    if not isinstance(outputs, list) or [len(output) for output in outputs] != [2, 1]:
        return "give a list of outputs, one for each part and in the order of the parts"
    if not torch.equal(torch.cat(outputs), torch.tensor([2.0, 2.0, 10.0])):
        return "an output is not what the module gives for its part: are replica and part paired?"
    torch.cat(outputs).sum().backward()  # type: ignore[no-untyped-call]
    if module.weight.grad is None or module.weight.grad.item() != 7:
        return "the gradients of the second lane did not reach the module: whose weights did its replica use?"
    with torch.no_grad():
        if any(output.requires_grad for output in apply([module, _Meeting(None)], parts, module)):
            return "under torch.no_grad() your outputs still carry a graph: what does a new thread begin with?"
    barrier = threading.Barrier(2, timeout=5.0)
    try:
        apply([_Meeting(barrier), _Meeting(barrier)], parts, module)
    except threading.BrokenBarrierError:
        return "two replicas that wait for each other never meet: yours run one after the other"
    return None


def _one_by_one(replicas: list[nn.Module], parts: list[Tensor], module: nn.Module) -> list[Tensor]:
    weights: dict[str, Tensor] = dict(module.named_parameters())
    return [functional_call(replica, weights, (part,)) for replica, part in zip(replicas, parts, strict=True)]


def _own_weights(replicas: list[nn.Module], parts: list[Tensor], module: nn.Module) -> list[Tensor]:
    return [replica(part) for replica, part in zip(replicas, parts, strict=True)]


def _forgets_the_mode(replicas: list[nn.Module], parts: list[Tensor], module: nn.Module) -> list[Tensor]:
    with torch.enable_grad():
        return lanes.parallel_apply(replicas, parts, module)


parallel_apply = Exercise(
    "write",
    _judge_apply,
    lanes.parallel_apply,
    [_one_by_one, _own_weights, _forgets_the_mode, lambda replicas, parts, module: module(torch.cat(parts))],
    why="in threads, in order, on one set of weights, and with gradients off when they are off",
)


# --- four home-made DataParallels ----------------------------------------------------------------------------------

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
SIZES = (64, 63, 32)


def _plain(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(module(images), labels)


def _gathered_loss(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    parts = lanes.scatter(images, 2)
    outputs = lanes.parallel_apply(lanes.replicate(module, 2), parts, module)
    return cross_entropy(lanes.gather(outputs), labels)


def _mean_of_means(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    parts = lanes.scatter(images, 2)
    outputs = lanes.parallel_apply(lanes.replicate(module, 2), parts, module)
    losses = [cross_entropy(scores, part) for scores, part in zip(outputs, lanes.scatter(labels, 2), strict=True)]
    return torch.stack(losses).mean()


def _loses_copies(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    outputs = _own_weights(lanes.replicate(module, 2), lanes.scatter(images, 2), module)
    return cross_entropy(lanes.gather(outputs), labels)


def gradient(loss: Loss, norm: str, images: Tensor, labels: Tensor) -> Tensor:
    """All gradients of the tiny network for this loss, in one float64 vector."""
    module = build_model("tiny", norm, 1, 10, seed=0, dtype=torch.float64)
    loss(module, images, labels).backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def suspects(images: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Three relative distances for each of four home-made DataParallels, over two lanes and in float64.

    The first two are to the plain module's gradient, for 64 and for 63 samples. The third is to what lane 0's half of
    the 64 samples gives alone.
    """
    cases: dict[str, tuple[Loss, str]] = {
        "1": (_gathered_loss, "batch"),
        "2": (_mean_of_means, "group"),
        "3": (_gathered_loss, "group"),
        "4": (_loses_copies, "group"),
    }
    plain = {(norm, n): gradient(_plain, norm, images[:n], labels[:n]) for norm in ("batch", "group") for n in SIZES}
    found = {}
    for name, (loss, norm) in cases.items():
        ours = {n: gradient(loss, norm, images[:n], labels[:n]) for n in SIZES[:2]}
        right = {n: plain[norm, n] for n in SIZES[:2]}
        alone = plain[norm, 32] / 2  # the loss is a mean over 64
        found[name] = [float((ours[n] - right[n]).norm() / right[n].norm()) for n in SIZES[:2]]
        found[name].append(float((ours[64] - alone).norm() / ours[64].norm()))
    return found


culprits = match(
    {"1": "batch norm", "2": "mean of means", "3": "nothing wrong", "4": "lost copies"},
    wrong=[
        {"1": "lost copies", "2": "mean of means", "3": "nothing wrong", "4": "batch norm"},
        {"1": "batch norm", "2": "nothing wrong", "3": "mean of means", "4": "lost copies"},
    ],
    hint="what does an odd batch change, and whose gradient is left when a copy keeps its own?",
    why="an even batch hides the mean of means, so test with an odd one",
)
