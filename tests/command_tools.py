"""What the tests of `python -m course_lib.engine.snapshots` share."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_tools import start

from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots import __main__

OLD, NEW, SUPERSEDED = "gen-0001-step-00000010", "gen-0002-step-00000020", "gen-0001-step-00000099"


def three_snapshots(run_dir: Path) -> Path:
    """Generation 1 saved OLD; generation 2 grew from it and saved NEW; then 1 woke up and published SUPERSEDED."""
    first = start(run_dir)
    first.save(10)
    start(run_dir).save(20)
    first.save(99)
    return run_dir


def command(*words: str | Path | int) -> tuple[int, str]:
    """The command, in this process: its exit code and what it printed."""
    with redirect_stdout(io.StringIO()) as printed:
        code = __main__.main([str(word) for word in words])
    return code, printed.getvalue()


def refusal(*words: str | Path | int) -> str:
    """The one line that goes with exit code 2."""
    with pytest.raises(UsageError) as caught:
        __main__.main([str(word) for word in words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def file(run_dir: Path, name: str, suffix: str = ".pt") -> Path:
    return run_dir / "snapshots" / f"{name}{suffix}"


def states(output: str) -> dict[str, tuple[str, str]]:
    """Of each snapshot in a table: whether it is in line, and its state."""
    rows = (re.split(r"  +", line.strip()) for line in output.splitlines() if line.strip().startswith("gen-"))
    return {row[0]: (row[-2], row[-1]) for row in rows if len(row) == 9}


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, map_location="cpu", weights_only=True))
