"""SIGKILL at random moments of a save: what is there is whole."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import REPO, Completed
from snapshot_tools import Generation, find, names, start

from course_lib.engine.snapshots.records import lineage


def save_for_ever(generation: Generation, numbers: int) -> None:
    """Publish snapshots of `numbers` float32 each, one after the other."""
    first = generation.found.manifest.step if generation.found.manifest else 0
    for step in range(first + 1, 10**8):
        generation.save(step, weights=torch.full((numbers,), float(step)))


def campaign(directory: str, megabytes: int, times: int) -> None:
    """In a process of its own, so that it can fork: kill a writer `times` times, and load after each."""
    torch.set_num_threads(1)  # a forked child has no copies of a thread pool's threads
    run_dir, before, torn = Path(directory), 0, 0
    for _ in range(times):
        generation = start(run_dir, keep=2)
        assert names(run_dir, ".tmp") == [], "a stale temporary file survived the claim"
        pid = os.fork()
        if pid == 0:
            save_for_ever(generation, megabytes * 250_000)
        time.sleep(random.uniform(0, 0.02 * megabytes))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        torn += len(names(run_dir, ".tmp"))
        found, seen = find(run_dir), generation.store.listing()
        line = lineage(seen.claims, seen.manifests)
        assert found.skipped == () and found.manifest == (line[0] if line else None)
        if found.manifest is not None:
            assert found.manifest.step >= before
            before = found.manifest.step
            assert bool((found.content["weights"] == float(before)).all())
    print(f"{before} snapshots, {torn} writes cut short")
    print("all whole")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("megabytes", "times"), [(20, 10), pytest.param(80, 40, marks=pytest.mark.slow)])
def test_the_newest_snapshot_loads_after_a_kill_at_any_moment(
    launch: Callable[..., Completed], tmp_path: Path, megabytes: int, times: int
) -> None:
    code = f"import test_snapshot_kills; test_snapshot_kills.campaign({str(tmp_path)!r}, {megabytes}, {times})"
    done = launch([sys.executable, "-c", code], timeout=500, env={"PYTHONPATH": f"{REPO}:{REPO / 'tests'}"})
    assert (done.returncode, done.tail(1)) == (0, "all whole"), done.tail()
