"""Exercises of notebook 06."""

from collections.abc import Mapping
from typing import Any

from course_lib.engine.order import share as engine_share
from course_lib.lab import checks
from course_lib.lab.answers import as_number
from course_lib.lab.checks import Exercise, case, match, predict, write
from course_lib.lab.node_agents import DEFAULT, TUNED

# --- shares -------------------------------------------------------------------------------------------------------


def _floor(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    """Drops what is left over."""
    size = (stop - start) // ranks
    return start + rank * size, start + (rank + 1) * size


def _last_takes_the_rest(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    low, high = _floor(start, stop, rank, ranks)
    return low, stop if rank == ranks - 1 else high


def _ceiling(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    size = -(-(stop - start) // ranks)
    return min(stop, start + rank * size), min(stop, start + (rank + 1) * size)


def _from_zero(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    return engine_share(0, stop - start, rank, ranks)


def _of_each_rank(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    """The batch belongs to the rank: more ranks use more samples a step."""
    return start + rank * (stop - start), start + (rank + 1) * (stop - start)


share = write(
    case(0, 64, 0, 1),
    case(0, 64, 1, 2, hint="two ranks take half of the batch each, and not a batch each"),
    case(128, 192, 1, 2, hint="the interval is of the epoch's order, so it begins at start"),
    case(0, 64, 0, 3, hint="64 samples for three ranks: one is left over, and the low ranks take what is left over"),
    case(0, 64, 1, 3, hint="shares differ by one at most, and low ranks have more"),
    case(0, 64, 2, 3),
    *(case(1472, 1500, rank, 5, hint="28 samples for five ranks: 6, 6, 6, 5, 5") for rank in range(5)),
    *(case(10, 13, rank, 4, hint="three samples for four ranks: a share may be empty") for rank in range(4)),
    solution=engine_share,
    wrong=[_floor, _last_takes_the_rest, _ceiling, _from_zero, _of_each_rank],
    why="at any number of ranks the shares join without a gap, and differ by one at most",
)


# --- settings of the rendezvous -----------------------------------------------------------------------------------

NOTICE_S, SAVING_S, LAST_CALL_S = 15, 5, 10  # what the exercise asks for


def _judge_settings(answer: Any) -> str | None:
    if not isinstance(answer, Mapping) or set(answer) != set(TUNED):
        return f"give a dict with the keys {', '.join(TUNED)}"
    numbers = {name: as_number(value) for name, value in answer.items()}
    wrong = next((name for name, value in numbers.items() if value is None or value != int(value) or value < 1), None)
    if wrong is not None:
        return f"{wrong}: give whole seconds, 1 or more"
    last_call, interval, attempts = (int(numbers[name] or 0) for name in TUNED)
    if attempts < 3:
        return "one heartbeat that is a little late takes a healthy node out: allow three attempts at least"
    if interval < 2:
        return "an agent that waits looks once a second: at that interval late heartbeats are common"
    if interval * attempts > NOTICE_S:
        return f"a lost node is noticed after up to {interval * attempts} s, and {NOTICE_S} s are wanted"
    if last_call < SAVING_S:
        return "the slowest node comes back while the last call is over: its snapshot takes longer than that"
    if last_call > LAST_CALL_S:
        return f"the last call costs every change {last_call} s, and {LAST_CALL_S} s are allowed"
    return None


settings = Exercise(
    "write",
    _judge_settings,
    solution={"last_call_timeout": 6, "keep_alive_interval": 4, "keep_alive_max_attempt": 3},
    wrong=[
        dict(DEFAULT),
        dict(TUNED),
        {"last_call_timeout": 6, "keep_alive_interval": 5, "keep_alive_max_attempt": 2},
        {"last_call_timeout": 6, "keep_alive_interval": 1, "keep_alive_max_attempt": 10},
        {"last_call_timeout": 6, "keep_alive_interval": 5, "keep_alive_max_attempt": 4},
        {"last_call_timeout": 15, "keep_alive_interval": 5, "keep_alive_max_attempt": 3},
        {"last_call_timeout": 6, "keep_alive_interval": 2.5, "keep_alive_max_attempt": 3},
        {"last_call_timeout": 6},
    ],
    why="noticed in time, no healthy node taken out, and nobody comes too late for the round",
)


# --- to predict ---------------------------------------------------------------------------------------------------

shards_of_rank_0 = predict(
    3,
    wrong=[2, 2.5, 1, 10],
    hints={
        2: "with two each, four ranks hold eight of the ten",
        2.5: "a shard is never cut: that is what keeps its sum the same",
        10: "that is the job of one rank",
    },
    hint="shares of shards are dealt like shares of samples",
    why="3, 3, 2 and 2: a shard is never cut, so the ranks may differ by one",
)
spare_waits = predict(
    0,
    wrong=[2, 30, 6, 8],
    hints={
        2: "that is the last call; what is it waiting for, when the round is full?",
        30: "that is the last call by default; what is it waiting for, when the round is full?",
        6: "that is how long it takes until the loss is noticed; the question is what comes after",
        8: "the first 6 of these are for noticing the loss; the question is what comes after",
    },
    hint="how many nodes may still come, once the spare is in?",
    why="with the spare the round has as many nodes as it may have, so nobody waits for more",
)


# --- evidence -----------------------------------------------------------------------------------------------------

_JOBS = {"A": "rank 2 is slow", "B": "rank 1 hangs", "C": "rank 0 was killed", "D": "rank 0 hangs"}
culprits = match(
    _JOBS,
    wrong=[
        {letter: _JOBS[other] for letter, other in zip("ABCD", "BADC", strict=True)},
        _JOBS | {"B": "rank 0 was killed", "C": "rank 1 hangs"},
        _JOBS | {"B": "rank 0 hangs", "D": "rank 1 hangs"},
        {"A": "rank 2 is slow"},
        _JOBS | {"A": "rank 1 is slow"},
    ],
    hint="who has no error, and how long after their last step did the others have theirs?",
    why="a death is noticed at once, a hang after the timeout; and who is slow works while the others wait",
)

# --- bets ---------------------------------------------------------------------------------------------------------

_BETS = {"A": True, "B": False, "C": False, "D": False, "E": False}
_PARTS = {
    "A": "part 4 (one digest)",
    "B": "part 1 (the batch)",
    "C": "part 6 (a rank that hangs)",
    "D": "part 5 (what holds it together)",
    "E": "part 3 (stops that were planned)",
}

bets = checks.bets(
    _BETS,
    _PARTS,
    wrong=[dict.fromkeys(_BETS, True), dict.fromkeys(_BETS, False), _BETS | {"D": True}, _BETS | {"B": 0}],
    why="A is true, and it is the only one",
)
