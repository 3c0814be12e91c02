"""Exercises: the blocks they are made of, and that each one of the course accepts its solution and refuses others."""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jupytext
import numpy as np
import pytest
import torch
from helpers import REPO

from course_lib.lab.answers import is_open, same
from course_lib.lab.builder.make import sources
from course_lib.lab.builder.source import tags
from course_lib.lab.checks import Case, Exercise, case, choose, match, predict, write
from course_lib.lab.exercises import all_exercises

COURSE = all_exercises()
SOURCES = {path.stem: path for path in sources(REPO / "notebooks", [])}


# --- every exercise of the course ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COURSE)
def test_an_exercise_accepts_its_solution_and_refuses_what_is_wrong(name: str, tmp_path: Path) -> None:
    exercise = COURSE[name]
    assert exercise.verdict(exercise.solution, *exercise.make_evidence(tmp_path / "solution")).startswith("solved")
    assert len(exercise.wrong) >= 2, "give at least two wrong answers that people may well come to"
    for number, answer in enumerate(exercise.wrong):
        verdict = exercise.verdict(answer, *exercise.make_evidence(tmp_path / str(number)))
        assert verdict.startswith("not yet: ") and "\n" not in verdict, f"wrong[{number}]: {verdict}"
    assert exercise.verdict(..., *exercise.make_evidence(tmp_path / "open")).startswith("open")


def checked(source: str) -> set[str]:
    """The checks that a source calls: `check.NAME(…)` as a statement. Within another call it is evidence."""
    calls = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    names = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
    return {name.removeprefix("check.") for name in names if name.startswith("check.")}


@pytest.mark.parametrize("stem", SOURCES)
def test_whatever_a_notebook_checks_is_an_exercise_of_its_own_and_no_exercise_is_left_out(stem: str) -> None:
    mine = {name.split(".")[1] for name in COURSE if name.startswith(f"n{stem[:2]}")}
    assert checked(SOURCES[stem].read_text()) == mine


# In each notebook an exercise whose evidence the learner meets there for the first time, and where the evidence is.
UNSEEN = {
    "00_start_here": ("done_again", "| start 2 | the snapshot after 20 steps | 34 | killed |"),
    "01_single_gpu": ("bugs", "check.five_curves()"),
    "02_data_parallel": ("culprits", "check.suspects("),
    "03_ddp": ("bugs", "trace(bug) for"),
    "04_torchrun": ("who_died", "recorded/who_died.txt"),
    "05_snapshots": ("left_out", "fig05_time.lost_pieces()"),
    "06_elastic": ("culprits", "evidence(read_scenes("),
    "07_kubernetes_mingpt": ("flaws", "evidence(record, letter)"),
    "08_goodput": ("causes", "evidence(record)"),
}


@pytest.mark.parametrize("stem", SOURCES)
def test_an_exercise_in_each_notebook_has_evidence_that_was_not_shown_before(stem: str) -> None:
    assert stem in UNSEEN, "name an exercise whose evidence the learner has not seen before"
    name, evidence = UNSEEN[stem]
    cells = jupytext.reads(SOURCES[stem].read_text(), fmt="py:percent").cells
    shown = next(n for n, cell in enumerate(cells) if evidence in cell.source)
    asked = next(n for n, cell in enumerate(cells) if f"check.{name}(" in cell.source)
    assert "exercise" in tags(cells[shown]) and shown <= asked <= shown + 2


def test_every_notebook_has_all_kinds_of_exercises() -> None:
    kinds: dict[str, set[str]] = {}
    for name, exercise in COURSE.items():
        kinds.setdefault(name.split(".")[0], set()).add(exercise.kind)
    # The first notebook is fourteen cells long.
    assert {module: {"write", "predict", "diagnose"} - has for module, has in kinds.items() if module != "n00"} == {
        module: set() for module in kinds if module != "n00"
    }


# --- the blocks ---------------------------------------------------------------------------------------------------


def shares(total: int, parts: int) -> list[int]:
    """The sizes of the parts, which differ by at most one."""
    return [total // parts + (part < total % parts) for part in range(parts)]


SHARES = write(
    case(8, 2),
    case(7, 3, hint="seven samples for three ranks: who gets the one left over?"),
    case(1, 2, hint="a rank may get nothing"),
    solution=shares,
    wrong=[lambda total, parts: [total // parts] * parts, lambda total, parts: total],
    why="low ranks get more",
)


def test_a_function_to_write() -> None:
    assert SHARES.verdict(shares) == "solved: low ranks get more"
    verdict = SHARES.verdict(SHARES.wrong[0])
    assert (
        verdict == "not yet: for (7, 3) it gives [2, 2, 2]: seven samples for three ranks: who gets the one left over?"
    )
    assert SHARES.verdict(SHARES.wrong[1]) == "not yet: for (8, 2) it gives 8"
    assert SHARES.verdict(lambda total, parts: total / 0).startswith("not yet: for (8, 2) it raised ZeroDivisionError")
    assert "without calling it" in SHARES.verdict(shares(8, 2))
    assert SHARES.verdict(lambda total: 1).startswith("not yet: for (8, 2) it raised TypeError")


def test_a_function_may_change_its_arguments() -> None:
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    exercise = write(Case(lambda: (torch.ones(2),)), case(torch.arange(3.0)), solution=lambda t: 2 * t, wrong=[])
    assert exercise.verdict(doubled) == exercise.verdict(doubled) == "solved"


def test_a_number_to_predict(capsys: pytest.CaptureFixture[str]) -> None:
    exercise = predict(7, wrong=[10, 37], hints={10: "the snapshot was after step 30"}, hint="think of the snapshot")
    assert exercise.verdict(7) == exercise.verdict(7.0) == exercise.verdict(torch.tensor(7)) == "solved"
    assert exercise.verdict(10) == "not yet: the snapshot was after step 30"
    assert exercise.verdict(37) == "not yet: 37 is too high; think of the snapshot"
    assert exercise.verdict(3) == "not yet: 3 is too low; think of the snapshot"
    assert exercise.verdict("7") == "not yet: give a number; this is '7'"
    assert "give a number" in exercise.verdict(True) and "give a number" in exercise.verdict([1, 2])
    assert "solved" not in exercise.verdict(math.nan)
    assert predict(100, wrong=[], close=0.05).verdict(104) == "solved"
    assert predict(100, wrong=[], close=0.05).verdict(106).startswith("not yet")
    exercise(...)
    assert capsys.readouterr().out.startswith("open: ")
    exercise(9)
    assert capsys.readouterr().out == "not yet: 9 is too high; think of the snapshot\n"


def test_a_letter_to_choose() -> None:
    exercise = choose("b", hints={"a": "its trace is the longest, but the last", "c": "the agent only reports"})
    assert exercise.verdict("b") == exercise.verdict(" B") == "solved"
    assert exercise.verdict("a") == "not yet: its trace is the longest, but the last"
    assert exercise.verdict("d") == exercise.verdict(2) == "not yet: answer with one letter of a, b, c"
    assert set(exercise.wrong) == {"a", "c"}


def test_pairs_to_match() -> None:
    exercise = match(
        {"1": "optimizer", "2": "position", "3": "nothing missing"}, wrong=[], hint="look at curve 1 first"
    )
    assert exercise.verdict({"1": "Optimizer", "2": "position", "3": "nothing_missing"}) == "solved"
    some = {"1": "position", "2": "optimizer", "3": "nothing missing"}
    assert exercise.verdict(some) == "not yet: 1 of 3 are right; look at curve 1 first"
    assert exercise.verdict({"1": "optimizer"}) == "not yet: give a dict with the keys 1, 2, 3"
    assert "none of nothing missing, optimizer, position" in exercise.verdict(some | {"2": "gremlins"})
    assert exercise.verdict(some | {"1": ...}).startswith("open")


def test_evidence_goes_to_the_judge_and_an_error_in_it_is_an_answer() -> None:
    def judge(answer: Any, run: Path) -> str | None:
        return None if (run / answer).exists() else f"there is no {answer}"

    exercise = Exercise("diagnose", judge, "here", ["there"])
    assert exercise.verdict("nowhere", Path(__file__).parent) == "not yet: there is no nowhere"
    assert exercise.verdict(Path(__file__).name, Path(__file__).parent) == "solved"
    assert exercise.verdict(3, Path()).startswith("not yet: your answer raised TypeError")


# --- unfilled, and equal ------------------------------------------------------------------------------------------


def only_dots(x: int) -> int: ...


def documented(x: int) -> int:  # type: ignore[empty-body]
    """What it shall do."""
    ...


def partly(x: int) -> int:
    factor: Any = ...
    return int(factor * x)


def in_a_loop(x: int) -> int:
    for _ in range(x):
        ...
    return x


def returned(x: int) -> Any:
    return ...


class Unfilled:
    def done(self) -> int:
        return 1

    def forward(self, x: int) -> int: ...


def filled(x: Any) -> Any:
    return x[..., 0]


@pytest.mark.parametrize("answer", [..., [1, ...], {"a": (...,)}, only_dots, documented, partly, in_a_loop, returned])
def test_unfilled_answers_are_open(answer: Any) -> None:
    assert is_open(answer) and SHARES.verdict(answer).startswith("open")


@pytest.mark.parametrize("answer", [None, 0, "...", [], filled, shares, len, int, Exercise, lambda x: x, np.ones(2)])
def test_filled_answers_are_not(answer: Any) -> None:
    assert not is_open(answer)


def test_a_function_without_a_source_and_a_class() -> None:
    names: dict[str, Any] = {}
    exec("def empty(x):\n    '''Says.'''\n    ...\ndef full(x):\n    return x\nlazy = lambda x: ...", names)
    assert is_open(names["empty"]) and is_open(names["lazy"]) and not is_open(names["full"])
    assert is_open(Unfilled)


@pytest.mark.parametrize(
    ("actual", "expected", "close", "equal"),
    [
        (1, 1.0, 0, True),
        (1 + 1e-9, 1.0, 0, False),
        (1 + 1e-9, 1.0, 1e-6, True),
        (True, 1, 0, False),
        (1, True, 0, False),
        ("1", 1, 0, False),
        ([1, 2], (1, 2), 0, True),
        ([1, 2, 3], [1, 2], 0, False),
        ({"a": [1.0]}, {"a": [1.0]}, 0, True),
        ({"a": 1, "b": 2}, {"a": 1}, 0, False),
        (torch.ones(2), torch.ones(2), 0, True),
        (np.ones(2), torch.ones(2), 0, True),
        (torch.ones(2), torch.ones(2, 1), 0, False),
        (torch.ones(2) + 1e-4, torch.ones(2), 1e-3, True),
        (torch.ones(2) + 1e-4, torch.ones(2), 0, False),
        (torch.zeros(0), torch.zeros(0), 0, True),
        ([1, 1], torch.ones(2), 0, False),
        (None, None, 0, True),
        (0, None, 0, False),
        ({1, 2}, {2, 1}, 0, True),
    ],
)
def test_equality(actual: Any, expected: Any, close: float, equal: bool) -> None:
    assert same(actual, expected, close) is equal


def test_the_course_test_would_notice_a_bad_exercise(tmp_path: Path) -> None:
    check: Callable[..., None] = test_an_exercise_accepts_its_solution_and_refuses_what_is_wrong
    bad = {
        "refuses its solution": Exercise("predict", lambda answer: "no", 1, [2, 3]),
        "accepts what is wrong": Exercise("predict", lambda answer: None, 1, [2, 3]),
        "has one wrong answer": predict(1, wrong=[2]),
        "hints in two lines": Exercise("predict", lambda answer: None if answer == 1 else "a\nb", 1, [2, 3]),
    }
    for name, exercise in bad.items():
        COURSE[name] = exercise
        try:
            with pytest.raises(AssertionError):
                check(name, tmp_path)
        finally:
            del COURSE[name]
