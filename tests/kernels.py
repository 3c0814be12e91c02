"""Notebooks for tests: written, run by nbval or in a kernel, and proved gone."""

import json
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import psutil
from helpers import GRACE, Completed, Env, child_env, describe, kill_all, launch, leftovers
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from course_lib.lab.builder.execute import ThisPython

SETUP = "from course_lib.lab.notebook import expect_failure, fresh, setup\nsetup()"
IGNORE = "nbval-ignore-output"

# A script without torch that trains in name only: it records a generation and a step every 20 ms.
STEPS = """
import json, os, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = os.path.join(options["--run-dir"], "events")
os.makedirs(folder, exist_ok=True)
with open(os.path.join(folder, f"host-{os.getpid()}.jsonl"), "w", buffering=1) as log:
    def record(event, **fields):
        common = {"t": time.time(), "rank": 0, "world_size": 1, "generation": int(options.get("--generation", 1))}
        print(json.dumps({"event": event, **common, **fields}), file=log)
    record("snapshot_loaded", step=0)
    for step in range(int(options["--steps"])):
        time.sleep(0.02)
        record("step", step=step, loss=1.0 / (1 + step))
        print("step", step, flush=True)
print("the end")
sys.exit(int(options.get("--exit", 0)))
"""

# Two helpers that neither SIGTERM nor SIGINT ends, each in a session of its own, as torchrun's workers are.
STUBBORN = """
import signal, subprocess, sys, time
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
if len(sys.argv) < 2:
    for _ in range(2):
        subprocess.Popen([sys.executable, "-S", __file__, "child"], start_new_session=True)
    print("all are up", flush=True)
time.sleep(300)
"""


def notebook(path: Path, *cells: str | tuple[str, str], outputs: Sequence[str] = ()) -> Path:
    """Write a notebook of code cells, each a source or (source, tag), as if all had run and printed `outputs`."""
    book = nbformat.v4.new_notebook()
    for number, cell in enumerate(cells):
        source, tags = (cell, []) if isinstance(cell, str) else (cell[0], [cell[1]])
        text = outputs[number] if number < len(outputs) else ""
        shown = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        book.cells.append(
            nbformat.v4.new_code_cell(source, outputs=shown, execution_count=number + 1, metadata={"tags": tags})
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(book))
    return path


def nbval(
    *paths: Path,
    env: Env,
    cwd: Path,
    cell_timeout_s: int = 60,
    timeout_s: float = 110,
    python: Path = Path(sys.executable),
) -> Completed:
    """Run the notebooks as `make test` does."""
    options = [
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout",
        str(cell_timeout_s),
        "--timeout=0",
        "-p",
        "no:cacheprovider",
        "--color=no",
    ]
    return launch([python, "-m", "pytest", *options, *paths], timeout_s, env, cwd)


@dataclass
class Kernel:
    """A kernel as JupyterLab has one."""

    manager: KernelManager
    client: BlockingKernelClient
    mark: str

    def send(self, code: str) -> str:
        """Begin to run a cell; returns the id of the request."""
        return self.client.execute(code)

    def outputs(self, request: str, until: str | None = None, timeout: float = 60.0) -> list[dict[str, Any]]:
        """The outputs of the request until it is done, or until one contains the text `until`."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if content.get("execution_state") == "idle":
                return found
            if message["msg_type"] in ("stream", "error", "display_data", "update_display_data", "execute_result"):
                found.append({"type": message["msg_type"], **content})
            if until is not None and until in json.dumps(content):
                return found
        raise AssertionError(f"not done within {timeout} s: {found}")

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run a cell to its end."""
        return self.outputs(self.send(code))

    def text(self, code: str) -> str:
        """What a cell prints; an error in it fails the test."""
        outputs = self.run(code)
        assert not [o for o in outputs if o["type"] == "error"], outputs
        return "".join(o["text"] for o in outputs if o["type"] == "stream")

    def processes(self) -> list[Any]:
        """What the kernel has started, itself and its guard left out."""
        own = self.manager.provisioner.pid  # type: ignore[union-attr]
        return [process for process in leftovers(self.mark) if process.pid != own and not _is_guard(process)]

    def assert_nothing_is_left(self) -> None:
        """All that the kernel has started is gone after the grace."""
        limit = time.monotonic() + GRACE
        while (left := self.processes()) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not left, list(map(describe, left))


def _is_guard(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended since it was listed
        return "processes.py" in " ".join(process.cmdline())
    return False


@contextmanager
def kernel(cwd: Path, env: Env | None = None) -> Iterator[Kernel]:
    """A kernel in `cwd`; nothing of it lives afterwards."""
    mark = uuid.uuid4().hex
    manager = KernelManager(kernel_spec_manager=ThisPython())
    manager.start_kernel(cwd=str(cwd), env=child_env(env, mark), extra_arguments=["--log-level=ERROR"])
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield Kernel(manager, client, mark)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        kill_all(mark, -1)
