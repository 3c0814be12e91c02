"""Images in memory: the data set that training reads, and what describes it.

Pixels stay bytes until they are fetched: a quarter of the memory of float32, and forked loader workers share
them. Whatever fills the tensors (a file format, a decoder, a memory-mapped file) is no concern of this file.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Pixels:
    """Decoded images: ``images`` (N, C, H, W) uint8 and ``labels`` (N,) int64."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Augment:
    """How a training image is varied: shifted by up to ``shift`` pixels each way and perhaps mirrored."""

    shift: int
    flip: bool


@dataclass(frozen=True)
class ImageData:
    """A data set ready for training.

    ``train`` and ``test`` give ``(image, label)`` with the image (C, H, W), floating and normalised per
    channel; ``shape`` is (C, H, W). ``identity`` is a short text that is the same wherever the same data are
    loaded and differs when they differ, so that a snapshot is not resumed on other data.
    """

    train: Dataset[tuple[Tensor, int]]
    test: Dataset[tuple[Tensor, int]]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    identity: str


class ImageSet(Dataset[tuple[Tensor, int]]):
    """A map-style data set over pixels, normalised with the given mean and deviation, (C,) each, in 0..255.

    With ``augment``, a sample depends on its index and on torch's global random state, and on nothing else:
    whoever reseeds that state before a fetch gets the same sample in any process, at any world size.
    """

    def __init__(
        self, pixels: Pixels, mean: Tensor, std: Tensor, dtype: torch.dtype, augment: Augment | None = None
    ) -> None:
        self.pixels = pixels
        self.mean = mean.to(dtype).reshape(-1, 1, 1)
        self.std = std.to(dtype).reshape(-1, 1, 1)
        self.augment = augment
        self.draws = augment is not None  # the engine need not seed each fetch

    def __len__(self) -> int:
        return len(self.pixels.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.pixels.images[index]
        if self.augment is not None:
            image = vary(image, self.augment)
        return (image.to(self.mean.dtype) - self.mean) / self.std, int(self.pixels.labels[index])


def vary(image: Tensor, augment: Augment) -> Tensor:
    """Shift, and perhaps mirror, one image (C, H, W); what is shifted in from outside is black."""
    height, width = image.shape[-2:]
    canvas = functional.pad(image, [augment.shift] * 4)
    top, left = torch.randint(0, 2 * augment.shift + 1, (2,)).tolist()
    image = canvas[:, top : top + height, left : left + width]
    if augment.flip and torch.randint(0, 2, (1,)).item():
        image = image.flip(-1)
    return image


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of uint8 images (N, C, H, W): (C,) float64 each, in 0..255.

    Counting the 256 values first makes both exact: the same bits whatever the number of threads, and no
    float copy of the data set. A channel that never varies gets deviation 1, since it will be divided by.
    """
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [torch.bincount(images[:, c].reshape(-1), minlength=256) for c in range(images.shape[1])]
    ).double()
    share = counts / counts.sum(dim=1, keepdim=True)
    mean = share @ values
    std = (share * (values - mean[:, None]) ** 2).sum(dim=1).sqrt()
    return mean, torch.where(std > 0, std, torch.ones_like(std))


def fingerprint(*parts: Pixels) -> str:
    """A digest (hex) of the shapes and bytes of decoded data."""
    digest = hashlib.sha256()
    for part in parts:
        for tensor in (part.images, part.labels):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.reshape(-1).numpy().data)
    return digest.hexdigest()


def image_data(
    name: str,
    train: Pixels,
    test: Pixels,
    classes: tuple[str, ...],
    dtype: torch.dtype,
    augment: Augment | None,
    digest: str,
) -> ImageData:
    """Put a data set together; both splits are normalised with the statistics of the training split."""
    mean, std = channel_statistics(train.images)
    channels, height, width = train.images.shape[1:]
    return ImageData(
        train=ImageSet(train, mean, std, dtype, augment),
        test=ImageSet(test, mean, std, dtype),
        classes=classes,
        shape=(channels, height, width),
        identity=f"{name}-{len(train.images)}-{len(test.images)}-{digest[:16]}",
    )
