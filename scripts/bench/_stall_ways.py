"""The ways to save a training state, each as a tutorial or its own documentation uses it, and how to read it back."""

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from course_lib.engine import SnapshotStore, TrainState
from course_lib.engine.snapshots import open_payload
from course_lib.engine.tree import leaves, map_tensors

Tree = dict[str, Any]
Begin = Callable[[TrainState, Path], "Future[Any]"]  # holds training up, then returns what is done when all is written
MEMCPY, ENGINE, LIGHTNING = "memcpy", "the course's engine", "Lightning AsyncCheckpointIO"
ASYNC, REUSED = "dcp.async_save", "dcp.async_save, stager reused"


@dataclass(frozen=True)
class Way:
    """How a state is saved (None: by the Trainer itself) and read; `durable` is what is on the disk when it is done."""

    open: Callable[[], AbstractContextManager[Begin]] | None
    read: Callable[[Path, Tree], Tree] | None
    durable: str


def _done() -> "Future[Any]":
    work: Future[Any] = Future()
    work.set_result(None)
    return work


@contextmanager
def _memcpy() -> Iterator[Begin]:
    """The C library's own copy of each tensor into memory that was touched before, and nothing else."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    copies: list[tuple[int, int, int]] = []

    def begin(state: TrainState, path: Path) -> "Future[Any]":
        if not copies:  # every tensor stays where it is from the first step on
            tensors = (value for _, value in leaves(state.state_dict()) if isinstance(value, torch.Tensor))
            pairs.extend((torch.zeros_like(tensor), tensor) for tensor in tensors)
            copies.extend((target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in pairs)
        for copy in copies:
            ctypes.memmove(*copy)
        return _done()

    yield begin


def _write(tree: Tree, path: Path) -> None:
    torch.save(tree, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _torch_save() -> Iterator[Begin]:
    def begin(state: TrainState, path: Path) -> "Future[Any]":
        _write(state.state_dict(), path)
        return _done()

    yield begin


@contextmanager
def _clone_and_thread() -> Iterator[Begin]:
    with ThreadPoolExecutor(1) as writer:
        yield lambda state, path: writer.submit(_write, map_tensors(state.state_dict(), torch.clone), path)


@contextmanager
def _dcp_save() -> Iterator[Begin]:
    def begin(state: TrainState, path: Path) -> "Future[Any]":
        dcp.save(state.state_dict(), checkpoint_id=path, no_dist=True)
        return _done()

    yield begin


@contextmanager
def _dcp_async() -> Iterator[Begin]:
    yield lambda state, path: _future(dcp.async_save(state.state_dict(), checkpoint_id=path, no_dist=True))


@contextmanager
def _dcp_reused() -> Iterator[Begin]:
    """A stager keeps its memory from save to save; these are the options that it has on a machine without a GPU."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    yield lambda state, path: _future(
        dcp.async_save(state.state_dict(), checkpoint_id=path, no_dist=True, async_stager=stager)
    )
    stager.close()


def _future(work: Any) -> "Future[Any]":
    if not isinstance(work, Future):  # a stager that copies in the background answers with two futures
        raise TypeError(f"async_save returned a {type(work).__name__}")
    return work


@contextmanager
def _lightning() -> Iterator[Begin]:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    current: list[Future[Any]] = []

    class Noted(TorchCheckpointIO):  # AsyncCheckpointIO does not say when it is done
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().save_checkpoint(*args, **kwargs)
                current[-1].set_result(None)
            except BaseException as error:
                current[-1].set_exception(error)

    plugin = AsyncCheckpointIO(Noted())

    def begin(state: TrainState, path: Path) -> "Future[Any]":
        current.append(Future())
        plugin.save_checkpoint(state.state_dict(), path)
        return current[-1]

    yield begin
    plugin.teardown()


def _load(path: Path, like: Tree) -> Tree:
    tree: Tree = torch.load(path, map_location="cpu", weights_only=True)
    return tree


def _dcp_load(path: Path, like: Tree) -> Tree:
    target: Tree = map_tensors(like, torch.zeros_like)
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def _newest(run_dir: Path, like: Tree) -> Tree:
    """The newest snapshot of the run, with the checks that a resume makes."""
    store = SnapshotStore(run_dir)
    newest = max(store.listing().manifests, key=lambda manifest: manifest.step)
    state: Tree = open_payload(store.read(newest))["state"]
    return state


WAYS = {
    MEMCPY: Way(_memcpy, None, "nothing"),
    "torch.save": Way(_torch_save, _load, "the file"),
    "clone + thread": Way(_clone_and_thread, _load, "the file"),
    "dcp.save": Way(_dcp_save, _dcp_load, "the files"),
    ASYNC: Way(_dcp_async, _dcp_load, "the files"),
    REUSED: Way(_dcp_reused, _dcp_load, "the files"),
    LIGHTNING: Way(_lightning, _load, "nothing: it does not sync"),
    ENGINE: Way(None, _newest, "the file and its name; digest and manifest, too"),
}


def available() -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that can be measured here, and why the others cannot."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it was told so
    try:
        with _lightning():
            return WAYS, {}
    except ImportError as error:
        reason = f"{error}; pip install '.[bench]' brings it"
        return {name: way for name, way in WAYS.items() if name != LIGHTNING}, {LIGHTNING: reason}
