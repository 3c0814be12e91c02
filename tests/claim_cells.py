"""Find the claim cells of a notebook, and run them again on records that were changed."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from changed_records import CHANGES, WEIGHTS, read_record, written
from IPython.core.inputtransformer2 import TransformerManager
from kernels import IGNORE, Kernel

from course_lib.lab.builder.source import Built, tags


@dataclass(frozen=True)
class Cell:
    """A code cell; `runs` are the variables whose records a claim cell speaks of, and empty for every other cell."""

    name: str
    source: str
    runs: frozenset[str]


def cells_of(built: Built) -> list[Cell]:
    """The learner's code cells. A strict one that names a run, or what came out of its record, is a claim cell.

    Cells of exercises are none: they speak of the learner's answer.
    """
    exercises = {cell["id"] for cell in built.solutions.cells}
    known: dict[str, frozenset[str]] = {}
    found = []
    for cell in built.student.cells:
        if cell.cell_type == "code":
            spoken = _follow(cell.source, known)
            strict = IGNORE not in tags(cell) and cell["id"] not in exercises
            found.append(Cell(cell["id"], cell.source, spoken if strict else frozenset()))
    return found


def _follow(source: str, known: dict[str, frozenset[str]]) -> frozenset[str]:
    """The runs that a cell's code reads; `known`, which variables come from which runs, is brought up to date."""
    spoken: set[str] = set()
    begun: set[str] = set()
    for statement in ast.parse(TransformerManager().transform_cell(source)).body:  # type: ignore[no-untyped-call]
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        read = {name.id for name in names} - bound
        runs = frozenset[str]().union(*(known.get(name, ()) for name in read))
        spoken |= runs - begun  # the cell that empties a run's directory writes the record
        called = {ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
        begun |= bound if "fresh" in called else set()
        for name in bound:
            known[name] = frozenset({name}) if "fresh" in called else frozenset() if "start" in called else runs
    return frozenset(spoken)


def findings(it: Kernel, cells: list[Cell]) -> list[str]:
    """Run the cells in order, and each claim cell again on changed records; a finding for each that it did not notice.

    A claim cell must read the record itself: what an earlier cell took from it does not change with it.
    """
    found = []
    for cell in cells:
        shown = _shown(it, cell)
        assert "error" not in shown, f"{cell.name}: {shown}"
        for variable in sorted(cell.runs):
            run = Path(it.text(f"print({variable})").strip())
            sound = read_record(run)
            changes = CHANGES | (WEIGHTS if "same_weights" in cell.source else {})
            records = {what: record for what, change in changes.items() if (record := change(sound)) != sound}
            assert len(records) >= 2, f"{cell.name}: {variable} holds nothing that a claim could rest on"
            for what, record in records.items():
                with written(record):
                    noticed = _shown(it, cell) != shown
                if not noticed:
                    found.append(f"{cell.name} shows the same with {what} in {variable}: {shown}")
            if _shown(it, cell) != shown:
                found.append(f"{cell.name} shows something else when it is run again: {shown}")
    return found


def _shown(it: Kernel, cell: Cell) -> dict[str, Any]:
    """What a cell shows of what nbval compares: all but pictures, and of errors only that there is one."""
    shown: dict[str, Any] = {}
    for output in it.outputs(it.send(cell.source), timeout=120):
        if output["type"] == "error":
            shown["error"] = f"{output['ename']}: {output['evalue']}"
        for kind, text in {"stream": output.get("text"), **output.get("data", {})}.items():
            if text is not None and not kind.startswith("image/"):
                shown[kind] = shown.get(kind, "") + str(text)
    return shown
