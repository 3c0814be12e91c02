"""Exercises of notebook 07."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from course_lib.lab import checks
from course_lib.lab.answers import as_number
from course_lib.lab.checks import Exercise, case, match, predict, write
from course_lib.lab.pytorchjob.policies import replaced_by_operator, restarted_by_kubelet

# --- what the operator injects --------------------------------------------------------------------------------------

_INJECTED = {"PET_NNODES": 3, "WORLD_SIZE": 12, "RANK": 2}  # of gpt-worker-1, with nprocPerNode "4"
_HINTS = {
    "PET_NNODES": "it is for torchrun's --nnodes, and a node is a pod",
    "WORLD_SIZE": "the operator counts processes: pods × nprocPerNode",
    "RANK": "the operator starts pods and knows of no process in them: it numbers the pods, from the master on",
}


def _judge_injected(answer: Any) -> str | None:
    if not isinstance(answer, Mapping) or set(answer) != set(_INJECTED):
        return f"give a dict with the keys {', '.join(_INJECTED)}"
    for name, value in _INJECTED.items():
        given = answer[name]
        text = given.strip() if isinstance(given, str) else given
        number = float(text) if isinstance(text, str) and text.isdecimal() else as_number(text)
        if number != value:
            return f"{name}: {_HINTS[name]}"
    return None


injected = Exercise(
    "predict",
    _judge_injected,
    _INJECTED,
    wrong=[
        {"PET_NNODES": 3, "WORLD_SIZE": 12, "RANK": 8},
        {"PET_NNODES": 12, "WORLD_SIZE": 12, "RANK": 2},
        {"PET_NNODES": 3, "WORLD_SIZE": 3, "RANK": 2},
        {"PET_NNODES": 3, "WORLD_SIZE": 12, "RANK": 11},
        {"PET_NNODES": 3, "WORLD_SIZE": 12},
        12,
    ],
    why="WORLD_SIZE counts processes and RANK counts pods: no pair of numbers that a training script could use",
)

# --- what becomes of a container ------------------------------------------------------------------------------------


def next_move_of(policy: Any, code: int) -> str | None:
    """By the rules of the package, in the words of the exercise."""
    if restarted_by_kubelet(policy, code):
        return "same pod"
    return "new pod" if replaced_by_operator(policy, code) else None


def _never_means_never(policy: str, code: int) -> str | None:
    """ExitCode as if it were OnFailure."""
    return "same pod" if policy == "Always" or (policy != "Never" and code != 0) else None


def _any_signal_or_error(policy: str, code: int) -> str | None:
    """ExitCode retries whatever isn't 0."""
    return "new pod" if policy == "ExitCode" and code else next_move_of(policy, code)


def _always_if_failed(policy: str, code: int) -> str | None:
    return None if code == 0 else next_move_of(policy, code)


def _above_128(policy: str, code: int) -> str | None:
    return None if policy == "ExitCode" and code == 128 else next_move_of(policy, code)


def _in_place(policy: str, code: int) -> str | None:
    """ExitCode restarts in the same pod."""
    return "same pod" if next_move_of(policy, code) else None


def _up_to_127_named(policy: str, code: int) -> str | None:
    """ExitCode as a list of the codes that one has met."""
    return ("new pod" if code not in (0, 1, 2, 127) else None) if policy == "ExitCode" else next_move_of(policy, code)


def _words_first(exercise: Exercise) -> Exercise:
    """Another word for a move is told before anything else: it is no wrong rule."""

    def judge(function: Any) -> str | None:
        said: list[str] = []

        def listened(policy: str, code: int) -> Any:
            given = function(policy, code)
            if isinstance(given, str) and given not in ("same pod", "new pod"):
                moves = '"same pod", "new pod" or None (no text)'
                said.append(f"for ({policy!r}, {code}) it gives {given!r}; a move is {moves}")
            return given

        verdict = exercise.judge(listened if callable(function) else function)
        return said[0] if said else verdict

    return replace(exercise, judge=judge)


next_move = _words_first(
    write(
        *(case("Never", code, hint="Never is never, whatever the code") for code in (0, 1, 137)),
        case("OnFailure", 0, hint="a success is no failure"),
        *(case("OnFailure", code, hint="OnFailure takes each code but 0 alike") for code in (1, 2, 137)),
        *(case("Always", code, hint="Always starts a container again after its success, too") for code in (0, 1)),
        *(case("ExitCode", code, hint="with ExitCode, codes below 128 are permanent") for code in (1, 2, 64, 126)),
        *(case("ExitCode", code, hint="from 128 on, ExitCode gets a new pod") for code in (128, 137, 143)),
        case("ExitCode", 0, hint="it has succeeded"),
        case("ExitCode", 127, hint="the first retryable code is 128"),
        solution=next_move_of,
        wrong=[
            _never_means_never,
            _any_signal_or_error,
            _always_if_failed,
            _above_128,
            _in_place,
            _up_to_127_named,
            lambda policy, code: str(next_move_of(policy, code)),
            lambda policy, code: (next_move_of(policy, code) or "").title() or None,
        ],
        why="and torchrun answers 1 to everything, so under ExitCode nothing that it ends with is tried again",
    )
)

# --- the limit ------------------------------------------------------------------------------------------------------

masters_lost = predict(
    1,
    wrong=[6, 2, 5, 0, 3],
    hints={
        6: "that counts losses; the limit counts restarts of containers, of all pods together",
        2: "with the second loss the count is 6, and the job fails when the limit is reached, not when it is passed",
        5: "that counts losses, and up to the limit; how many containers restart at each?",
        3: "how many containers restart at each loss?",
        0: "after the first loss the count is 3, and the limit is 6",
    },
    hint="each loss of the master restarts three containers",
    why="three restarts, then six, which is the limit: the second loss ends the job",
)

# --- evidence -------------------------------------------------------------------------------------------------------

_FLAWS = {
    "A": "no shared volume",
    "B": "--nnodes=$(WORLD_SIZE)",
    "C": "a shell is process 1",
    "D": "ExitCode with torchrun",
}
flaws = match(
    _FLAWS,
    wrong=[
        {letter: _FLAWS[other] for letter, other in zip("ABCD", "BADC", strict=True)},
        _FLAWS | {"A": "a shell is process 1", "C": "no shared volume"},
        _FLAWS | {"D": "a shell is process 1"},
        {"A": "no shared volume"},
        _FLAWS | {"B": "the network"},
    ],
    hint="look for the line that should be there and is not: a rank, a stop, a snapshot, a restart",
    why="three of the four were told by what nobody said",
)

# --- bets -----------------------------------------------------------------------------------------------------------

_BETS = {"A": False, "B": True, "C": True, "D": False, "E": False}
_PARTS = {
    "A": "part 2 (what the operator injects)",
    "B": "part 4 (a pod is killed)",
    "C": "part 4 (the bits)",
    "D": "part 4 (the rules)",
    "E": "part 5 (the traps)",
}

bets = checks.bets(
    _BETS,
    _PARTS,
    wrong=[dict.fromkeys(_BETS, True), dict.fromkeys(_BETS, False), _BETS | {"D": True}, _BETS | {"B": "True"}],
    why="B and C are true, and the other three are what people lose weeks to",
)
