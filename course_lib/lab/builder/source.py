"""From one source to two notebooks: the learner's, and its solutions.

A region in a code cell holds what only the solution has, and what the learner finds instead (`...` if nothing is said):

    # SOLUTION
    answer = 7
    # STUDENT: answer = ...
    # END

The solutions have the first code cell, every cell with a region, and the cells tagged "exercise". A cell tagged
"solution" is only in the solutions.
"""

import re
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import jupytext  # type: ignore[import-untyped]
import nbformat
from nbformat import NotebookNode

from course_lib.engine import UsageError

_START = re.compile(r"(\s*)# SOLUTION\s*$")
_INSTEAD = re.compile(r"\s*# STUDENT: ?(.*)$")
_END = re.compile(r"\s*# END\s*$")
_OWN_TAGS = {"exercise", "solution"}
_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


@dataclass(frozen=True)
class Built:
    """Both notebooks of the source `path`, not executed."""

    path: Path
    student: NotebookNode
    solutions: NotebookNode

    @property
    def name(self) -> str:
        return self.path.stem


def build(path: Path) -> Built:
    """Read a source; raises UsageError when it is none, or has a region without an end."""
    try:
        cells = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent").cells
    except (ValueError, nbformat.ValidationError) as error:
        raise UsageError(f"{path} is no notebook in the percent format: {str(error).splitlines()[0]}") from None
    code = [cell for cell in cells if cell.cell_type == "code"]
    if not code:
        raise UsageError(f"{path} has no code cell: begin one with '# %%'")
    student = [_version(path, cell, solved=False) for cell in cells if "solution" not in tags(cell)]
    solved = [
        _version(path, cell, solved=True)
        for cell in cells
        if cell is code[0] or tags(cell) & _OWN_TAGS or (cell.cell_type == "code" and _has_region(cell))
    ]
    heading = re.search(r"^# (.+)$", cells[0].source, re.MULTILINE)
    title = heading[1] if heading else path.stem
    head = nbformat.v4.new_markdown_cell(  # type: ignore[no-untyped-call]
        f"# Solutions: {title}\n\nTo be opened after [the notebook](../{path.stem}.ipynb)."
    )
    return Built(path, _notebook(student), _notebook([head, *solved]))


def tags(cell: NotebookNode) -> set[str]:
    """The tags of a cell."""
    return set(cell.metadata.get("tags", []))


def _notebook(cells: list[NotebookNode]) -> NotebookNode:
    ids = _ids(cells)
    for cell, name in zip(cells, ids, strict=True):
        cell["id"] = name
        cell.metadata.pop("title", None)
        if kept := sorted(tags(cell) - _OWN_TAGS):
            cell.metadata["tags"] = kept
        else:
            cell.metadata.pop("tags", None)
    new = nbformat.v4.new_notebook
    notebook: NotebookNode = new(cells=cells, metadata=deepcopy(_METADATA))  # type: ignore[no-untyped-call]
    notebook.nbformat_minor = 5  # the first that has ids
    return notebook


def _ids(cells: Iterable[NotebookNode]) -> list[str]:
    """Ids that stay the same when other cells come or go: from a cell's title, else from its first line."""
    seen: Counter[str] = Counter()
    ids = []
    for cell in cells:
        words = re.sub(r"[^a-z0-9]+", "-", (cell.metadata.get("title") or cell.source.split("\n")[0]).lower()).strip(
            "-"
        )
        name = f"{'md' if cell.cell_type == 'markdown' else 'code'}-{words[:40].strip('-') or 'empty'}"
        seen[name] += 1
        ids.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return ids


def _has_region(cell: NotebookNode) -> bool:
    return any(_START.match(line) for line in cell.source.split("\n"))


def _version(path: Path, cell: NotebookNode, solved: bool) -> NotebookNode:
    copy = deepcopy(cell)
    if cell.cell_type == "code":
        copy.source = resolve(cell.source, solved, str(path))
    return copy


def resolve(source: str, solved: bool, where: str = "source") -> str:
    """A code cell's source with each region replaced by its solution, or by what the learner finds."""
    lines: list[str] = []
    indent: str | None = None
    instead: list[str] = []
    for line in source.split("\n"):
        if (start := _START.match(line)) is not None:
            if indent is not None:
                raise UsageError(f"{where}: a '# SOLUTION' begins inside another one, near {line.strip()!r}")
            indent, instead = start[1], []
        elif _END.match(line):
            if indent is None:
                raise UsageError(f"{where}: there is an '# END' without '# SOLUTION' in the cell {source[:40]!r}")
            lines += [] if solved else [indent + text if text else "" for text in instead or ["..."]]
            indent = None
        elif indent is not None and (given := _INSTEAD.match(line)) is not None:
            instead.append(given[1])
        elif indent is None or solved:
            lines.append(line)
    if indent is not None:
        raise UsageError(f"{where}: a '# SOLUTION' has no '# END' in the cell {source[:40]!r}")
    return "\n".join(lines)
