"""What a notebook must be: sizes, tags, commands, links, and outputs that were committed with it."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from course_lib.lab.builder.source import Built, tags

MOST_LINES = 20  # of code in a cell
MOST_BYTES = 6_000_000  # of all notebooks together
QUESTIONS = 10  # of the quiz that ends each notebook
IGNORED, RAISES = "nbval-ignore-output", "raises-exception"
_FORBIDDEN = {
    r"\binput\(": "input() waits for ever where nobody types",
    r"clear_output": "clear_output removes other outputs: update a display through its display_id",
    r"(?i)\bsvg\b": "SVG makes files large and is not shown everywhere: use PNG",
    r"subprocess\.(run|call|Popen|check_)|os\.(system|popen)": "use a ! line, or start() of lab.launch",
    r"(?i)#\s*nbval_": "say it with a tag of the cell, not with a comment",
    r"^\s*!!|=\s*!|^\s*%(sx|sc|system)\b|^%%(sx|sh|bash|script)": "its exit code is lost: one command in a ! line",
}


def source_findings(built: Built, names: list[str]) -> list[str]:
    """What is wrong with a source, a line each; `names` are those of all sources."""
    cells = built.student.cells
    low, high = (10, 14) if built.name.startswith("00") else (20, 45)
    found = []
    if not low <= len(cells) <= high:
        found.append(f"{built.name}: {len(cells)} cells, not {low} to {high}")
    code = [cell for cell in cells if cell.cell_type == "code"]
    if not code or not re.search(r"^setup\(", code[0].source, re.MULTILINE):
        found.append(f"{built.name}: the first code cell does not call setup()")
    found += _link_findings(built, names) + _quiz_findings(built)
    for notebook in (built.student, built.solutions):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                found += [f"{built.name}: cell {cell['id']}: {problem}" for problem in _cell_findings(cell)]
    return list(dict.fromkeys(found))


def _cell_findings(cell: NotebookNode) -> Iterator[str]:
    lines = [line for line in cell.source.split("\n") if line.strip() and not line.strip().startswith("#")]
    if len(lines) > MOST_LINES:
        yield f"{len(lines)} lines of code, more than {MOST_LINES}"
    for pattern, why in _FORBIDDEN.items():
        if (match := re.search(pattern, cell.source, re.MULTILINE)) is not None:
            yield f"{match[0].strip()!r}: {why}"
    commands = [line.strip()[1:] for line in lines if re.match(r"\s*![^!]", line)]
    for command in commands:
        if not _is_one_command(command):
            yield f"!{command.strip()}: one command in a ! line, without |, ;, & or a line's end"
    if commands and IGNORED not in tags(cell):
        yield f"the output of a ! line differs from machine to machine: tag the cell {IGNORED}"
    if {IGNORED, RAISES} <= tags(cell):
        yield f"{RAISES} with {IGNORED} passes whatever happens: use one of them"
    if commands and RAISES in tags(cell):
        yield f"a failed command's message differs from machine to machine: use expect_failure() and {IGNORED}"
    if "nbval-skip" in tags(cell):
        yield "a skipped cell is not tested"


def _is_one_command(command: str) -> bool:
    try:
        parts = list(shlex.shlex(command, posix=True, punctuation_chars="|;&"))
    except ValueError:
        return False
    return not any(set(part) <= set("|;&") for part in parts) and not command.endswith("\\")


def _link_findings(built: Built, names: list[str]) -> list[str]:
    """A link to the next notebook, by its name if it exists already; other relative links lead to files."""
    text = "\n".join(cell.source for cell in built.student.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)", text)
    later = [name for name in names if name > built.name]
    found = []
    if later and f"{later[0]}.ipynb" not in links:
        found.append(f"{built.name}: there is no link to the next notebook, {later[0]}.ipynb")
    for link in links:
        target = built.path.parents[1] / link
        to_come = re.fullmatch(r"\d\d_\w+\.ipynb", link) and (Path(link).stem in names or link[:2] > max(names)[:2])
        mine = link == f"solutions/{built.name}.ipynb"
        if "://" not in link and not to_come and not mine and not target.exists():
            found.append(f"{built.name}: the link {link} leads nowhere")
    return found


def _quiz_findings(built: Built) -> list[str]:
    """The self-quiz is a section of its own, a numbered list in which each answer is folded inside its question.

    In the fold stands HTML: Markdown between two tags would be shown as it is, with its backticks.
    """
    text = "\n".join(cell.source for cell in built.student.cells if cell.cell_type == "markdown")
    quiz = re.search(r"^## Ten questions.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    items = re.split(r"^(?=\d+\. )", quiz[0], flags=re.MULTILINE)[1:] if quiz else []
    good = sum(_is_question(item, number) for number, item in enumerate(items, 1))
    folds = quiz[0].count("<details>") if quiz else 0
    wanted = (
        "a section 'Ten questions' is a list, 1. to 10., and below each question stands, as far in as its words, "
        "<details><summary>answer</summary>…</details> without backticks or blank lines"
    )
    whole = good == folds == QUESTIONS
    return [] if whole else [f"{built.name}: {wanted}; this notebook has {good} such of {folds} folds"]


def _is_question(item: str, number: int) -> bool:
    fold = r"<details><summary>answer</summary>(?:(?!\n\n|`|<details>).)+</details>\s*"
    mark = f"{number}. "
    return re.fullmatch(rf"{re.escape(mark)}\S.*?\n {{{len(mark)}}}{fold}", item, re.DOTALL) is not None


def committed_findings(path: Path, wanted: NotebookNode) -> list[str]:
    """How the notebook at `path` differs from what its source gives, outputs aside, and what is wrong with those."""
    name = f"{path.parent.name}/{path.name}"
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError) as error:
        return [f"{name} cannot be read ({type(error).__name__}): run make notebooks"]
    if [_outline(cell) for cell in cells] != [_outline(cell) for cell in wanted.cells]:
        pairs = [(_outline(a), _outline(b)) for a, b in zip(cells, wanted.cells, strict=False)]
        first = next((b for a, b in pairs if a != b), None)
        where = f"at cell {first[0]}" if first is not None else "in its number of cells"
        return [f"{name} differs from its source {where}: run make notebooks"]
    return [
        f"{name}: cell {cell['id']}: {problem}"
        for cell in cells
        if cell["cell_type"] == "code"
        for problem in output_findings(cell)
    ]


def _outline(cell: dict[str, Any]) -> tuple[object, ...]:
    return cell.get("id"), cell["cell_type"], "".join(cell["source"]), sorted(cell["metadata"].get("tags", []))


def output_findings(cell: dict[str, Any]) -> Iterator[str]:
    """What no committed code cell may have: no run, an error that was not meant, an SVG, a strict stderr."""
    names, outputs = cell["metadata"].get("tags", []), cell["outputs"]
    if cell["execution_count"] is None and "".join(cell["source"]).strip():
        yield "was never executed, so nbval would not compare its output"
    for output in outputs:
        if output["output_type"] == "error" and RAISES not in names:
            yield f"holds an error: {output['ename']}"
        if "image/svg+xml" in output.get("data", {}):
            yield "holds an SVG"
        if output.get("name") == "stderr" and IGNORED not in names:
            yield f"writes to stderr, which is never the same twice: silence it, or tag the cell {IGNORED}"
    if RAISES in names and not any(output["output_type"] == "error" for output in outputs):
        yield f"is tagged {RAISES} and raises nothing"
