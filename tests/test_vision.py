"""The networks: their size, their start, their gradients, and what the small one learns."""

import math
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import Completed
from torch import Tensor, nn
from torch.nn import functional

from course_lib.engine.errors import UsageError
from course_lib.workloads.data import DataSpec, load
from course_lib.workloads.images import ImageSet
from course_lib.workloads.vision import (
    DEFAULT_BATCH,
    DEFAULT_LR,
    MODELS,
    MOMENTUM,
    NORMS,
    WEIGHT_DECAY,
    build_model,
    schedule,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def images(channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, channels, 32, 32, generator=torch.Generator().manual_seed(3), dtype=dtype)


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("norm", NORMS)
def test_tiny_is_tiny(norm: str) -> None:
    for channels in (1, 3):
        count = sum(p.numel() for p in build_model("tiny", norm, channels, 10, 0).parameters())
        assert 150_000 <= count <= 250_000


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name: str, norm: str) -> None:
    for channels, classes in ((1, 10), (3, 7)):
        model = build_model(name, norm, channels, classes, seed=1)
        scores = model(images(channels))
        assert scores.shape == (4, classes)
        functional.cross_entropy(scores, torch.arange(4)).backward()  # type: ignore[no-untyped-call]
        for label, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), label
            assert parameter.grad.any(), label


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_weights(name: str, norm: str) -> None:
    torch.manual_seed(1)
    first = build_model(name, norm, 3, 10, seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = build_model(name, norm, 3, 10, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    assert same(first, again)
    other = build_model(name, norm, 3, 10, seed=6)
    for (label, a), b in zip(first.named_parameters(), other.parameters(), strict=True):
        if a.ndim > 1:  # those of a norm start at 0 and 1 whatever the seed
            assert not torch.equal(a, b), label


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_the_norm_is_the_one_asked_for(name: str, norm: str) -> None:
    model = build_model(name, norm, 3, 10, 0)
    kinds = {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)}
    assert kinds == {nn.BatchNorm2d if norm == "batch" else nn.GroupNorm}
    assert bool(list(model.buffers())) == (norm == "batch")


@pytest.mark.parametrize("name", MODELS)
def test_group_norm_sees_each_image_alone(name: str) -> None:
    model = build_model(name, "group", 3, 10, 0, torch.float64)
    batch = images(3, torch.float64)
    torch.testing.assert_close(model(batch)[1:2], model(batch[1:2]))


@pytest.mark.parametrize("name", MODELS)
def test_float64_starts_from_the_same_numbers(name: str) -> None:
    single = build_model(name, "group", 3, 10, 4)
    double = build_model(name, "group", 3, 10, 4, torch.float64)
    assert same(single.double(), double)
    assert double(images(3, torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_resnet_keeps_small_images_large_enough(name: str) -> None:
    model = build_model(name, "batch", 3, 10, 0)
    sides: dict[str, int] = {}
    for stage in ("conv1", "layer1", "layer4"):
        module = model.get_submodule(stage)
        module.register_forward_hook(lambda _, __, out, stage=stage: sides.__setitem__(stage, out.shape[-1]))
    model(images(3))
    assert sides == {"conv1": 16, "layer1": 16, "layer4": 2}


def test_tiny_needs_no_torchvision(launch: Callable[..., Completed], monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from course_lib.workloads.vision import *\n"
        "build_model('tiny', 'batch', 1, 10, 0); assert 'torchvision' not in sys.modules"
    )
    done = launch([sys.executable, "-c", code])
    assert done.returncode == 0, done.output
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UsageError, match="--model resnet18 needs torchvision.*--model tiny"):
        build_model("resnet18", "batch", 3, 10, 0)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match="--model vgg.*tiny, resnet18, resnet34"):
        build_model("vgg", "batch", 1, 10, 0)
    with pytest.raises(UsageError, match="--norm layer.*batch, group"):
        build_model("tiny", "layer", 1, 10, 0)


def rates(total: int, warmup: int, stop: int | None = None) -> list[float]:
    """The learning rate of each step; with ``stop``, of a run that was cut there and taken up again."""

    def fresh() -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        return optimizer, schedule(optimizer, total, warmup)

    optimizer, scheduler = fresh()
    seen = []
    for step in range(total):
        if step == stop:
            saved = optimizer.state_dict(), scheduler.state_dict()
            optimizer, scheduler = fresh()
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return seen


def test_schedule_rises_then_falls() -> None:
    seen = rates(total=100, warmup=20)
    assert seen[20] == max(seen) == 2.0
    assert seen[:21] == sorted(seen[:21]) and seen[20:] == sorted(seen[20:], reverse=True)
    assert 0 < seen[-1] < 0.01 and 0 < seen[0] <= 0.1
    assert seen[60] == pytest.approx(1.0)  # half way down


@pytest.mark.parametrize("total", [1, 2, 3, 5])
def test_schedule_of_a_very_short_run(total: int) -> None:
    seen = rates(total, warmup=40)
    assert len(seen) == total and all(0 < rate <= 2 for rate in seen) and max(seen) == 2.0


@pytest.mark.parametrize("stop", [1, 19, 20, 21, 99])
def test_schedule_resumes(stop: int) -> None:
    assert rates(100, 20, stop) == rates(100, 20)


@pytest.mark.parametrize("norm", NORMS)
def test_tiny_learns_the_digits(norm: str) -> None:
    data = load(DataSpec("digits", None))
    train, test = data.train, data.test
    assert isinstance(train, ImageSet) and isinstance(test, ImageSet)
    pixels, held_out = (torch.stack([part[i][0] for i in range(len(part))]) for part in (train, test))
    labels = train.pixels.labels
    model = build_model("tiny", norm, 1, 10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), DEFAULT_LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    epochs = 8
    scheduler = schedule(optimizer, epochs * math.ceil(len(train) / DEFAULT_BATCH))
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(train), generator=order).split(DEFAULT_BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(pixels[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
    model.eval()
    with torch.no_grad():
        right = model(held_out).argmax(dim=1) == test.pixels.labels
    assert float(right.float().mean()) >= 0.95
