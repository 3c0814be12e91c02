"""A function on real gloo ranks, each a process that lives only for it."""

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from course_lib.engine import open_world


def on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    collective_timeout_s: float = 20.0,
) -> list[Any]:
    """What `function(world, *args)` returned on each gloo rank, or the exception that it raised there.

    The ranks are forked from a server that has imported torch but never used it, which takes a tenth of the time
    of a fresh interpreter. A rank that is not done after `timeout` seconds fails the test; none is left behind.
    """
    context = multiprocessing.get_context("forkserver")
    # Every optimizer imports dynamo.
    context.set_forkserver_preload(["torch.distributed", "torch.utils.data", "torch._dynamo"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, str(rank)) for rank in range(world_size)]
        processes = [
            context.Process(
                target=_rank, args=(rank, world_size, store.port, path, collective_timeout_s, function, args)
            )
            for rank, path in enumerate(paths)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + timeout
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            assert all(path.exists() for path in paths), f"exit codes: {[p.exitcode for p in processes]}"
            return [pickle.loads(path.read_bytes()) for path in paths]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _rank(
    rank: int,
    world_size: int,
    port: int,
    path: Path,
    collective_timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        master = ("127.0.0.1", port)
        with open_world(
            "cpu",
            rank=rank,
            world_size=world_size,
            master=master,
            collective_timeout_s=collective_timeout_s,
            start_timeout_s=40,
        ) as world:
            outcome = function(world, *args)
    except Exception as error:
        outcome = error
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(path)
    os._exit(0)  # tearing gloo down aborts a process now and then


def fine(outcomes: list[Any]) -> list[Any]:
    """The outcomes, none of which may be an exception."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
