"""Nodes with networks of their own, whose cables can be pulled: Linux network namespaces joined by a bridge.

    with Namespaces("abc") as network, Cluster(run, script, nodes="2:3", network=network) as c:
        c.start("a", "b", "c")
        network.cut("c")         # nothing gets to c or from it, and nobody is told
        network.heal("c")

A namespace lives as long as the process that holds it, so no interface is left when that is killed. They are made in a
user namespace: root is not needed where the system lets users have these, and the machine's own network is not touched.
"""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from string import ascii_lowercase

from course_lib.engine import UsageError
from course_lib.lab.processes import MARK, kill_marked, launch_mark

_PATIENCE_S = 10.0
_HOLD = ["sleep", "infinity"]


class Namespaces:
    """A switch, to which the rendezvous process is connected, and a node for each of `names`.

    Raises UsageError, with the reason, where this user may not make networks.
    """

    host = "10.77.0.1"  # of a network that nobody else can see

    def __init__(self, names: str) -> None:
        self._mark, self._value = launch_mark()
        self._pids: dict[str | None, int] = {}
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._build(names)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            said = getattr(error, "stderr", None)
            reason = said.strip() if said else error
            raise UsageError(f"this system does not let you make a network ({reason})") from None

    def __enter__(self) -> "Namespaces":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that hold the namespaces, and all interfaces with them."""
        kill_marked(self._mark)
        for holder in self._holders:
            holder.communicate(timeout=_PATIENCE_S)
        self._holders = []

    def address(self, name: str) -> str:
        """The address of node `name`."""
        return f"10.77.0.{2 + ascii_lowercase.index(name)}"

    def inside(self, name: str | None) -> list[str]:
        """The words that run a command on a node; None is the switch."""
        if name not in self._pids:
            raise UsageError(f"there is no network for a node {name!r}: name it when you make the Namespaces")
        enter = ["nsenter", "--target", str(self._pids[name]), "--user", "--net", "--preserve-credentials"]
        return [*enter, "--"]

    def environment(self) -> Mapping[str, str]:
        """gloo takes the interface that belongs to the machine's name, which here is the loopback."""
        return {"GLOO_SOCKET_IFNAME": "eth0"}

    def cut(self, name: str) -> None:
        """Take down the switch's port of a node, as when its cable is pulled."""
        self._run(None, f"ip link set port-{name} down")

    def heal(self, name: str) -> None:
        """Plug the cable in again."""
        self._run(None, f"ip link set port-{name} up")

    def _build(self, names: str) -> None:
        self._hold(None, ["unshare", "--map-root-user", "--net", *_HOLD])
        self._run(None, "ip link set lo up")
        self._run(None, "ip link add switch type bridge forward_delay 0")
        self._run(None, f"ip addr add {self.host}/24 dev switch")
        self._run(None, "ip link set switch up")
        for name in names:
            self._hold(name, [*self.inside(None), "unshare", "--net", *_HOLD])
            self._run(None, f"ip link add port-{name} type veth peer name eth0 netns {self._pids[name]}")
            self._run(None, f"ip link set port-{name} master switch up")
            self._run(name, "ip link set lo up")
            self._run(name, f"ip addr add {self.address(name)}/24 dev eth0")
            self._run(name, "ip link set eth0 up")

    def _hold(self, name: str | None, words: list[str]) -> None:
        """Start the process that holds a namespace, and wait until it has it."""
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self._value},
            start_new_session=True,
        )
        self._holders.append(process)
        deadline = time.monotonic() + _PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                if Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(_HOLD[0].encode()):
                    self._pids[name] = process.pid
                    return
            time.sleep(0.01)
        process.kill()
        said = process.stderr.read().strip() if process.stderr is not None else ""
        raise subprocess.SubprocessError(said or "it takes too long")

    def _run(self, name: str | None, command: str) -> None:
        words = [*self.inside(name), *command.split()]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
