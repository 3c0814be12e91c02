"""Two workers that do nothing but Python, and write down when: threads and processes are raced with the same code.

It imports nothing heavy, since a spawned process imports it again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHUNKS, TURNS = 1000, 5_000  # a chunk takes about a third of a millisecond
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Work:
    """What one worker did: the (start, end, CPU time) of each chunk, in seconds."""

    lane: int
    chunks: tuple[tuple[float, float, float], ...]

    def running(self) -> list[tuple[float, float]]:
        """The (start, end) of the chunks in which the worker hardly had to wait."""
        return [(start, end) for start, end, cpu in self.chunks if end - start < 1.3 * cpu]


def count(lane: int, barrier: Any, results: Any) -> None:
    """Wait for the other worker, then add up numbers in pure Python, chunk by chunk; puts a `Work` into `results`."""
    barrier.wait(_PATIENCE_S)
    chunks = []
    for _ in range(CHUNKS):
        start, cpu, total = time.perf_counter(), time.thread_time(), 0
        for number in range(TURNS):
            total += number * number
        chunks.append((start, time.perf_counter(), time.thread_time() - cpu))
    results.put(Work(lane, tuple(chunks)))


def race(worker: Callable[..., Any], barrier: Any, results: Any) -> list[Work]:
    """Run `count` in two workers, `worker` being the class Thread or Process; returns what each did.

    perf_counter is one clock for all processes of a machine (on Linux and macOS), so their spans can be compared.
    """
    workers = [worker(target=count, args=(lane, barrier, results), daemon=True) for lane in range(2)]
    for each in workers:
        each.start()
    works: list[Work] = [results.get() for _ in workers]
    for each in workers:
        each.join(_PATIENCE_S)
    return sorted(works, key=lambda work: work.lane)


def cores_used(works: list[Work], window_s: float | None = None) -> float:
    """CPU seconds of both workers for each second that passed: 1.0 is one core's worth, however many workers there are.

    A busy machine makes it smaller, never larger. With `window_s` it is that of the least disturbed window.
    """
    if window_s is not None:
        begin, end = busiest(works, window_s)
        spans = [span for work in works for span in work.running()]
        return sum(max(0.0, min(high, end) - max(low, begin)) for low, high in spans) / window_s
    chunks = [chunk for work in works for chunk in work.chunks]
    passed = max(end for _, end, _ in chunks) - min(start for start, _, _ in chunks)
    return sum(cpu for _, _, cpu in chunks) / passed


def busiest(works: list[Work], window_s: float) -> tuple[float, float]:
    """The (start, end) of the window in which the two ran most: the one that other programs disturbed least."""
    spans = [span for work in works for span in work.running()]

    def ran(start: float) -> float:
        return sum(max(0.0, min(high, start + window_s) - max(low, start)) for low, high in spans)

    begin = max((low for low, _ in spans), key=ran, default=works[0].chunks[0][0])
    return begin, begin + window_s
