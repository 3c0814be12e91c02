"""A snapshot that is on the disk but has no name yet: whole, durable, and seen by nobody."""

import contextlib
import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from course_lib.engine.snapshots.files import Mark, make_directory, temporary_for, withdraw, write_durably
from course_lib.engine.snapshots.records import Claim, Manifest


@dataclass(frozen=True)
class Draft:
    """A payload in a temporary file, with the mark that it has there, and the manifest that it will have."""

    manifest: Manifest
    mark: Mark
    temporary: Path
    path: Path


@contextlib.contextmanager
def write_draft(directory: Path, claim: Claim, content: Mapping[str, Any], **facts: Any) -> Iterator[Draft]:
    """Write `content` (tensors and plain values) as a snapshot; OSErrors pass through.

    `facts` are step, epoch, world_size and config of its manifest. The temporary is removed at the block's end.
    """
    blank = Manifest(
        generation=claim.generation,
        token=claim.token,
        parent=claim.parent,
        sha256="",
        bytes=0,
        versions={"torch": torch.__version__, "python": platform.python_version()},
        machine={"host": claim.host, "cpu": cpu_model(), "gpu": gpu_model()},
        **facts,
    )
    path = directory / f"{blank.name}.pt"
    temporary = temporary_for(path)
    if not directory.is_dir():
        make_directory(directory)
    written = _Hashed()
    try:
        mark = write_durably(temporary, lambda file: written.save(dict(content), file))
        yield Draft(replace(blank, sha256=written.hash.hexdigest(), bytes=written.bytes), mark, temporary, path)
    finally:
        withdraw(temporary)


class _Hashed:
    """A file to write to, which counts and digests what passes: the state needs no second copy in memory."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.bytes = 0
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None

    def save(self, content: Any, file: BinaryIO) -> None:
        """`torch.save` into `file`; torch's writer turns a disk's error into a RuntimeError, this turns it back."""
        self._file = file
        try:
            torch.save(content, cast(IO[bytes], self))  # which needs no more than `write`
        except RuntimeError:
            if self._failure is not None:
                raise self._failure from None
            raise

    def write(self, data: bytes) -> int:
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            self._failure = error
            raise
        self.hash.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Part of what torch takes for a file; `write_durably` flushes."""


def cpu_model() -> str:
    """The processor's name: bit-equality is claimed on one type of CPU only."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def gpu_model() -> str:
    """The name of the GPU that this process computes on, or none."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "none"  # type: ignore[no-untyped-call]
