"""Where the nodes of a job are: in the machine's own network, or each in one of its own that can be cut."""

import socket
from collections.abc import Mapping
from typing import Protocol

from course_lib.engine import UsageError

NAMES = "abcdefgh"


def free_port(address: str) -> int:
    """A port of this address that was free a moment ago; OSError when the machine does not have the address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


class Network(Protocol):
    """The nodes' addresses, the words that start a command on one (None: beside them), and what its environment needs.

    `host` is the address of the rendezvous process, which every node can reach.
    """

    host: str

    def address(self, name: str) -> str: ...

    def inside(self, name: str | None) -> list[str]: ...

    def environment(self) -> Mapping[str, str]: ...


class Loopback:
    """All nodes in the machine's own network, each at an address of the loopback."""

    host = "127.0.0.1"

    def address(self, name: str) -> str:
        """The address of node `name`; UsageError when this machine does not have it."""
        # One digit each, so that the order of the strings is that of the names.
        address = f"127.0.0.{2 + NAMES.index(name)}"
        try:
            free_port(address)
        except OSError:
            raise UsageError(
                f"node {name} needs the address {address}, which this machine does not have: on macOS say "
                f"`sudo ifconfig lo0 alias {address} up`"
            ) from None
        return address

    def inside(self, name: str | None) -> list[str]:
        return []

    def environment(self) -> Mapping[str, str]:
        return {}
