"""Exercises that check an answer: open, not yet (with a hint), or solved.

An exercise is a value in a notebook's module of exercises, and checks an answer when it is called:

    from course_lib.lab.exercises import n04 as check

    check.steps_lost(7)      # prints one line: "solved", "not yet: …" or "open: …"

It never raises and never shows the answer, so a notebook with unfilled exercises runs to its end. Beside the check
stand its solution and wrong answers that people may well give; one test runs all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from course_lib.lab.answers import as_number, is_open, one_line, plain, same, short

Judge = Callable[..., str | None]
Kind = Literal["write", "predict", "diagnose"]


@dataclass(frozen=True)
class Exercise:
    """`judge(answer, *evidence)` returns None for a right answer, else one line that hints and does not tell.

    `evidence` is what the notebook passes beside the answer, such as a run directory; for the test
    `make_evidence(folder)` makes it. `why` is said to those who have solved it.
    """

    kind: Kind
    judge: Judge
    solution: Any
    wrong: Sequence[Any]
    why: str = ""
    make_evidence: Callable[[Path], tuple[Any, ...]] = lambda folder: ()

    def __call__(self, answer: Any, *evidence: Any) -> None:
        """Print in one line where the answer stands."""
        print(self.verdict(answer, *evidence))

    def verdict(self, answer: Any, *evidence: Any) -> str:
        """The line that a call prints."""
        if is_open(answer):
            return "open: put your answer in place of the ... and run this cell and the ones that it needs again"
        try:
            hint = self.judge(answer, *evidence)
        except Exception as error:
            hint = f"your answer raised {one_line(error)}"
        if hint is not None:
            return f"not yet: {hint}"
        return f"solved{': ' + self.why if self.why else ''}"


def write(
    *cases: "Case", solution: Callable[..., Any], wrong: Sequence[Callable[..., Any]], why: str = "", close: float = 0.0
) -> Exercise:
    """A function to write: it must give what the solution gives for each case; `close` is a relative tolerance."""

    def judge(function: Callable[..., Any]) -> str | None:
        if not callable(function):
            return f"give the function itself, without calling it; this is a {type(function).__name__}"
        for case in cases:
            expected = solution(*case.fresh())
            shown = ", ".join(map(short, case.fresh()))
            try:
                actual = function(*case.fresh())
            except Exception as error:
                return f"for ({shown}) it raised {one_line(error)}{case.because}"
            if is_open(actual):
                return f"for ({shown}) it returns ..."
            if not same(actual, expected, close):
                return f"for ({shown}) it gives {short(actual)}{case.because}"
        return None

    return Exercise("write", judge, solution, wrong, why)


@dataclass(frozen=True)
class Case:
    """Arguments that a function is tried with, and what to think about when it fails there.

    `make` gives new arguments at each call, since a function may change what it gets.
    """

    make: Callable[[], tuple[Any, ...]]
    hint: str = ""

    def fresh(self) -> tuple[Any, ...]:
        """New arguments."""
        return self.make()

    @property
    def because(self) -> str:
        return f": {self.hint}" if self.hint else ""


def case(*arguments: Any, hint: str = "") -> Case:
    """A case with plain arguments, of which every call gets a copy."""
    return Case(lambda: deepcopy(arguments), hint)


def predict(
    truth: float,
    *,
    wrong: Sequence[float],
    hints: Mapping[float, str] | None = None,
    hint: str = "",
    close: float = 0.0,
    why: str = "",
) -> Exercise:
    """A number to predict, within `close` of the truth, relative to it.

    `hints` answers certain wrong numbers; all others get `hint`, and whether they are too high or too low.
    """

    def judge(guess: Any) -> str | None:
        number = as_number(guess)
        if number is None:
            return f"give a number; this is {short(guess)}"
        if same(number, float(truth), close):
            return None
        for value, answer in (hints or {}).items():
            if same(number, float(value), close):
                return answer
        return f"{short(guess)} is too {'high' if number > truth else 'low'}{'; ' + hint if hint else ''}"

    return Exercise("predict", judge, truth, wrong, why)


def choose(right: str, *, hints: Mapping[str, str], why: str = "") -> Exercise:
    """One letter of several; `hints` has every wrong one, and says what speaks against it."""

    def judge(answer: Any) -> str | None:
        letter = str(answer).strip().lower()
        if letter == right.lower():
            return None
        told = {option.lower(): hint for option, hint in hints.items()}
        return told.get(letter, f"answer with one letter of {', '.join(sorted([*told, right.lower()]))}")

    return Exercise("diagnose", judge, right, tuple(hints), why)


def match(right: Mapping[str, str], *, wrong: Sequence[Mapping[str, str]], hint: str = "", why: str = "") -> Exercise:
    """A dict that pairs each piece of evidence with its cause; a wrong one learns how many pairs are right."""

    def judge(answer: Any) -> str | None:
        if not isinstance(answer, Mapping) or set(answer) != set(right):
            return f"give a dict with the keys {', '.join(sorted(right))}"
        values = sorted(set(right.values()))
        for key, value in answer.items():
            if plain(value) not in {plain(name) for name in values}:
                return f"{key}: {short(value)} is none of {', '.join(values)}"
        count = sum(plain(answer[key]) == plain(value) for key, value in right.items())
        return None if count == len(right) else f"{count} of {len(right)} are right{'; ' + hint if hint else ''}"

    return Exercise("diagnose", judge, dict(right), wrong, why)


def bets(
    right: Mapping[str, bool], parts: Mapping[str, str], *, wrong: Sequence[Mapping[str, Any]], why: str = ""
) -> Exercise:
    """True or False for each letter; who loses some is told in which parts of the notebook to read again."""

    def judge(answer: Any) -> str | None:
        if not isinstance(answer, Mapping) or set(answer) != set(right):
            return f"give a dict with the keys {', '.join(right)}"
        for letter in right:
            if not isinstance(answer[letter], bool | np.bool_):
                return f"{letter}: put True or False, without quotes; this is {short(answer[letter])}"
        lost = [part for letter, part in parts.items() if bool(answer[letter]) != right[letter]]
        told = ", ".join(dict.fromkeys(lost))
        return f"{len(right) - len(lost)} of {len(right)}; read again: {told}" if lost else None

    return Exercise("predict", judge, right, wrong, why)
