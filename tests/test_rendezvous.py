"""The rendezvous store in a process of its own: it serves, says where, and ends when it is told to or left alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import helpers
import pytest
from torch._C._distributed_c10d import TCPStore

COMMAND = [sys.executable, "-m", "course_lib.lab.rendezvous"]
Running = Callable[..., Any]

# A parent that dies at once and leaves the store alone.
PARENT = """
import os, subprocess, sys, time
store = subprocess.Popen([*sys.argv[1:], "--parent", str(os.getpid())])
time.sleep(600)
"""


def where(process: helpers.Running) -> tuple[str, int]:
    process.wait_for("rendezvous at ")
    host, port = process.output().split("rendezvous at ", 1)[1].split()[0].rsplit(":", 1)
    return host, int(port)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(running: Running, signum: signal.Signals) -> None:
    with running(COMMAND) as process:
        host, port = where(process)
        assert host == "127.0.0.1" and port > 0
        client = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=20))
        client.set("key", "value")
        assert client.compare_set("key", "value", "new") == b"new"
        assert TCPStore(host, port, is_master=False, timeout=timedelta(seconds=20)).get("key") == b"new"
        os.kill(process.pid, signum)
        done = process.wait()
    assert (done.returncode, done.output) == (0, f"rendezvous at 127.0.0.1:{port}\n")


def test_only_the_given_address_is_open(running: Running) -> None:
    with running([*COMMAND, "--host", "127.0.0.1"]) as process:
        _, port = where(process)
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", port))


def test_all_addresses_when_asked(running: Running) -> None:
    with running([*COMMAND, "--host", "0.0.0.0"]) as process:
        host, port = where(process)
        assert host == socket.gethostname()
        TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20)).set("key", "value")


def test_two_at_one_port(running: Running) -> None:
    with running(COMMAND) as process:
        _, port = where(process)
        done = helpers.launch([*COMMAND, "--port", str(port)])
    assert done.returncode == 2
    assert done.output == f"error: cannot listen at 127.0.0.1:{port}: [Errno 98] Address already in use\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "x"], "error: argument --port: invalid int value: 'x' (--help explains)\n"),
        (["--port", "65536"], "error: cannot listen at 127.0.0.1:65536: a port is a number from 0 to 65535\n"),
        (["--nonesuch"], "error: unrecognized arguments: --nonesuch (--help explains)\n"),
        (["--host", "192.0.2.1"], "error: cannot listen at 192.0.2.1:0: [Errno 99] Cannot assign requested address\n"),
    ],
)
def test_bad_usage_is_one_line(options: list[str], says: str) -> None:
    done = helpers.launch([*COMMAND, *options])
    assert (done.returncode, done.output) == (2, says)


def test_it_ends_with_its_parent(running: Running) -> None:
    with running([sys.executable, "-c", PARENT, *COMMAND]) as process:
        where(process)
        assert len(process.processes()) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()  # which fails when the store is still there after a grace


def test_it_does_not_begin_for_a_parent_that_is_gone() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    begun = time.monotonic()
    assert helpers.launch([*COMMAND, "--parent", gone.stdout.strip()]).returncode == 0
    assert time.monotonic() - begun < 60
