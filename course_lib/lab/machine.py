"""What this machine has of the things that the course uses, and what it costs where one of them is missing."""

import ctypes
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

_GIB = 2**30


@dataclass(frozen=True)
class Feature:
    """Something that a system has or lacks: here, on macOS, what the course does with it, and does without it."""

    name: str
    here: bool
    on_macos: str
    purpose: str
    without: str


@dataclass(frozen=True)
class MachineReport:
    """Sizes and versions as (name, value), and the features. A notebook shows it as two tables."""

    facts: tuple[tuple[str, str], ...]
    features: tuple[Feature, ...]

    def _repr_markdown_(self) -> str:
        facts = [f"| {name} | {value} |" for name, value in self.facts]
        features = [
            f"| {it.name} | **{'yes' if it.here else 'no'}** | {it.on_macos} | {it.purpose} | {it.without} |"
            for it in self.features
        ]
        return "\n".join(
            [
                *("| this machine | |", "|:--|:--|", *facts, ""),
                *("| the course uses | here | macOS | for | without it |", "|:--|:--|:--|:--|:--|", *features),
            ]
        )

    def __str__(self) -> str:
        return self._repr_markdown_()

    __repr__ = __str__


def machine_report() -> MachineReport:
    """Look at this machine; takes well under a second and changes nothing."""
    return MachineReport(facts=(*_sizes(), *_backends()), features=_features())


def _sizes() -> list[tuple[str, str]]:
    memory, cores = memory_bytes(), usable_cores()
    rank_advice = "a core for each of the two ranks" if cores > 1 else "the two ranks share it: expect twice the time"
    system = "WSL2" if "microsoft" in platform.release().lower() else platform.system()
    return [
        ("cores", f"{cores}: {rank_advice}"),
        ("memory", f"{memory / _GIB:.1f} GiB" if memory else "unknown"),
        ("free disk", f"{shutil.disk_usage(Path.cwd()).free / _GIB:.0f} GiB"),
        ("system", f"{system} on {platform.machine()}, Python {platform.python_version()}"),
    ]


def _backends() -> list[tuple[str, str]]:
    distributed = torch.distributed.is_available()
    gloo = distributed and torch.distributed.is_gloo_available()
    nccl = distributed and torch.distributed.is_nccl_available()
    gpus = torch.cuda.device_count()
    built = "in this torch" if nccl else "not in this torch"
    use = f"{gpus} GPU(s): NCCL can carry the gradients" if nccl and gpus else "no GPU in use: gloo takes its place"
    return [
        ("torch", torch.__version__),
        ("gloo", "yes: ranks talk over it on the CPU" if gloo else "no: the course cannot run with this torch"),
        ("NCCL", f"{built}; {use}"),
    ]


def usable_cores() -> int:
    """The cores that this process may use, which in a container or under `taskset` are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
        with suppress(OSError, ValueError):
            quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
            cores = min(cores, max(1, round(int(quota) / int(period))))
        return cores
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory that this process may use, in bytes; 0 when the system doesn't say."""
    memory = 0
    with suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a container's limit; "max" where there is none
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def _features() -> tuple[Feature, ...]:
    return (
        Feature(
            "127.0.0.2",
            has_second_address(),
            "after `sudo ifconfig lo0 alias 127.0.0.2 up`",
            "a second node, with an address of its own, on this machine",
            "set the alias, or read 06's outputs instead of running it",
        ),
        Feature(
            "`prctl`",
            has_prctl(),
            "no",
            "a worker that dies with its agent",
            "an agent that is killed leaves workers that train on; a notebook ends them with its kernel",
        ),
        Feature(
            "network namespaces",
            has_network_namespaces(),
            "no",
            "cutting the network between two nodes",
            "a node's processes can be stopped, but not its network",
        ),
        Feature(
            "`sigwaitinfo`",
            hasattr(signal, "sigwaitinfo"),
            "no",
            "knowing who sent a signal: the agent, or the one who takes the machine away",
            "the agent is assumed, so a preemption may cost a restart",
        ),
    )


def has_second_address() -> bool:
    """Whether 127.0.0.2 is an address of this machine: all of 127.* is on Linux, only 127.0.0.1 on macOS."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.2", 0))
        except OSError:
            return False
    return True


def has_prctl() -> bool:
    """Whether the C library has Linux's `prctl`, by which a process asks to die with its parent."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "prctl")


def has_network_namespaces() -> bool:
    """Whether this user may make a network of its own: some containers and hardened systems forbid it."""
    if shutil.which("unshare") is None:
        return False
    try:
        tried = subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0
