"""The builder: one source, two notebooks, and nothing committed that is not what the source gives."""

import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from helpers import REPO, launch
from jupyter_client.kernelspec import KernelSpec
from kernels import nbval
from nbformat import NotebookNode

from course_lib.engine import UsageError
from course_lib.lab.builder.execute import BuildFailed, ThisPython, execute, scrub_outputs, scrubber
from course_lib.lab.builder.make import _refuse_bad_outputs, check, make, sources, write
from course_lib.lab.builder.rules import committed_findings, source_findings
from course_lib.lab.builder.source import build, resolve, tags

SAMPLE = '''\
# %% [markdown]
# # Nothing much
#
# The next is [here](01_more.ipynb), the solutions are [there](solutions/00_sample.ipynb).
#
# ## Ten questions
#
# 1. What?
#    <details><summary>answer</summary>That.</details>
#
# ## In five lines

# %%
from course_lib.lab.notebook import fresh, setup

setup()

# %% tags=["nbval-ignore-output"]
run = fresh("test-build")
# !python -c "print('done in', {run.name!r})"

# %%
print("a claim:", run.name)

# %% [markdown] tags=["exercise"]
# Double it.

# %% twice


def double(x: int) -> int:
    """Twice `x`."""
    # SOLUTION
    return 2 * x
    # END


# %%
# SOLUTION
guess = 7
# STUDENT: guess = ...
# END

# %% tags=["exercise"]
from course_lib.lab.checks import case, predict, write

write(case(3), case(0), solution=lambda x: 2 * x, wrong=[])(double)
predict(7, wrong=[])(guess)

# %% tags=["solution"]
print("only in the solutions")

# %% tags=["raises-exception"]
1 / 0

# %%
print("once more")

# %%
print("once more")
'''
QUESTION = "# 1. What?\n#    <details><summary>answer</summary>That.</details>\n"
TEN = [QUESTION.replace("1.", f"{n}.").replace("#    <", f"#  {' ' * len(str(n))} <") for n in range(1, 11)]
SAMPLE = SAMPLE.replace(QUESTION, "".join(TEN))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of notebooks with the sample and a successor."""
    (tmp_path / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "notebooks" / "src" / "00_sample.py").write_text(SAMPLE)
    return tmp_path / "notebooks"


def code(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


# --- from a source to two notebooks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "student", "solution"),
    [
        ("a\n# SOLUTION\nb\n# END\nc", "a\n...\nc", "a\nb\nc"),
        ("if x:\n    # SOLUTION\n    b\n    # END", "if x:\n    ...", "if x:\n    b"),
        ("# SOLUTION\nb\n# STUDENT: b = ...\n# END", "b = ...", "b"),
        (
            "    # SOLUTION\n    b\n    # STUDENT: for i in x:\n    # STUDENT:     ...\n    # STUDENT:\n    # END",
            "    for i in x:\n        ...\n",
            "    b",
        ),
        ("# SOLUTION\na\n# END\n# SOLUTION\nb\n# STUDENT: c\n# END", "...\nc", "a\nb"),
        ("no region # SOLUTION here", "no region # SOLUTION here", "no region # SOLUTION here"),
    ],
)
def test_a_region_has_two_faces(source: str, student: str, solution: str) -> None:
    assert resolve(source, solved=False) == student
    assert resolve(source, solved=True) == solution


@pytest.mark.parametrize("source", ["# SOLUTION\na", "a\n# END", "# SOLUTION\n# SOLUTION\na\n# END"])
def test_a_region_without_its_other_end_is_refused(source: str, folder: Path) -> None:
    path = folder / "src" / "01_bad.py"
    path.write_text(f"# %%\n{source}\n")
    with pytest.raises(UsageError, match=r"01_bad\.py: .*(SOLUTION|END)"):
        build(path)


def test_what_is_no_source_is_refused(folder: Path) -> None:
    path = folder / "src" / "01_bad.py"
    path.write_text("# %% [markdown]\n# only words\n")
    with pytest.raises(UsageError, match="no code cell"):
        build(path)
    path.write_text("# ---\n# jupyter:\n#   kernelspec: {name: python3}\n# ---\n# %%\n1\n")
    with pytest.raises(UsageError, match="percent format"):
        build(path)


def test_the_two_notebooks(folder: Path) -> None:
    built = build(folder / "src" / "00_sample.py")
    assert code(built.student)[1].endswith("!python -c \"print('done in', {run.name!r})\"")
    assert "    ..." in code(built.student)[3] and code(built.student)[4] == "guess = ..."
    assert len(built.student.cells) == 11 and "only in the solutions" not in "".join(code(built.student))
    solved = code(built.solutions)
    assert "setup()" in solved[0] and "return 2 * x" in solved[1] and solved[2] == "guess = 7"
    assert solved[3].startswith("from course_lib.lab.checks") and len(solved) == 5
    assert built.solutions.cells[0].source.startswith("# Solutions: Nothing much")
    assert [c.source for c in built.solutions.cells if c.cell_type == "markdown"][1] == "Double it."
    assert {tag for nb in (built.student, built.solutions) for c in nb.cells for tag in tags(c)} == {
        "nbval-ignore-output",
        "raises-exception",
    }


def test_ids_stay_when_other_cells_come(folder: Path) -> None:
    path = folder / "src" / "00_sample.py"
    before = [cell["id"] for cell in build(path).student.cells]
    assert before == [cell["id"] for cell in build(path).student.cells]
    assert len(set(before)) == len(before) and "code-twice" in before
    assert before[-2:] == ["code-print-once-more", "code-print-once-more-2"]
    path.write_text(SAMPLE.replace("# %% twice", "# %%\nprint('new')\n\n# %% twice"))
    after = [cell["id"] for cell in build(path).student.cells]
    assert [name for name in after if name in before] == before and len(after) == len(before) + 1


# --- rules --------------------------------------------------------------------------------------------------------


def test_a_good_source_has_no_findings(folder: Path) -> None:
    assert source_findings(build(folder / "src" / "00_sample.py"), ["00_sample"]) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("\nsetup()", "\nprint()", "the first code cell does not call setup()"),
        ("guess = 7", "\n".join(f"a{n} = 1" for n in range(21)), "21 lines of code, more than 20"),
        ("# %% [markdown] tags", "# %% [markdown]\n# x\n\n" * 4 + "# %% [markdown] tags", "15 cells, not 10 to 14"),
        ("1 / 0", "input('?')", "input() waits"),
        ("1 / 0", "from IPython.display import clear_output", "clear_output"),
        ("1 / 0", "figure.savefig('a.svg')", "use PNG"),
        ("1 / 0", "subprocess.run(['ls'])", "use a ! line"),
        ("1 / 0", "os.system('ls')", "use a ! line"),
        ("1 / 0", "# NBVAL_SKIP\n1 / 0", "with a tag of the cell"),
        ("# !python -c", "# !ls | wc -l\n# !python -c", "one command in a ! line"),
        ("# !python -c", "# !true; ls\n# !python -c", "one command in a ! line"),
        ("# !python -c", "# !true && ls\n# !python -c", "one command in a ! line"),
        ("# !python -c", "# !sleep 5 &\n# !python -c", "one command in a ! line"),
        ("# !python -c", "# x = !ls\n# !python -c", "its exit code is lost"),
        ("# !python -c", "# %sx ls\n# !python -c", "its exit code is lost"),
        ('tags=["nbval-ignore-output"]', "", "tag the cell nbval-ignore-output"),
        ('tags=["nbval-ignore-output"]', 'tags=["nbval-ignore-output", "raises-exception"]', "use expect_failure()"),
        ('tags=["raises-exception"]', 'tags=["raises-exception", "nbval-ignore-output"]', "passes whatever happens"),
        ('tags=["raises-exception"]', 'tags=["nbval-skip"]', "a skipped cell"),
        ("solutions/00_sample", "solutions/00_simple", "leads nowhere"),
        (TEN[9], "", "this notebook has 9 such of 9 folds"),
        (TEN[9], TEN[9] + TEN[9].replace("10.", "11."), "this notebook has 11 such of 11 folds"),
        (TEN[1], TEN[1].replace("2.", "3."), "this notebook has 9 such of 10 folds"),
        (TEN[1], TEN[1].replace("#    <", "# <"), "this notebook has 9 such of 10 folds"),
        (TEN[1], TEN[1].replace("answer<", "Answer<"), "this notebook has 9 such of 10 folds"),
        (TEN[1], TEN[1].replace("That.", "`That`."), "this notebook has 9 such of 10 folds"),
        ("## Ten questions", "## Quiz", "this notebook has 0 such of 0 folds"),
    ],
)
def test_each_rule_finds_what_it_is_for(old: str, new: str, says: str, folder: Path) -> None:
    path = folder / "src" / "00_sample.py"
    assert old in SAMPLE
    path.write_text(SAMPLE.replace(old, new))
    found = source_findings(build(path), ["00_sample"])
    assert any(says in line and line.startswith("00_sample: ") for line in found), found


def test_the_link_to_the_next_notebook(folder: Path) -> None:
    path = folder / "src" / "00_sample.py"
    assert source_findings(build(path), ["00_sample", "01_more", "02_end"]) == []
    assert "no link to the next notebook, 01_else.ipynb" in source_findings(build(path), ["00_sample", "01_else"])[0]
    (folder / "src" / "01_more.py").write_text(SAMPLE)
    assert any(line.startswith("01_more: 11 cells, not 20 to 45") for line in check(folder, []))


def test_a_pipe_in_quotes_is_no_pipe(folder: Path) -> None:
    path = folder / "src" / "00_sample.py"
    path.write_text(SAMPLE.replace("'done in'", "'a | b; c'"))
    assert source_findings(build(path), ["00_sample"]) == []


# --- outputs ------------------------------------------------------------------------------------------------------


def test_what_belongs_to_this_machine_is_taken_out() -> None:
    scrub = scrubber(REPO)
    assert scrub(f"{REPO}/course_lib/x.py and {REPO}") == "course_lib/x.py and ."
    assert scrub(f"{tempfile.gettempdir()}/x") == "$TMPDIR/x"
    assert scrub(f"{Path.home()}/y") == "~/y"
    assert scrub(f"runs/a/events/{socket.gethostname()}-12.jsonl\r\n") == "runs/a/events/host-12.jsonl\n"
    assert scrub("loss 0.25, /usr/lib/python3") == "loss 0.25, /usr/lib/python3"


def one_cell(source: str, *names: str) -> NotebookNode:
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": list(names)})
    return nbformat.v4.new_notebook(cells=[cell])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os; print(os.getcwd())", "prints what differs from machine to machine"),
        ("import os; os.getcwd()", "prints what differs from machine to machine"),
        ("import sys; print('x', file=sys.stderr)", "writes to stderr"),
    ],
)
def test_a_strict_cell_must_say_the_same_everywhere(source: str, says: str, tmp_path: Path) -> None:
    book = one_cell(source)
    execute(book, tmp_path)
    with pytest.raises(BuildFailed, match=says):
        _refuse_bad_outputs(book, tmp_path)
    book = one_cell(source, "nbval-ignore-output")
    execute(book, tmp_path)
    _refuse_bad_outputs(book, tmp_path)
    assert str(tmp_path) not in json.dumps(book)


def test_a_cell_that_fails_or_hangs_is_named(tmp_path: Path) -> None:
    book = one_cell("1 / 0", "raises-exception")
    book.cells.append(nbformat.v4.new_code_cell("print('so far')\nraise ValueError('this one')", id="second"))
    with pytest.raises(BuildFailed, match=r"(?s)^cell second: .*ValueError.*this one"):
        execute(book, tmp_path)
    book = one_cell("import time; time.sleep(60)")
    book.cells[0]["id"] = "sleeper"
    with pytest.raises(BuildFailed, match="cell sleeper: .*timed out"):
        execute(book, tmp_path, timeout_s=1)


def test_a_kernel_that_dies_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = one_cell("print('well')")
    for name, source in (("fatal", "import os; os._exit(1)"), ("never", "print('not reached')")):
        book.cells.append(nbformat.v4.new_code_cell(source, id=name))
    with pytest.raises(BuildFailed, match="^cell fatal: Kernel died$"):
        execute(book, tmp_path)
    dead = KernelSpec(argv=[sys.executable, "-c", "raise SystemExit(3)"], language="python")
    monkeypatch.setattr(ThisPython, "get_kernel_spec", lambda self, name: dead)
    with pytest.raises(BuildFailed, match="^the kernel's start: Kernel died .*$"):
        execute(one_cell("1"), tmp_path)


def test_a_traceback_is_scrubbed_and_not_compared(tmp_path: Path) -> None:
    book = one_cell("raise ValueError", "raises-exception")
    error = nbformat.v4.new_output("error", ename="E", evalue="same", traceback=[f"in {REPO}/x.py"])
    book.cells[0].outputs = [error]
    assert list(scrub_outputs(book, REPO)) == [] and error.traceback == ["in x.py"]
    error.evalue = f"{REPO}/x.py"
    assert len(list(scrub_outputs(book, REPO))) == 1


def test_a_file_is_written_only_when_something_compared_changed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.ipynb"
    book = one_cell("x", "nbval-ignore-output")
    book.cells.append(nbformat.v4.new_code_cell("y"))
    for cell, text in zip(book.cells, "pq", strict=True):
        cell.outputs = [nbformat.v4.new_output("stream", text=text)]
    assert write(path, book) and not write(path, book)
    book.cells[0].outputs[0].text = "another"
    assert not write(path, book) and "another" not in path.read_text()
    assert write(path, book, force=True) and "another" in path.read_text()
    book.cells[1].outputs[0].text = "changed"
    assert write(path, book) and "changed" in path.read_text()


# --- as a whole ---------------------------------------------------------------------------------------------------


def edited(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change a committed notebook as an editor would."""
    book = json.loads(path.read_text())
    change(book)
    path.write_text(json.dumps(book))


def test_built_checked_and_green_until_somebody_touches_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_RUNS", str(folder / "elsewhere"))  # a build does without
    assert len(check(folder, [])) == 2  # nothing is there yet
    lines = list(make(folder, ["00"], REPO))
    assert [line.split(",")[0] for line in lines] == ["00_sample.ipynb: written", "solutions/00_sample.ipynb: written"]
    shutil.rmtree(REPO / "runs" / "test-build")
    assert check(folder, []) == []
    student, solutions = folder / "00_sample.ipynb", folder / "solutions" / "00_sample.ipynb"
    assert student.read_text().count("open: ") == 2 and solutions.read_text().count('"solved') == 2
    assert "done in test-build" in student.read_text() and str(REPO) not in student.read_text()

    other = folder / "changed.ipynb"
    other.write_text(student.read_text())
    edited(other, lambda book: book["cells"][3]["outputs"][0].update(text=["a claim: another\n"]))  # type: ignore[index]
    done = nbval(student, other, env={"COURSE_RUNS": str(folder / "runs")}, cwd=Path("/"))
    assert "1 failed, 17 passed" in done.output and "changed.ipynb::Cell 2" in done.output, done.tail()
    other.unlink()

    wanted = build(folder / "src" / "00_sample.py").student
    for change, says in (
        (lambda cell: cell.update(source=["print('other')"]), "differs from its source at cell code-print-once-more-2"),
        (lambda cell: cell.update(id="x"), "differs from its source at cell"),
        (lambda cell: cell["metadata"].update(tags=["nbval-ignore-output"]), "differs from its source at cell"),
        (lambda cell: cell.update(execution_count=None), "was never executed"),
        (lambda cell: cell.update(outputs=[{"output_type": "error", "ename": "E"}]), "holds an error: E"),
    ):
        before = student.read_text()
        edited(student, lambda book: change(book["cells"][-1]))  # type: ignore[index] # noqa: B023
        assert [line for line in committed_findings(student, wanted) if says in line], says
        student.write_text(before)
    (folder / "05_stray.ipynb").write_text("x" * 6_000_000)
    done = launch([sys.executable, REPO / "scripts" / "build_notebooks.py", "--check", "--folder", folder], 60)
    assert [line.split()[0] for line in done.output.splitlines()] == ["05_stray.ipynb", "the"] and done.returncode == 1


def test_sources_are_chosen_by_how_they_begin(folder: Path) -> None:
    assert [path.stem for path in sources(folder, [])] == ["00_sample"] == [p.stem for p in sources(folder, ["00"])]
    with pytest.raises(UsageError, match="no notebook begins with 07; there are 00_sample"):
        sources(folder, ["07"])
    assert sources(folder / "nowhere", []) == [] and check(folder / "nowhere", []) == []
