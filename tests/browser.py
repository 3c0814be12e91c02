"""JupyterLab in a headless Chromium, used as a learner does: `make lab`, the Run menu, Ctrl-S, Shut Down."""

import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from helpers import GRACE, MARK, REPO, Env, Running, free_port, leftovers, running

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
)
FIRST = "00_start_here.ipynb"
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0  # both programs refuse to run as root unless they are told to

RED = '[data-mime-type="application/vnd.jupyter.stderr"]'  # errors and what goes to stderr look alike

# Deferred cells are attached when the page is idle. A cell that fails leaves those after it without a number. An image
# counts when it decodes, wherever the page is scrolled to.
_ATTACHED = "count => document.querySelectorAll('.jp-Notebook .jp-Cell').length === count"
_DONE = """last => {
    const prompts = [...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')].map(prompt => prompt.textContent);
    const status = document.querySelector('.jp-Notebook-ExecutionIndicator').dataset.status;
    const ended = prompts.includes(`[${last}]:`) || prompts.includes('[ ]:');
    return status === 'idle' && ended && !prompts.includes('[*]:');
}"""
_CELLS = """red => Promise.all([...document.querySelectorAll('.jp-Notebook .jp-CodeCell')].map(async cell => {
    const images = [...cell.querySelectorAll('.jp-OutputArea img')];
    const decoding = images.map(image => image.decode().then(() => image.naturalWidth > 0, () => false));
    return {
        prompt: cell.querySelector('.jp-InputPrompt').textContent,
        red: cell.querySelectorAll(red).length,
        figures: (await Promise.all(decoding)).filter(Boolean).length,
    };
}))"""


def missing() -> str:
    """What these tests need and this machine lacks; empty when nothing."""
    if shutil.which("make") is None:
        return "make is not installed"
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[test]'"
    if not any(map(shutil.which, CHROMIUMS)):
        return f"no Chromium on PATH ({', '.join(CHROMIUMS)}): on Debian, apt-get install chromium"
    return ""


@dataclass(frozen=True)
class Cell:
    """A code cell as it is shown or saved: the number in its brackets, errors and stderr, and figures."""

    count: int | None
    red: int
    figures: int


def saved(path: Path) -> list[Cell]:
    """The code cells of a notebook's file."""
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    return [
        Cell(
            cell["execution_count"],
            sum(output["output_type"] == "error" or output.get("name") == "stderr" for output in cell["outputs"]),
            sum("image/png" in output.get("data", {}) for output in cell["outputs"]),
        )
        for cell in cells
    ]


# --- the course ---------------------------------------------------------------------------------------------------


def copy_course(folder: Path) -> Path:
    """A checkout in `folder` that `make lab` finds set up: its Python is this one, and takes course_lib from there."""
    for name in ("course_lib", "notebooks", "scripts"):
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(REPO / name, folder)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / ".venv" / ".course-ready").write_text(f"{folder}\n")
    return folder


_OUTER = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEFILES", "VENV", "COURSE_RUNS", "JUPYTER_PATH", "JUPYTER_CONFIG_PATH")
_JUPYTER = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR", "IPYTHONDIR")


def course_env(folder: Path) -> Env:
    """What the copy runs with: no settings of the user's or of a `make test`.

    Nor pytest's variable: a kernel that finds it doesn't show what a cell's processes write.
    """
    own = {name: str(folder / "jupyter" / name.lower()) for name in (*_JUPYTER, "JUPYTERLAB_WORKSPACES_DIR")}
    return {**dict.fromkeys((*_OUTER, "PYTEST_CURRENT_TEST")), **own, "PYTHONPATH": str(folder)}


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its process, and the address of notebook 00, at which a learner's browser opens."""

    process: Running
    start: str


@contextmanager
def make_lab(folder: Path, timeout: float) -> Iterator[Lab]:
    """`make lab` in a copied course, for at most `timeout` seconds; nothing of it lives afterwards."""
    arguments = f"--no-browser --port={free_port()}" + (" --allow-root" if ROOT else "")
    command, env = ["make", "lab", f"LAB_ARGS={arguments}"], course_env(folder)
    with running(command, timeout, env, folder) as process:
        process.wait_for("open this file in a browser")
        # It shows a browser this file, with the port that it really took.
        (page,) = Path(str(env["JUPYTER_RUNTIME_DIR"])).glob("jpserver-file-to-run-*-open.html")
        found = re.search(rf'http://[^"]*/{FIRST}\?token=\w+', page.read_text())
        assert found is not None, page.read_text()
        yield Lab(process, found[0])


# --- the browser --------------------------------------------------------------------------------------------------


@contextmanager
def browser_page(folder: Path) -> Iterator["Page"]:
    """A page of the system's Chromium, whose profile is in `folder`; when the block fails, failed.png is a picture."""
    from playwright.sync_api import sync_playwright

    mark, profile = uuid.uuid4().hex, folder / "chromium"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, ",".join(filter(None, [os.environ.get(MARK), mark])))  # the driver takes its from here
        with sync_playwright() as playwright:
            context = playwright.chromium.launch_persistent_context(
                profile,
                executable_path=next(filter(None, map(shutil.which, CHROMIUMS))),
                args=[*FLAGS, *(["--no-sandbox"] if ROOT else [])],
                viewport={"width": 1400, "height": 1000},
            )
            page = context.pages[0]
            page.set_default_timeout(60_000)
            try:
                yield page
            except BaseException:
                page.screenshot(path=folder / "failed.png")
                raise
            finally:
                context.close()
    limit = time.monotonic() + GRACE
    while (left := _browsers(mark, profile)) and time.monotonic() < limit:
        time.sleep(0.05)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, list(map(str, left))


def _browsers(mark: str, profile: Path) -> list[psutil.Process]:
    """What lives of a browser. Chromium writes its children's command lines over their environment, mark and all."""
    lines = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return leftovers(mark) + [process for process, line in lines if any(str(profile) in word for word in line)]


def choose(page: "Page", menu: str, item: str) -> None:
    """Choose an item of the menu bar, as with the mouse."""
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=item, exact=True).click()


def open_notebook(page: "Page", lab: Lab, path: Path) -> None:
    """Open a notebook that lies beside notebook 00, and wait until its kernel is there."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    page.goto(lab.start.replace(FIRST, path.name))
    page.wait_for_function(_ATTACHED, arg=len(cells), polling=200)
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()


def run_all(page: "Page", last: int, timeout: float) -> None:
    """ "Run All Cells" of the Run menu; returns when the cell with the number `last` is done, or one has failed."""
    choose(page, "Run", "Run All Cells")
    page.wait_for_function(_DONE, arg=last, polling=200, timeout=1000 * timeout)


def shown(page: "Page") -> list[Cell]:
    """The code cells on the page."""
    cells: list[dict[str, Any]] = page.evaluate(_CELLS, RED)
    counts = [re.fullmatch(r"\[(\d+)\]:", cell["prompt"]) for cell in cells]
    return [
        Cell(int(count[1]) if count else None, cell["red"], cell["figures"])
        for count, cell in zip(counts, cells, strict=True)
    ]


def complaints(page: "Page") -> str:
    """The texts of the errors and of what went to stderr."""
    return "\n".join(page.locator(RED).all_text_contents())


def save(page: "Page") -> None:
    """Ctrl-S, and wait until nothing is left to save."""
    page.keyboard.press("ControlOrMeta+s")
    page.locator(".lm-TabBar-tab.jp-mod-current:not(.jp-mod-dirty)").wait_for()


def shut_down(page: "Page", lab: Lab) -> None:
    """ "Shut Down" of the File menu; fails unless all that JupyterLab has started is gone within the grace."""
    choose(page, "File", "Shut Down")
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    done = lab.process.wait()
    assert done.returncode == 0, done.tail()
