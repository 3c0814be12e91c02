"""Fixtures: the helpers, working in the test's own directory, and the modules of the benchmarks."""

import importlib
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import pytest
from hypothesis import HealthCheck, settings

# A shared two-core machine is slow now and then: no example fails for the time that it took.
settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("course")

# A shell that starts something in the background lets it ignore SIGINT, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """At the end of all tests: the ledger of each run that they left in a folder of theirs adds up.

    A run is a folder with logs of processes of this machine; events that a test made up have another host's name. The
    folder's name says which test it was; with pytest-xdist each of its processes looks at its own tests' runs.
    """
    yield
    from course_lib.engine import UsageError  # after the tests, of which some look at what has been imported
    from course_lib.lab.ledger import check_ledger

    logs = list(tmp_path_factory.getbasetemp().rglob(f"events/{socket.gethostname()}-*.jsonl"))
    odd = {path.parent.parent for path in logs if not path.is_file()}  # a test linked it to /dev/full, which has no end
    odd |= {
        path.parent.parent for path in logs if path.parent.parent.name == "lying"
    }  # by a clock that jumps for hours
    runs = sorted({path.parent.parent for path in logs} - odd)
    wrong = []
    for run_dir in runs:
        with suppress(UsageError):  # there is no event in it
            wrong += [f"{run_dir}: {complaint}" for complaint in check_ledger(run_dir)]
    if wrong:
        pytest.fail("the ledgers of these runs do not add up:\n" + "\n".join(wrong), pytrace=False)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of scripts/bench, as a program there would."""
    monkeypatch.syspath_prepend(str(helpers.BENCH))
    return importlib.import_module


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., helpers.Completed]:
    """`helpers.launch` with the test's tmp_path as its working directory."""
    return partial(helpers.launch, cwd=tmp_path)


@pytest.fixture
def running(tmp_path: Path) -> Callable[..., AbstractContextManager[helpers.Running]]:
    """`helpers.running` with the test's tmp_path as its working directory."""
    return partial(helpers.running, cwd=tmp_path)


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., helpers.Completed]:
    """`helpers.torchrun` with the test's tmp_path as its working directory."""
    return partial(helpers.torchrun, cwd=tmp_path)
