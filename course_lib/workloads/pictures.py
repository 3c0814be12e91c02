"""The pictures of a tree as pixels: decoded once, kept in a file beside them, and mapped by all who train on them."""

import hashlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib.engine.errors import UsageError
from course_lib.workloads.cache import cache_files, note_use, open_cache, write_cache
from course_lib.workloads.folders import Listing, list_folder
from course_lib.workloads.images import Pixels
from course_lib.workloads.once import sole_holder
from course_lib.workloads.optional import reason, require

SIZE = 32
CURE = "pip install pillow, or use --data digits"


def prepare_pictures(listing: Listing, size: int = SIZE) -> None:
    """Decode the pictures into a file, in one process per file system, unless that was done.

    The file is made beside the pictures (``ROOT/.image_folder.pixels``) or else in the user's cache. Where neither
    takes it, one line says so, and ``load_pictures`` decodes into memory. Errors: ``UsageError`` naming a picture
    that cannot be read.
    """
    places = cache_files(listing.root, key := _key(listing, size))
    kept = next((path for path in places if open_cache(path, key, _count(listing, size)) is not None), None)
    failures = []
    for path in places if kept is None else ():
        try:
            _make_once(path, key, listing, size)
            kept = path
            break
        except OSError as error:
            failures.append(f"{path.parent}: {reason(error)}")
    if kept is not None:
        note_use(kept)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        _say(f"{listing.root}: decoding at every start, for the pixels cannot be kept ({'; '.join(failures)})")


def load_pictures(listing: Listing, size: int = SIZE) -> tuple[Pixels, Pixels, str]:
    """The pixels of a tree: training split, test split, (N, 3, size, size) each, and a digest (hex) of it.

    The digest covers the files' names and bytes and not the decoded pixels, which another version of the
    decoder may round differently. Errors: ``UsageError`` naming a picture that cannot be read.
    """
    key, count = _key(listing, size), _count(listing, size)
    found = (open_cache(path, key, count) for path in cache_files(listing.root, key))
    pixels, digest = next(filter(None, found), None) or _decode_all(listing, size)
    images = pixels.reshape(-1, 3, size, size)
    cut = len(listing.train)
    labels = (torch.tensor([label for _, label in part], dtype=torch.int64) for part in (listing.train, listing.test))
    train, test = map(Pixels, (images[:cut], images[cut:]), labels)
    return train, test, digest


def _key(listing: Listing, size: int) -> str:
    """What the pixels are made from: the pictures as they are now, and what decodes them."""
    text = f"{listing.stamp()} {size} pillow {require('PIL', '--data image_folder', CURE).__version__}"
    return hashlib.sha256(text.encode()).hexdigest()


def _count(listing: Listing, size: int) -> int:
    """The bytes of all pixels."""
    return (len(listing.train) + len(listing.test)) * 3 * size * size


def _make_once(path: Path, key: str, listing: Listing, size: int) -> None:
    """Let one process make the file while the others wait. Errors: ``OSError`` when it cannot be made here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with sole_holder(path.with_suffix(".lock"), f"decode the pictures in {listing.root}"):
        if open_cache(path, key, _count(listing, size)) is not None:
            return  # whoever held the lock has made it
        digest = _digest(size)
        write_cache(path, key, _count(listing, size), _unchanged(listing, _decode(listing, size, digest)), digest)
        _say(f"decoded {len(listing.train) + len(listing.test)} pictures into {path}")


def _unchanged(listing: Listing, pictures: Iterator[Tensor]) -> Iterator[Tensor]:
    """The same, and ``OSError`` at the end when these are no longer the pictures that were listed."""
    yield from pictures
    if list_folder(listing.root) != listing:
        raise OSError("the pictures changed while they were read")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _decode_all(listing: Listing, size: int) -> tuple[Tensor, str]:
    """The same pixels and digest as those of the file, in memory."""
    digest = _digest(size)
    images = torch.empty((len(listing.train) + len(listing.test), 3, size, size), dtype=torch.uint8)
    for image, pixels in zip(images, _decode(listing, size, digest), strict=True):
        image.copy_(pixels)
    return images, digest.hexdigest()


def _digest(size: int) -> Any:
    return hashlib.sha256(str(size).encode())


def _decode(listing: Listing, size: int, digest: Any) -> Iterator[Tensor]:
    """The pictures one by one, (3, size, size), in the order of the listing; names and bytes go into the digest.

    In one thread: for small pictures two were no faster, since what surrounds the decoding is Python.
    """
    pillow, ops = (require(f"PIL.{part}", "--data image_folder", CURE) for part in ("Image", "ImageOps"))
    for file, _ in (*listing.train, *listing.test):
        path = listing.root / file.name
        try:
            data = path.read_bytes()
            with pillow.open(io.BytesIO(data)) as picture:
                pixels = _fit(ops, picture, size)
        except Exception as error:  # on damaged bytes decoders raise what they like, down to struct.error
            raise UsageError(f"{path} cannot be read as an image ({reason(error)}): replace or remove it") from error
        digest.update(f"{file.name}\0{len(data)}\0".encode(errors="surrogateescape"))
        digest.update(data)
        yield pixels


def _fit(ops: Any, picture: Any, size: int) -> Tensor:
    """The middle square of a picture as the camera held it, (3, size, size) bytes."""
    upright = ops.exif_transpose(picture).convert("RGB")
    square = upright if upright.size == (size, size) else ops.fit(upright, (size, size))
    return torch.from_numpy(np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1)))
