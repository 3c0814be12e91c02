"""Fixtures: the helpers, working in the test's own directory, and the modules of the benchmarks."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import pytest
from hypothesis import HealthCheck, settings

# A shared two-core machine is slow now and then: no example fails for the time that it took.
settings.register_profile("course", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("course")


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
