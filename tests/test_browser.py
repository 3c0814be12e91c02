"""The notebooks as a learner has them: JupyterLab from `make lab`, in a browser, "Run All Cells" twice."""

import base64
from pathlib import Path

import nbformat
import pytest
from browser import (
    Cell,
    browser_page,
    complaints,
    copy_course,
    course_env,
    make_lab,
    missing,
    open_notebook,
    run_all,
    save,
    saved,
    shown,
    shut_down,
)
from helpers import REPO
from kernels import nbval

pytestmark = [pytest.mark.skipif(missing() != "", reason=missing()), pytest.mark.timeout(1200)]

NAMES = [path.stem for path in sorted((REPO / "notebooks").glob("*.ipynb"))]


def renumber(path: Path) -> None:
    """Give the cells of a notebook numbers that no run gives, so that none passes for run that was not."""
    book = nbformat.read(path, as_version=4)
    for number, cell in enumerate((cell for cell in book.cells if cell.cell_type == "code"), 1001):
        cell.execution_count = number
    path.write_text(nbformat.writes(book), encoding="utf-8")


def run_twice(name: str, folder: Path) -> Path:
    """Run all cells of a notebook twice and look at the page and at the file; returns the file as it was saved."""
    path = copy_course(folder / "course") / "notebooks" / f"{name}.ipynb"
    committed = saved(path)
    renumber(path)
    with make_lab(path.parents[1], timeout=1000) as lab, browser_page(folder) as page:
        open_notebook(page, lab, path)
        for already in (0, len(committed)):
            wanted = [Cell(already + n, cell.red, cell.figures) for n, cell in enumerate(committed, 1)]
            run_all(page, already + len(committed), timeout=400)
            assert shown(page) == wanted, complaints(page)
            save(page)
            assert saved(path) == wanted
        shut_down(page, lab)
    return path


def test_run_all_twice(tmp_path: Path) -> None:
    run_twice("00_start_here", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_run_all_twice_and_compare_what_was_saved(name: str, tmp_path: Path) -> None:
    path = run_twice(name, tmp_path)
    done = nbval(path, env=course_env(tmp_path / "course"), cwd=tmp_path, cell_timeout_s=120, timeout_s=400)
    assert done.returncode == 0 and f"{len(saved(path))} passed" in done.output, done.tail()


def test_the_page_and_the_file_show_what_fails(tmp_path: Path) -> None:
    """Else the tests above could not fail: a figure that is none, an error, and a cell that was never reached."""
    figure = "from IPython.display import display\ndisplay({{'image/png': {!r}}}, raw=True)"
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    broken = base64.b64encode(b"no figure").decode()
    course = copy_course(tmp_path / "course")
    cells = [figure.format(pixel), figure.format(broken), "1 / 0", "print('never')"]
    path = course / "notebooks" / "bad.ipynb"
    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    book.cells = list(map(nbformat.v4.new_code_cell, cells))
    path.write_text(nbformat.writes(book))
    renumber(path)
    with make_lab(course, timeout=200) as lab, browser_page(tmp_path) as page:
        open_notebook(page, lab, path)
        assert shown(page) == [Cell(n, 0, 0) for n in (1001, 1002, 1003, 1004)]
        run_all(page, 4, timeout=60)
        seen = [Cell(1, 0, 1), Cell(2, 0, 0), Cell(3, 1, 0), Cell(None, 0, 0)]
        assert shown(page) == seen and "division by zero" in complaints(page)
        save(page)
        assert saved(path) == [seen[0], Cell(2, 0, 1), *seen[2:]]
        shut_down(page, lab)
