"""Exercises of notebook 03: all-reduce, the true mean, and bugs that do not crash."""

from collections.abc import Callable

from course_lib.lab.checks import Exercise, case, choose, match, predict, write
from course_lib.lab.ring import Ring, ring_all_reduce, run_ring
from course_lib.lab.two_ranks import BUGS

first_weight = predict(
    0,
    wrong=[1, 0.5],
    hints={1: "rank 1 has a weight of its own only until DDP is wrapped around it", 0.5: "nothing is averaged there"},
    hint="give 0 or 1 for a rank, or 0.5 for the mean of both",
    why="DDP's constructor broadcasts rank 0's weights and buffers; later only gradients travel",
)


def _judge_ring(algorithm: Callable[[list[list[float]], Ring], object]) -> str | None:
    for ranks in (2, 3, 4):
        chunks = [[float(10**rank * (c + 1)) for c in range(ranks)] for rank in range(ranks)]
        ring = run_ring(algorithm, chunks)
        rounds, limit = len(ring.rounds), 2 * (ranks - 1)
        sums = [sum(column) for column in zip(*chunks, strict=True)]
        if rounds != limit:
            return f"with {ranks} ranks it takes {rounds} rounds of pass_on, and {limit} are enough and needed"
        if not any(ring.held[limit // 2][rank][c] == sums[c] for rank in range(ranks) for c in range(ranks)):
            return f"with {ranks} ranks no chunk has its whole sum anywhere after {limit // 2} rounds: add what arrives"
        for rank, row in enumerate(ring.held[-1]):
            if row != sums:
                return f"with {ranks} ranks, rank {rank} ends with {row}, not {sums}: which chunk does it miss?"
    return None


def _all_to_the_first(chunks: list[list[float]], ring: Ring) -> None:
    """Not a ring: every rank's chunks are read where they are, and nothing is passed on."""
    sums = [sum(column) for column in zip(*chunks, strict=True)]
    for row in chunks:
        row[:] = sums


def _same_chunk(chunks: list[list[float]], ring: Ring) -> None:
    """Every rank sends the same chunk in a round, and adds in both halves."""
    for step in range(2 * (len(chunks) - 1)):
        c = step % len(chunks)
        for rank, (_, value) in enumerate(ring.pass_on([(c, row[c]) for row in chunks])):
            chunks[rank][c] += value


def _only_half(chunks: list[list[float]], ring: Ring) -> None:
    ranks = len(chunks)
    for step in range(ranks - 1):
        arrived = ring.pass_on([((r - step) % ranks, chunks[r][(r - step) % ranks]) for r in range(ranks)])
        for rank, (c, value) in enumerate(arrived):
            chunks[rank][c] += value


ring = Exercise(
    "write",
    _judge_ring,
    ring_all_reduce,
    [_all_to_the_first, _same_chunk, _only_half],
    "each rank sent 2·(W-1) chunks of 1/W of the gradient, however many ranks there are",
)
megabytes = predict(
    1400,
    wrong=[5600, 800, 700, 1600],
    hints={
        5600: "that is what one rank would receive if all sent it everything; in a ring a message is one chunk",
        700: "that is the reduce-scatter; the sums must travel, too",
    },
    hint="2·(W-1) rounds, in each a chunk of 800 / W MB",
    why="14 rounds of 100 MB; with a thousand ranks it would be 1,598 MB, hardly more",
)
weight = write(
    case(2, 3, 2, hint="two of three samples, and DDP will divide by the two ranks"),
    case(1, 3, 2),
    case(4, 8, 2, hint="even shares need no correction"),
    case(0, 1, 4, hint="a stand-in counts for nothing"),
    case(1, 1, 4, hint="DDP divides this rank's gradient by 4 although nobody else had a sample"),
    solution=lambda count, size, ranks: count * ranks / size,
    wrong=[lambda count, size, ranks: count / size, lambda count, size, ranks: 1.0, lambda c, s, r: c * r],
    close=1e-12,
    why="count · W / size: DDP's division by W cancels, and each sample weighs 1 / size",
)
padded = predict(
    0.5,
    wrong=[0.4, 1 / 3],
    hints={0.4: "that is the truth; but which sample is asked twice?"},
    hint="write down the three samples of each rank, and mark the right answers",
    close=0.005,
    why="rank 0 has 0, 2, 4 and is right twice; rank 1 has 1, 3 and 0 again: the mean of 2/3 and 1/3",
)
unused = choose(
    "c",
    hints={
        "a": "its weight and bias are indices 0 and 1: count from the top of the list",
        "b": "a norm has a weight and a bias, too: indices 2 and 3",
        "d": "its indices are 6 and 7; count again, each weight and bias one by one",
    },
    why="index 4 and 5 are the weight and the bias of aux",
)
_ORDER = (2, 4, 0, 3, 1)  # the bugs of curves A to E
curves = dict(zip("ABCDE", (BUGS[i] for i in _ORDER), strict=True))
bugs = match(
    curves,
    wrong=[
        curves | {"A": curves["B"], "B": curves["A"]},
        curves | {"B": curves["E"], "E": curves["B"]},  # both leave zero at once, and only one splits the ranks
        curves | {"A": curves["D"], "D": curves["A"]},  # both are right for two steps
    ],
    hint="find the step at which each first leaves zero: the first, an epoch's last, or an epoch's first",
    why="where a curve leaves zero, and whether the ranks leave each other, tells which bug it is",
)
