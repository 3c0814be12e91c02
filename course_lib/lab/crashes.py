"""Kill a function that writes files at every place where it can die, in this process: a SIGKILL without a process.

It dies before each of its lines, before each operation on files, and in the middle of each write, which then leaves
its first half. What it touches after its death raises again: a killed process runs no `finally` either.
"""

import builtins
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_CALLS = ("replace", "rename", "fsync", "remove", "unlink", "link", "symlink", "open")


class Crash(BaseException):
    """The simulated kill; no `except Exception` stops it."""


@dataclass
class _Deaths:
    """Counts the places where a function can die, and lets it die at number `at`."""

    at: int
    count: int = 0
    where: str = ""

    def check(self, where: str, tear: Callable[[], object] = lambda: None) -> None:
        """Die here if this is the place, after `tear`; the dead don't get past any later place."""
        if not self.where:
            self.count += 1
            if self.count != self.at:
                return
            tear()
            self.where = where
        raise Crash


def killed_at(at: int, function: Callable[..., Any], *arguments: Any) -> str | None:
    """Call `function` and kill it at place number `at`, from 1; returns the place in words, None if it has none."""
    deaths = _Deaths(at)
    before = sys.gettrace()
    try:
        with _patched(deaths):
            sys.settrace(_line_tracer(deaths, function))
            try:
                function(*arguments)
            finally:
                sys.settrace(before)
    except Crash:
        pass
    return deaths.where or None


def _line_tracer(deaths: _Deaths, function: Callable[..., Any]) -> Any:
    code = getattr(function, "__code__", None)

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            deaths.check(f"before its line {frame.f_lineno - code.co_firstlineno}")
        return trace

    return trace


@contextmanager
def _patched(deaths: _Deaths) -> Iterator[None]:
    changes: list[tuple[Any, str, Any]] = [(os, name, _guarded(deaths, name)) for name in _CALLS]
    opener = _opener(deaths)
    changes += [(builtins, "open", opener), (io, "open", opener), (os, "write", _writer(deaths))]
    changes += [(torch, "save", _saver(deaths)), (shutil, "copyfile", _copier(deaths))]
    with ExitStack() as stack:
        for module, name, replacement in changes:
            stack.enter_context(patch.object(module, name, replacement))
        yield


def _guarded(deaths: _Deaths, name: str) -> Callable[..., Any]:
    function = getattr(os, name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        deaths.check(f"before {name}")
        return function(*args, **kwargs)

    return guarded


def _opener(deaths: _Deaths) -> Callable[..., Any]:
    real = builtins.open

    def opened(*args: Any, **kwargs: Any) -> Any:
        deaths.check("before open")
        return _TearingFile(real(*args, **kwargs), deaths)

    return opened


def _writer(deaths: _Deaths) -> Callable[..., Any]:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        deaths.check("inside write", lambda: real(descriptor, data[: len(data) // 2]))
        return real(descriptor, data)

    return write


def _saver(deaths: _Deaths) -> Callable[..., Any]:
    real, real_open = torch.save, builtins.open

    def save(value: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        plain = target.real if isinstance(target, _TearingFile) else target

        def tear() -> None:
            real(value, buffer := io.BytesIO())
            half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
            if isinstance(plain, str | os.PathLike):
                with real_open(plain, "wb") as file:
                    file.write(half)
            else:
                plain.write(half)
                plain.flush()

        deaths.check("inside torch.save", tear)
        real(value, plain, *args, **kwargs)

    return save


def _copier(deaths: _Deaths) -> Callable[..., Any]:
    real = shutil.copyfile

    def copyfile(source: Any, target: Any, **kwargs: Any) -> Any:
        def tear() -> None:
            real(source, target)
            os.truncate(target, Path(source).stat().st_size // 2)

        deaths.check("inside a copy", tear)
        return real(source, target, **kwargs)

    return copyfile


class _TearingFile:
    """A file whose writes can die half-way."""

    def __init__(self, real: Any, deaths: _Deaths) -> None:
        self.real, self._deaths = real, deaths

    def write(self, data: Any) -> Any:
        def tear() -> None:
            self.real.write(data[: len(data) // 2])
            self.real.flush()

        self._deaths.check("inside write", tear)
        return self.real.write(data)

    def __enter__(self) -> "_TearingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.real.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
