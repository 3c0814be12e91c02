"""Build all notebooks or some, or look whether the committed ones are what their sources give."""

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from course_lib.engine import UsageError
from course_lib.lab.builder.execute import BuildFailed, execute, scrub_outputs
from course_lib.lab.builder.rules import IGNORED, MOST_BYTES, committed_findings, output_findings, source_findings
from course_lib.lab.builder.source import Built, build

BUDGET_S = {"student": 45, "solutions": 15}


def sources(folder: Path, wanted: list[str]) -> list[Path]:
    """The sources in `folder`/src whose names begin with one of `wanted`, all if that is empty."""
    found = sorted((folder / "src").glob("[0-9][0-9]_*.py"))
    chosen = [path for path in found if not wanted or any(path.stem.startswith(name) for name in wanted)]
    if wanted and not chosen:
        raise UsageError(f"no notebook begins with {', '.join(wanted)}; there are {', '.join(p.stem for p in found)}")
    return chosen


def targets(folder: Path, built: Built) -> dict[str, tuple[Path, NotebookNode]]:
    """Where each of the two notebooks goes."""
    return {
        "student": (folder / f"{built.name}.ipynb", built.student),
        "solutions": (folder / "solutions" / f"{built.name}.ipynb", built.solutions),
    }


def check(folder: Path, wanted: list[str]) -> list[str]:
    """What is wrong with sources and committed notebooks, a line each. Nothing is executed."""
    names = [path.stem for path in sources(folder, [])]
    found: list[str] = []
    for path in sources(folder, wanted):
        built = build(path)
        found += source_findings(built, names)
        for target, notebook in targets(folder, built).values():
            found += committed_findings(target, notebook)
    if not wanted:
        known = {f"{name}.ipynb" for name in names}
        written = [p for p in sorted(folder.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]
        found += [f"{p.relative_to(folder)} has no source in src: remove it" for p in written if p.name not in known]
        if (size := sum(path.stat().st_size for path in written)) > MOST_BYTES:
            found.append(f"the notebooks have {size / 1e6:.1f} MB together, more than {MOST_BYTES / 1e6:.0f}")
    return found


def make(folder: Path, wanted: list[str], root: Path, force: bool = False) -> Iterator[str]:
    """Execute and write the notebooks; yields a line for each. Raises BuildFailed, and then writes no more."""
    names = [path.stem for path in sources(folder, [])]
    for path in sources(folder, wanted):
        built = build(path)
        if findings := source_findings(built, names):
            raise BuildFailed("\n".join(findings))
        for kind, (target, notebook) in targets(folder, built).items():
            started = time.monotonic()
            try:
                execute(notebook, folder)
                _refuse_bad_outputs(notebook, root)
            except BuildFailed as error:
                raise BuildFailed(f"{kind} of {built.name}: {error}") from None
            seconds = time.monotonic() - started
            state = "written" if write(target, notebook, force) else "unchanged"
            size = target.stat().st_size / 1000
            line = f"{target.relative_to(folder)}: {state}, {len(notebook.cells)} cells, {size:.0f} kB, {seconds:.0f} s"
            yield line if seconds < BUDGET_S[kind] else f"{line}, more than the {BUDGET_S[kind]} s that it may take"


def _refuse_bad_outputs(notebook: NotebookNode, root: Path) -> None:
    findings = list(scrub_outputs(notebook, root))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            findings += [f"cell {cell['id']} {problem}" for problem in output_findings(cell)]
    if findings:
        raise BuildFailed("\n".join(findings))


def write(path: Path, notebook: NotebookNode, force: bool = False) -> bool:
    """Write it unless only outputs that are never compared would change; returns whether it was written."""
    if path.exists() and not force and _compared(json.loads(path.read_text())) == _compared(_plain(notebook)):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.validate(notebook)
    path.write_text(json.dumps(_plain(notebook), indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    return True


def _plain(notebook: NotebookNode) -> dict[str, Any]:
    """As it stands in a file: a list of lines for each long text."""
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    return dict(json.loads(text))


def _compared(notebook: dict[str, Any]) -> dict[str, Any]:
    kept = deepcopy(notebook)
    for cell in kept["cells"]:
        if IGNORED in cell["metadata"].get("tags", []):
            cell["outputs"] = []
    return kept
