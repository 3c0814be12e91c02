"""The machine report: what is there is said to be there, and what a system lacks is said to be missing."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from course_lib.lab import machine


def test_the_report_is_two_tables_with_a_row_for_each_thing() -> None:
    report = machine.machine_report()
    text = str(report)
    assert text == report._repr_markdown_()
    assert all(f"| {name} | " in text for name in ("cores", "memory", "torch", "gloo", "NCCL"))
    assert [feature.name for feature in report.features] == [
        "127.0.0.2",
        "`prctl`",
        "network namespaces",
        "`sigwaitinfo`",
    ]
    rows = [line.count("|") for line in text.split("\n") if line]
    assert rows == [3] * (2 + len(report.facts)) + [6] * (2 + len(report.features))


def test_cores_and_memory_are_no_more_than_the_machine_has() -> None:
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    assert 0 <= machine.memory_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_second_address_is_missing_where_it_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneAddress(socket.socket):
        def bind(self, address: Any) -> None:
            raise OSError("Can't assign requested address")

    monkeypatch.setattr(machine.socket, "socket", OneAddress)
    assert not machine.has_second_address()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has these")
def test_linux_has_a_second_address_and_prctl_and_a_mac_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.has_second_address() and machine.has_prctl()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not machine.has_prctl()


@pytest.mark.parametrize(("script", "has"), [("exit 0", True), ("exit 1", False), (None, False)])
def test_namespaces_are_there_when_one_can_be_made(
    script: str | None, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "unshare").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.has_network_namespaces() is has


def test_what_is_missing_is_said_with_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_network_namespaces", lambda: False)
    row = next(line for line in str(machine.machine_report()).split("\n") if "namespaces" in line)
    assert "**no**" in row and "not its network" in row
