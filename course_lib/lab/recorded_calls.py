"""Let a Recorder see, and stop, what this process does to files through Python's `open` and `os`.

What is asked of the disk itself, `fsync`, is noted and not done: only a machine that dies could tell the difference,
and `lost_writes` works out what it would find.
"""

import builtins
import contextlib
import ctypes
import errno
import io
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from course_lib.lab.crash_points import Operation, Recorder

# What a save does not use today. If it ever does, the campaign must not overlook it.
_NOT_KNOWN = (
    "copy_file_range",
    "fdatasync",
    "ftruncate",
    "pwrite",
    "rmdir",
    "sendfile",
    "symlink",
    "truncate",
    "writev",
)
_CDLL = ctypes.CDLL


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside the block the recorder hears of each operation below its root before it is done."""
    changes = {name: _two_names(recorder, name) for name in ("link", "rename", "replace")}
    changes |= {name: _one_name(recorder, name) for name in ("unlink", "remove", "mkdir")}
    changes |= {name: _unknown(name) for name in _NOT_KNOWN if hasattr(os, name)}
    changes["fsync"] = _fsync(recorder)
    opener = _opener(recorder)
    # Python 3.10's pathlib took its functions from `os` and `io` when it was imported.
    pathlibs = [pathlib._normal_accessor] if hasattr(pathlib, "_normal_accessor") else []
    with ExitStack() as stack:
        for owner, name in ((owner, name) for owner in (os, *pathlibs) for name in changes):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, changes[name]))
        for owner in (builtins, io, *pathlibs):
            stack.enter_context(patch.object(owner, "open", opener))
        stack.enter_context(patch.object(ctypes, "CDLL", lambda *a, **k: _Library(recorder, _CDLL(*a, **k))))
        yield


def _fsync(recorder: Recorder) -> Callable[[Any], None]:
    def call(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if (number := recorder.files.get(descriptor)) is not None:
            recorder.perform(Operation("fsync", f"file {number}", file=number), lambda: None)
            return
        there = os.fstat(descriptor)
        for folder in (recorder.root, *filter(Path.is_dir, recorder.root.rglob("*"))):
            if os.path.samestat(there, folder.stat()):
                recorder.perform(Operation("sync", str(recorder.relative(folder))), lambda: None)

    return call


def _opener(recorder: Recorder) -> Callable[..., Any]:
    real = io.open

    def opened(path: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        relative = None if isinstance(path, int) else recorder.relative(path)
        if relative is None or not set(mode) & set("wxa+"):
            return real(path, mode, buffering, *args, **kwargs)
        assert set(mode) in ({"x", "b"}, {"w", "b"}), f"the campaign does not know open(…, {mode!r})"
        recorder.opened += 1
        number = recorder.opened
        operation = Operation("open", relative, file=number)
        raw = recorder.perform(operation, lambda: _File(recorder, relative, path, mode.replace("b", ""), number))
        # As `open` does it: what goes to the kernel in one piece is what can be cut short.
        return raw if buffering == 0 else io.BufferedWriter(raw, os.fstat(raw.fileno()).st_blksize)

    return opened


class _File(io.FileIO):
    """A file whose writes are noted."""

    def __init__(self, recorder: Recorder, relative: str, path: Any, mode: str, number: int) -> None:
        super().__init__(path, mode)
        self._recorder, self._relative, self._number = recorder, relative, number
        recorder.files[self.fileno()] = number

    def write(self, data: Any) -> int:
        whole, offset = bytes(data), self.tell()
        put = super().write  # what is nested has no super()

        def part(content: bytes) -> Operation:
            return Operation("write", self._relative, file=self._number, offset=offset, data=content)

        def tear() -> Operation:
            return part(whole[: put(whole[: len(whole) // 2])])

        return int(self._recorder.perform(part(whole), lambda: put(whole), tear))

    def truncate(self, size: int | None = None) -> int:
        raise AssertionError("the campaign does not know truncate")

    def close(self) -> None:
        if not self.closed:
            self._recorder.files.pop(self.fileno(), None)
        super().close()


def _one_name(recorder: Recorder, name: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        relative = recorder.relative(path)
        if relative is None:
            return real(path, *args, **kwargs)
        kind = "mkdir" if name == "mkdir" else "unlink"
        return recorder.perform(Operation(kind, relative), lambda: real(path, *args, **kwargs))

    return call


def _two_names(recorder: Recorder, name: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        one, other = recorder.relative(source), recorder.relative(target)
        if one is None or other is None:
            return real(source, target, *args, **kwargs)
        if name == "link" and not recorder.links:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source))
        kind = "link" if name == "link" else "rename"
        return recorder.perform(Operation(kind, one, other), lambda: real(source, target, *args, **kwargs))

    return call


def _unknown(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"the campaign does not know os.{name}")

    return call


@dataclass
class _Library:
    """The C library, with a renameat2 that is noted when it succeeds."""

    recorder: Recorder
    real: Any

    def renameat2(self, old: int, source: bytes, new: int, target: bytes, flags: int) -> int:
        one, other = (self.recorder.relative(os.fsdecode(path)) for path in (source, target))
        operation = Operation("rename", str(one), str(other))

        def do() -> None:
            if self.real.renameat2(old, source, new, target, flags) != 0:
                raise _Refused

        with contextlib.suppress(_Refused):
            self.recorder.perform(operation, do)
            return 0
        return -1


class _Refused(Exception):
    """The kernel said no; errno says why."""
