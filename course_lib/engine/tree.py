"""Nested containers of tensors: moved, digested, and made fit for the safe loader."""

import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of dicts, lists and tuples with `change` applied to each tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Counter):
        return Counter(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


class HostCopy:
    """Copies nests of tensors into host memory of its own, which the next copy of the same shape uses again.

    The memory is pinned for tensors on a GPU. A tensor that occurs twice is copied once, so what was shared stays so.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def __call__(self, tree: Any) -> Any:
        spare, used = iter(self._buffers), []
        seen: dict[tuple[Any, ...], torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() == 0 or key not in seen:
                buffer = next(spare, None)
                if buffer is None or (buffer.dtype, buffer.shape) != (tensor.dtype, tensor.shape):
                    buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
                seen[key] = buffer.copy_(tensor.detach(), non_blocking=True)
                used.append(buffer)
            return seen[key]

        copied = map_tensors(tree, copy)
        self._buffers = used
        if any(device.type == "cuda" for device, *_ in seen):
            torch.cuda.synchronize()
        return copied


def leaves(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """The (name, value) pairs at the ends of the nest, sorted by name, names joined by dots."""
    if isinstance(tree, Mapping):
        pairs: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    else:
        return [(name, tree)]
    found = [leaf for key, value in pairs for leaf in leaves(value, f"{name}.{key}" if name else str(key))]
    return sorted(found, key=lambda leaf: leaf[0])


def digest(tree: Any) -> str:
    """SHA-256 in hex over the sorted name, dtype, shape and bytes of each leaf; other leaves count by `repr`."""
    hasher = hashlib.sha256()
    for name, value in leaves(tree):
        if isinstance(value, torch.Tensor):
            hasher.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            # A view as bytes, since numpy has no bfloat16.
            hasher.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        else:
            hasher.update(f"{name} {value!r}\n".encode())
    return hasher.hexdigest()


def all_finite(tree: Any) -> bool:
    """Whether no floating-point tensor in the nest holds a NaN or an infinity."""
    tensors = [value for _, value in leaves(tree) if isinstance(value, torch.Tensor)]
    numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    # A finite sum proves it in a tenth of the time; one that isn't may have overflowed.
    return all(bool(t.sum().isfinite()) or bool(t.isfinite().all()) for t in numbers)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def portable(tree: Any, name: str) -> Any:
    """What `torch.load(weights_only=True)` opens again: converted where nothing is lost, refused otherwise.

    numpy scalars become Python numbers, numpy arrays tensors, paths strings, data classes and mappings dicts. Equal
    states become files of equal bytes, whether they were computed or loaded.
    Raises TypeError at the time of the save, naming the key, for anything that the safe loader would refuse.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach()
    # A long double is the one numpy scalar that has no Python number to become.
    if isinstance(tree, np.generic) and not isinstance(tree.item(), np.generic):
        return portable(tree.item(), name)
    if isinstance(tree, np.ndarray):
        with contextlib.suppress(TypeError):  # text, dates and objects, which no tensor holds
            return torch.from_numpy(tree.astype(tree.dtype.newbyteorder("="), order="C"))
    if isinstance(tree, PurePath):
        return str(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return portable({field.name: getattr(tree, field.name) for field in fields(tree)}, name)
    if isinstance(tree, Mapping):
        plain = {portable(key, name): portable(value, f"{name}.{key}") for key, value in tree.items()}
        return Counter(plain) if isinstance(tree, Counter) else plain  # MultiStepLR keeps its milestones in one
    if isinstance(tree, (list, tuple)):
        parts = [portable(value, f"{name}.{i}") for i, value in enumerate(tree)]
        return tuple(parts) if isinstance(tree, tuple) else parts
    if type(tree) is str:
        return sys.intern(tree)  # pickle writes one object's text once, and whether equal ones are one is chance
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, (set, frozenset)):
        return {portable(value, name) for value in tree}
    raise TypeError(
        f"{name} is a {type(tree).__module__}.{type(tree).__qualname__}, which a snapshot cannot hold safely: "
        "keep it as numbers, strings, tensors, lists or dicts"
    )
