"""A ring all-reduce in one process: ranks in a circle, each of which may only pass one number to the next."""

from collections.abc import Callable
from copy import deepcopy

Message = tuple[int, float]  # (which chunk, its value)


class Ring:
    """The wires of the ring, and a record of what the ranks held before the first round and after each.

    `chunks[rank][c]` is chunk `c` of `rank`'s gradient; an all-reduce changes it in place.
    """

    def __init__(self, chunks: list[list[float]]) -> None:
        self._chunks = chunks
        self.rounds: list[list[Message]] = []
        self.held: list[list[list[float]]] = []

    def pass_on(self, messages: list[Message]) -> list[Message]:
        """One round: `messages[rank]` goes to the next rank. Returns what each rank received, in rank order."""
        self._look()
        if len(messages) != len(self._chunks):
            raise ValueError(f"{len(messages)} messages for {len(self._chunks)} ranks: each rank sends one in a round")
        for rank, (chunk, value) in enumerate(messages):
            if self._chunks[rank][chunk] != value:
                raise ValueError(f"rank {rank} sends {value} for chunk {chunk}, but holds {self._chunks[rank][chunk]}")
        self.rounds.append(list(messages))
        return [messages[rank - 1] for rank in range(len(messages))]

    def finish(self) -> None:
        """Record what the ranks hold after the last round."""
        self._look()

    def _look(self) -> None:
        self.held.append(deepcopy(self._chunks))


def ring_all_reduce(chunks: list[list[float]], ring: Ring) -> None:
    """Leave the sum of all ranks' chunks `c` in `chunks[rank][c]` of every rank, in 2·(ranks - 1) rounds.

    Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms, 2009.
    """
    ranks = len(chunks)
    for step in range(ranks - 1):  # reduce-scatter: add what arrives
        places = [(rank - step) % ranks for rank in range(ranks)]
        arrived = ring.pass_on([(c, chunks[rank][c]) for rank, c in enumerate(places)])
        for rank, (c, value) in enumerate(arrived):
            chunks[rank][c] += value
    for step in range(ranks - 1):  # all-gather: keep what arrives
        places = [(rank + 1 - step) % ranks for rank in range(ranks)]
        arrived = ring.pass_on([(c, chunks[rank][c]) for rank, c in enumerate(places)])
        for rank, (c, value) in enumerate(arrived):
            chunks[rank][c] = value


def run_ring(algorithm: Callable[[list[list[float]], Ring], object], chunks: list[list[float]]) -> Ring:
    """The record of `algorithm` on a copy of `chunks`."""
    own = [[float(value) for value in row] for row in chunks]
    ring = Ring(own)
    algorithm(own, ring)
    ring.finish()
    return ring
