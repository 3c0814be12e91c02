"""What an answer is: unfilled, or the same as another one."""

import ast
import dis
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch


def is_open(answer: Any) -> bool:
    """Whether an answer is `...`, holds one, or is a function or class in which a `...` still stands for code."""
    if answer is ...:
        return True
    if isinstance(answer, Mapping):
        return any(is_open(value) for value in answer.values())
    if isinstance(answer, list | tuple):
        return any(is_open(value) for value in answer)
    if inspect.isclass(answer):
        return any(is_open(method) for method in vars(answer).values() if inspect.isfunction(method))
    return inspect.isfunction(answer) and _has_gap(answer)


def _has_gap(function: Callable[..., Any]) -> bool:
    if function.__name__ == "<lambda>":  # whose source is the whole statement around it
        return _does_nothing(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return _does_nothing(function)
    return any(
        isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return)
        and isinstance(node.value, ast.Constant)
        and node.value.value is ...
        for node in ast.walk(tree)
    )


def _does_nothing(function: Any) -> bool:
    """The same without the source: a body that is only `...` compiles to nothing but a return of None."""
    idle = ("RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST")
    code = list(dis.get_instructions(function))
    return all(i.opname in idle for i in code) and all(i.argval in (None, ...) for i in code if "CONST" in i.opname)


def same(actual: Any, expected: Any, close: float = 0.0) -> bool:
    """Whether two answers are equal: numbers, tensors and arrays within `close` (relative), nests of them too."""
    if isinstance(expected, torch.Tensor | np.ndarray):
        if not isinstance(actual, torch.Tensor | np.ndarray) or tuple(actual.shape) != tuple(expected.shape):
            return False
        left, right = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
        scale = float(right.abs().max()) if right.numel() else 0.0
        return bool(torch.allclose(left, right, rtol=close, atol=close * scale, equal_nan=True))
    if isinstance(expected, bool | str | bytes) or expected is None:
        return type(actual) is type(expected) and bool(actual == expected)
    if isinstance(expected, int | float):
        number = as_number(actual)
        return number is not None and math.isclose(number, expected, rel_tol=close, abs_tol=0.0)
    if isinstance(expected, Mapping):
        return (
            isinstance(actual, Mapping)
            and actual.keys() == expected.keys()
            and all(same(actual[key], value, close) for key, value in expected.items())
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, list | tuple)
            and len(actual) == len(expected)
            and all(same(a, e, close) for a, e in zip(actual, expected, strict=True))
        )
    return bool(actual == expected)


def as_number(value: Any) -> float | None:
    """A number, also one in a tensor or array of one element; None for anything else, text and truth included."""
    if isinstance(value, bool | str | bytes):
        return None
    with suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    return None


def plain(text: object) -> str:
    """A word without regard to case, spaces and underscores."""
    return " ".join(str(text).lower().replace("_", " ").split())


def short(value: object) -> str:
    """A value in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(error: Exception) -> str:
    """An error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
