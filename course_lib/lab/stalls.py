"""How long a snapshot holds training up: a real training loop that saves its 80 MB in one of several ways."""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.functional import cross_entropy

from course_lib.engine import RunLog, SnapshotStore, TrainState, World
from course_lib.engine.saver import Saver

Span = tuple[float, float]  # seconds since the save began
Done = Callable[[], bool]  # whether a snapshot is on the disk
Job = Callable[[], tuple[TrainState, Callable[[], None]]]
Save = Callable[[int], Done]  # begins the snapshot after that many steps
FACTS: dict[str, Any] = {"epoch": 0, "world_size": 1, "config": {}}
AROUND = 2  # steps before the save, and after it was written


@dataclass(frozen=True)
class Timeline:
    """What the training thread did around one save: its steps and the stall; and how long the snapshot took in all."""

    way: str
    steps: tuple[Span, ...]
    stall_s: float
    written_s: float


@contextmanager
def _torch_save(state: TrainState, folder: Path) -> Iterator[Save]:
    def save(step: int) -> Done:
        torch.save(state.state_dict(), folder / "snapshot.pt")
        return lambda: True

    yield save


@contextmanager
def _durable(state: TrainState, folder: Path) -> Iterator[Save]:
    """Digest, fsync, link and manifest, all in the training thread."""
    store = SnapshotStore(folder)
    claim = store.claim(1, None)

    def save(step: int) -> Done:
        store.save(claim, {"state": state.state_dict()}, step=step, **FACTS)
        return lambda: True

    yield save


@contextmanager
def _dcp(state: TrainState, folder: Path) -> Iterator[Save]:
    """torch.distributed.checkpoint, as it comes."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it was told so

    def save(step: int) -> Done:
        work: Any = async_save(state.state_dict(), checkpoint_id=folder / f"dcp-{step}", no_dist=True)
        return lambda: bool(work.done() and work.result())

    yield save


@contextmanager
def _engine(state: TrainState, folder: Path) -> Iterator[Save]:
    """What the Trainer does."""
    store = SnapshotStore(folder)
    world = World(0, 0, 1, torch.device("cpu"))
    saver = Saver(world, state, store, store.claim(1, None), RunLog(None), strict=True)
    saver.prepare()

    def save(step: int) -> Done:
        saver.save(step, dict, **FACTS)

        def done() -> bool:
            saver.settle(saver.vote())  # as the Trainer does at the end of each step
            return saver.saved_step == step

        return done

    yield save
    saver.close()


WAYS: dict[str, Callable[[TrainState, Path], AbstractContextManager[Save]]] = {
    "torch.save": _torch_save,
    "durable, in the loop": _durable,
    "dcp.async_save": _dcp,
    "the course's engine": _engine,
}


def a_job() -> tuple[TrainState, Callable[[], None]]:
    """A network of 6.7 million parameters with AdamW, 80 MB in all; and a function that does a step of training."""
    draw = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(16, 1024, generator=draw), torch.randint(0, 10, (16,), generator=draw)
    model = nn.Sequential(nn.Linear(1024, 2176), nn.ReLU(), nn.Linear(2176, 2048), nn.ReLU(), nn.Linear(2048, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()  # now the optimizer has its averages
    return TrainState(model, optimizer), step


def measure(way: str, folder: Path, job: Job = a_job) -> Timeline:
    """Train, and save twice in a way of WAYS; the second save is measured, for it finds its memory in place."""
    state, step = job()
    with WAYS[way](state, folder) as save:
        for number in (1, 2):
            spans: list[Span] = []
            _steps(step, spans, AROUND)
            begin = time.monotonic()
            done = save(number)
            stalled = time.monotonic()
            while not done():
                _steps(step, spans, 1)
            written = time.monotonic()
            _steps(step, spans, AROUND)
    return Timeline(way, tuple((a - begin, b - begin) for a, b in spans), stalled - begin, written - begin)


def _steps(step: Callable[[], None], spans: list[Span], count: int) -> None:
    for _ in range(count):
        begin = time.monotonic()
        step()
        spans.append((begin, time.monotonic()))


def recorded_table(path: Path) -> str:
    """What scripts/bench/snapshot_stall.py has measured, as a table of medians for each state, labelled as recorded."""
    found = json.loads(path.read_text())
    head = f"RECORDED {found['recorded']}, torch {found['versions']['torch']}"
    lines = [*wrap(head, 96), found["command"]]
    for state, figures in found["stalls"].items():
        title = f"{state}, {figures['bytes'] / 1e6:.0f} MB"
        lines += ["", f"{title:32}{'held up':>10}{'in memcpys':>12}{'written after':>15}"]
        for way, row in figures["ways"].items():
            written = f"{row['written_ms']['median']:,.0f} ms" if "written_ms" in row else "-"
            stall = f"{row['stall_ms']['median']:,.0f} ms"
            lines.append(f"{way:32}{stall:>10}{row['times_memcpy']:>12.1f}{written:>15}")
    return "\n".join(lines)
