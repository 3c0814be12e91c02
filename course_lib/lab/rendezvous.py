r"""A rendezvous store in a process of its own, so that the job outlives any of its nodes.

torchrun's `c10d` rendezvous keeps its state in a TCPStore, which by default the agent on the host of --rdzv-endpoint
serves. When that host is lost, every agent dies with it, however many nodes the job could do without. So on a cluster
start the store where nothing trains, on a login node or in a small pod, with the address that the nodes can reach:

    python -m course_lib.lab.rendezvous --host 10.0.0.5 --port 29400

and on each node say that none of the agents serves the store:

    python -m course_lib.engine.launch --nnodes 2:4 --rdzv-backend c10d --rdzv-id NAME \
        --rdzv-endpoint 10.0.0.5:29400 --rdzv-conf is_host=false … train.py …

(That is torchrun, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which a node that joins ends the job.)

It holds a few kilobytes, in memory only: when this process ends, the agents end too, within seconds, and a new store
knows nothing of the job; start the nodes again, and they go on from their snapshots. One store serves many jobs, each
with an --rdzv-id of its own. A TCPStore asks nobody for a password: let only the cluster's own network reach it.

`--parent PID` ends it as soon as its parent is not process PID any more: a notebook that dies leaves no store behind.
"""

import argparse
import os
import signal
import socket
import time
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import TCPStore

from course_lib.engine import UsageError, run

_POLL_S = 0.1


class _Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help explains)")


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address only; by itself TCPStore takes all of the machine's."""
    try:
        if not 0 <= port < 2**16:
            raise OSError("a port is a number from 0 to 65535")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen at {host}:{port}: {error}") from None
    return listener


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT comes; raises UsageError for an address that cannot be had."""
    parser = _Parser(
        "python -m course_lib.lab.rendezvous", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1); 0.0.0.0 is all of them")
    parser.add_argument("--port", type=int, default=0, help="port to listen at; 0, the default, is a free one")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when the parent process is not PID any more")
    options = parser.parse_args(argv)
    asked: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: asked.append(number))
    listener = _listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    near, shown = host, f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        near, shown = "localhost", socket.gethostname()
    store = TCPStore(
        near,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    print(f"rendezvous at {shown}:{port}", flush=True)
    while not asked and (options.parent is None or os.getppid() == options.parent):
        time.sleep(_POLL_S)
    del store


if __name__ == "__main__":
    run(main)
