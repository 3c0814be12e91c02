"""Run a notebook in a kernel of this very Python, and take what belongs to this machine out of its outputs."""

import atexit
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from traitlets import default

from course_lib.lab.builder.rules import IGNORED
from course_lib.lab.builder.source import tags

CELL_TIMEOUT_S = 120


class BuildFailed(RuntimeError):
    """A notebook cannot be committed; the message names the cell and says what happened in it."""


class ThisPython(KernelSpecManager):
    """Gives every notebook the interpreter that builds it: an installed `python3` kernel may be another one."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


class _Manager(AsyncKernelManager):
    @default("kernel_spec_manager")
    def _this_python(self) -> KernelSpecManager:
        return ThisPython()


def execute(notebook: NotebookNode, folder: Path, timeout_s: int = CELL_TIMEOUT_S) -> None:
    """Run all cells in `folder` and keep their outputs; raises BuildFailed at the first cell that fails."""
    # The runs belong into runs/, which is what the committed outputs say.
    environment = {name: value for name, value in os.environ.items() if name != "COURSE_RUNS"}
    place = ["the kernel's start"]
    client = NotebookClient(
        notebook,
        kernel_manager_class=_Manager,
        timeout=timeout_s,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=lambda cell, cell_index: place.append(f"cell {cell['id']}"),
    )
    try:
        client.execute(env=environment)
    except (CellExecutionError, CellTimeoutError) as error:
        raise BuildFailed(f"{place[-1]}: {str(error).strip()[-3000:]}") from None
    except (RuntimeError, AssertionError) as error:
        # Of a kernel that dies as it starts nbclient cleans up twice, and the second time it fails an assertion.
        atexit.unregister(client._cleanup_kernel)
        raise BuildFailed(f"{place[-1]}: {str(error) or error.__context__}") from None
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata.language_info = {k: v for k, v in notebook.metadata.language_info.items() if k in _LANGUAGE}


_LANGUAGE = ("file_extension", "mimetype", "name")


def scrubber(root: Path) -> Callable[[str], str]:
    """A function that takes this machine's paths and name out of a text."""
    folders = [
        (str(root) + "/", ""),
        (str(root), "."),
        (sys.prefix, ".venv"),
        (tempfile.gettempdir().rstrip("/") + "/", "$TMPDIR/"),
        (str(Path.home()), "~"),
    ]
    host = re.escape(socket.gethostname())
    # A short name may be a word of the text as well; in these places it is the machine's.
    places = rf"\b{host}(?=-\d+\.jsonl)|(?<=host      : ){host}\b" + (rf"|\b{host}\b" if len(host) > 5 else "")

    def scrub(text: str) -> str:
        for path, name in folders:
            text = text.replace(path, name)
        return re.sub(places, "host", text).replace("\r\n", "\n")

    return scrub


def scrub_outputs(notebook: NotebookNode, root: Path) -> Iterator[str]:
    """Scrub all outputs; yields a finding for each cell that is compared strictly and named this machine."""
    scrub = scrubber(root)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            changed = _scrub_output(output, scrub)
            if changed and IGNORED not in tags(cell):
                yield f"cell {cell['id']} prints what differs from machine to machine, and is not tagged {IGNORED}"


def _scrub_output(output: dict[str, Any], scrub: Callable[[str], str]) -> bool:
    """Whether anything changed that is compared; a traceback never is."""
    before = {"text": output.get("text"), "evalue": output.get("evalue"), **dict(output.get("data", {}))}
    texts = {name: text for name, text in before.items() if isinstance(text, str) and not name.startswith("image/")}
    after = {name: scrub(text) for name, text in texts.items()}
    for name, text in after.items():
        (output["data"] if name in output.get("data", {}) else output)[name] = text
    if "traceback" in output:
        output["traceback"] = [scrub(line) for line in output["traceback"]]
    return texts != after
