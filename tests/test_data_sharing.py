"""Several processes that want one download: real processes, and a source that counts and waits."""

import gzip
import queue
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers import Running
from torchvision.datasets import FashionMNIST  # type: ignore[import-untyped]  # it ships no types

from course_lib.workloads.data import DataSpec, load, prepare

Start = Callable[..., AbstractContextManager[Running]]
Child = Callable[[Path], AbstractContextManager[Running]]

PATIENCE = 90.0  # seconds, far above what anything here takes


def small_fashion() -> dict[str, bytes]:
    files = {}
    for part, count in (("train", 6), ("t10k", 3)):
        images = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + bytes(i % 251 for i in range(count * 784))
        labels = struct.pack(">4BI", 0, 0, 8, 1, count) + bytes(range(count))
        files[f"{part}-images-idx3-ubyte.gz"] = gzip.compress(images)
        files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(labels)
    return files


class Source(ThreadingHTTPServer):
    """Serves the files, counts the requests, and answers those for ``held`` only once ``gate`` is open."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = small_fashion()
        self.counts: Counter[str] = Counter()
        self.asked: queue.Queue[str] = queue.Queue()
        self.held = ""
        self.gate = threading.Event()
        self.broken = False
        self.mutex = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""

    def wait_for(self, name: str) -> None:
        while self.asked.get(timeout=PATIENCE) != name:
            pass


class Handler(BaseHTTPRequestHandler):
    server: Source

    def do_GET(self) -> None:
        name = self.path.removeprefix("/")
        with self.server.mutex:
            self.server.counts[name] += 1
        self.server.asked.put(name)
        if name == self.server.held:
            self.server.gate.wait(PATIENCE)
        if self.server.broken:
            self.send_error(503)
            return
        data = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest's output is for failures."""


@pytest.fixture
def source() -> Iterator[Source]:
    with Source() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()
        thread.join()


CHILD = """
import sys
from pathlib import Path
from torchvision.datasets import FashionMNIST
from course_lib.engine.errors import UsageError
from course_lib.workloads.data import DataSpec, load, prepare
FashionMNIST.mirrors = {mirrors!r}
FashionMNIST.resources = {resources!r}
spec = DataSpec("fashion_mnist", Path({root!r}))
try:
    prepare(spec)
except UsageError as error:
    print("refused:", error)
    sys.exit(2)
print("identity", load(spec).identity)
"""


@pytest.fixture
def here(source: Source, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Point torchvision at the source in this process; the result does the same for another one."""
    settings = {
        "mirrors": [f"http://127.0.0.1:{source.server_address[1]}/"],
        "resources": [(name, md5(data, usedforsecurity=False).hexdigest()) for name, data in source.files.items()],
    }
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, value in settings.items():
        monkeypatch.setattr(FashionMNIST, name, value)
    return settings


@pytest.fixture
def child(here: dict[str, Any], running: Start) -> Child:
    """Start a process that prepares and loads the set in a folder."""

    def start(root: Path) -> AbstractContextManager[Running]:
        code = CHILD.format(**here, root=str(root))
        environment = {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        return running([sys.executable, "-c", code], timeout=PATIENCE, env=environment)

    return start


def test_one_downloads_and_the_other_waits(source: Source, child: Child, tmp_path: Path) -> None:
    names = list(source.files)
    source.held = names[2]  # two of the four files are there when the other process comes
    with child(tmp_path) as first:
        source.wait_for(source.held)
        once = source.counts[names[0]]  # torchvision asks more than once for one file
        with child(tmp_path) as second:
            second.wait_for("waiting for another process to download fashion_mnist")
            assert not (tmp_path / "FashionMNIST").exists()
            source.gate.set()
            done = first.wait(), second.wait()
    assert source.counts == {name: once for name in names}
    assert {path.name for path in tmp_path.iterdir()} == {"FashionMNIST", ".fashion_mnist.lock"}

    spec = DataSpec("fashion_mnist", tmp_path)
    prepare(spec)
    assert source.counts.total() == 4 * once  # nothing is asked for again
    for one in done:
        assert one.returncode == 0, one.output
        assert one.output.splitlines()[-1] == f"identity {load(spec).identity}"


def test_both_fail_when_the_download_fails(source: Source, child: Child, tmp_path: Path) -> None:
    source.broken, source.held = True, next(iter(source.files))
    with child(tmp_path) as first:
        source.wait_for(source.held)
        with child(tmp_path) as second:
            second.wait_for("waiting for another process")
            source.gate.set()
            done = first.wait(), second.wait()
    for one in done:
        last = one.output.splitlines()[-1]
        assert one.returncode == 2 and last.startswith("refused: --data fashion_mnist"), one.output
        assert "503" in last and "--data digits" in last
    assert "another process tried" in done[1].output
    assert source.counts == {source.held: 1}  # the second did not try the dead source in its turn
    assert {path.name for path in tmp_path.iterdir()} == {".fashion_mnist.lock"}

    source.broken = False
    prepare(DataSpec("fashion_mnist", tmp_path))  # an old failure stops nobody


def test_killed_in_the_middle(source: Source, child: Child, tmp_path: Path) -> None:
    names = list(source.files)
    source.held = names[2]
    with child(tmp_path) as first:
        source.wait_for(source.held)
        once = source.counts[names[0]]
        with child(tmp_path) as second:
            second.wait_for("waiting for another process")
            assert (tmp_path / ".fashion_mnist.part").is_dir()
            first.popen.kill()
            first.popen.wait()
            source.wait_for(source.held)  # the other has begun again, from the first file
            assert source.counts[names[0]] == 2 * once
            assert not (tmp_path / "FashionMNIST").exists()
            source.gate.set()
            done = second.wait()
    assert done.returncode == 0 and "identity fashion_mnist-6-3-" in done.output, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"FashionMNIST", ".fashion_mnist.lock"}


def test_what_a_killed_download_left_is_removed(source: Source, here: dict[str, Any], tmp_path: Path) -> None:
    stage = tmp_path / ".fashion_mnist.part"
    torn = stage / "FashionMNIST/raw" / next(iter(source.files)).removesuffix(".gz")
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"torn")
    prepare(DataSpec("fashion_mnist", tmp_path))
    assert not stage.exists() and here["resources"]
    assert load(DataSpec("fashion_mnist", tmp_path)).identity.startswith("fashion_mnist-6-3-")
