"""The process group: one context manager for torchrun, for spawned processes and for a plain `python script.py`."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from course_lib.engine.errors import PeerLost, UsageError
from course_lib.engine.guard import call_guards, dismiss_guard, start_guard
from course_lib.engine.halves import may_grow
from course_lib.engine.place import Place, choose_device, find_place, limit_threads
from course_lib.engine.roster import agree_on_name, wait_for_port
from course_lib.engine.watchdog import StopWatch, die_with_agent

T = TypeVar("T")
# What gloo and NCCL say when the other end is gone or silent; torch gives most of it no type of its own.
_LOST = ("/gloo/", "connectFullMesh", "closed by peer", "reset by peer", "remote process exited", "Watchdog caught")


@dataclass(frozen=True)
class World:
    """Who this process is among its peers.

    `device` is where its tensors live; `generation` numbers the incarnations of a run's process group and is None
    until the ranks have agreed on it; `store` is the group's key-value store; `joined` is when there was a group, in
    Unix seconds. The methods are collectives: every rank calls them in the same order.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    generation: int | None = None
    stop: StopWatch = field(default_factory=StopWatch, repr=False, compare=False)
    store: Store = field(default_factory=HashStore, repr=False, compare=False)
    joined: float = field(default_factory=time.time, init=False, repr=False, compare=False)

    def gather(self, value: T) -> list[T]:
        """The picklable `value` of every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """The picklable `value` of rank `source`, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise float64 sums over the ranks, on every rank."""
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def agree(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; when it fails on any, raise the first failure on all of them.

        Without it, the rank that failed leaves and the others wait for it until the collective timeout.
        """
        result: T | None = None
        mine: tuple[bool, str] | None = None
        cause: Exception | None = None
        try:
            result = action()
        except Exception as error:
            usage = isinstance(error, UsageError)
            mine = usage, str(error) if usage else f"rank {self.rank}: {type(error).__name__}: {error}"
            cause = error
        failures = [failure for failure in self.gather(mine) if failure is not None]
        if failures:
            usage, text = failures[0]
            raise shared(UsageError(text) if usage else RuntimeError(text)) from cause
        return result  # type: ignore[return-value]  # no failure anywhere, so action() returned its T here


def shared(error: Exception) -> Exception:
    """Mark an error that every rank raises at the same point, so that the group can end in order."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


@contextmanager
def open_world(
    device: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    master: tuple[str, int] | None = None,
    collective_timeout_s: float = 60.0,
    start_timeout_s: float = 300.0,
    prepare: Callable[[], object] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[World]:
    """Join the process group, yield the World, and leave in order.

    Under torchrun the environment says who this process is; without it the process is a world of its own. One that
    `mp.spawn` started passes `rank`, `world_size` and `master`, the address of a TCPStore that its parent serves.
    `device` is auto, cpu or cuda. `prepare` runs before the group exists, so that a slow download is not bounded by
    `collective_timeout_s`; its failure on one rank is raised on all. Raises UsageError when the environment or the
    device makes no sense, TimeoutError when no group forms in `start_timeout_s`, and PeerLost for a peer lost later.
    """
    place = find_place(rank, world_size, master)
    if place.under_torchrun:
        die_with_agent()
    chosen, why = choose_device(device, place.local_rank, place.local_world_size)
    failure = _try(prepare)
    world = World(place.rank, place.local_rank, place.world_size, chosen)
    limit_threads(place.local_world_size)
    if place.under_torchrun:
        world.stop.start()  # before the group's threads exist, so that they inherit the blocked signals
    store: Store = HashStore()
    try:
        if place.master is not None:
            store = _meet(place, *place.master, start_timeout_s, collective_timeout_s)
        _join(place, chosen, store, collective_timeout_s)
        if world.rank == 0 and device == "auto":
            say(f"running on {chosen.type}: {why}")
        if world.rank == 0 and place.under_torchrun and not place.serves and may_grow():  # the agents' store is used
            say("a node that joins will end this job: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for each agent")
        world.agree(lambda: _reraise(failure))
        yield replace(world, store=store)  # which sets `joined` anew
        _leave()
    except Exception as error:
        lost = _last_act(error, world, store, collective_timeout_s)
        if lost is not None:
            raise lost from error
        raise
    finally:
        world.stop.stop()


def _try(action: Callable[[], object] | None) -> Exception | None:
    try:
        if action is not None:
            action()
    except Exception as error:
        return error
    return None


def _reraise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _meet(place: Place, host: str, port: int, timeout_s: float, collective_timeout_s: float) -> Store:
    """The store at which this generation of the group meets, cleared of what the dead have left in it."""
    deadline = time.monotonic() + timeout_s
    if not place.serves:
        wait_for_port(host, port, timeout_s)
    try:
        base = _connect(place, host, port, max(1.0, deadline - time.monotonic()))
        name = agree_on_name(base, place.rank, place.world_size, deadline - time.monotonic())
    except (TimeoutError, DistStoreError, DistNetworkError) as error:
        reason = str(error).splitlines()[0]
        raise TimeoutError(f"no process group at {host}:{port}, limit {timeout_s:g} s: {reason}") from None
    if place.under_torchrun:  # now, before the group has threads: a fork would lose them
        near = "localhost" if place.serves else host
        options: dict[str, Any] = {"is_master": False, "wait_for_workers": False}
        start_guard(lambda: PrefixStore(name, TCPStore(near, port, **options)), place.rank, collective_timeout_s)
    return PrefixStore(name, base)


def _connect(place: Place, host: str, port: int, timeout_s: float) -> Store:
    """The rendezvous store, served by this process or by another.

    In a thread, because torch waits without a limit for a listener that takes the connection and says nothing.
    """
    box: list[Store | Exception] = []
    # A host's own name may not resolve yet, as in a pod that is starting.
    options = {"is_master": place.serves, "wait_for_workers": False, "multi_tenant": True}
    timeout = timedelta(seconds=timeout_s)

    def connect() -> None:
        try:
            box.append(TCPStore("localhost" if place.serves else host, port, timeout=timeout, **options))
        except Exception as error:
            box.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not box:
        raise TimeoutError("whoever listens there does not answer: it is stopped, or no rendezvous store")
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def _join(place: Place, device: torch.device, store: Store, collective_timeout_s: float) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=collective_timeout_s)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)


def _last_act(error: Exception, world: World, store: Store, collective_timeout_s: float) -> PeerLost | None:
    """What the group still does when `error` ends it on this rank; a PeerLost when the error tells of one."""
    if getattr(error, "everywhere", False):
        with suppress(RuntimeError):  # a peer that died by now takes nothing from what all have agreed on
            _leave()
    elif isinstance(error, UsageError):
        # What one rank met alone, or each by itself, is said once on each machine, by the first to meet it.
        with suppress(RuntimeError):  # the store has gone with its host, and so has everybody else
            count = store.add(f"usage-error/{os.environ.get('GROUP_RANK', '0')}", 1)
            error.first_here = count == 1  # type: ignore[attr-defined]  # read by entry.run
    elif (cause := _lost_peer(error, collective_timeout_s)) is not None:
        if "no answer" in cause:
            call_guards(store)
        lost = PeerLost(cause)
        lost.agent_knows = world.stop.from_agent  # type: ignore[attr-defined]  # read by entry.run
        return lost
    return None


def _lost_peer(error: Exception, collective_timeout_s: float) -> str | None:
    """The likely cause, when `error` says that a peer is gone or silent."""
    text = str(error)
    if not isinstance(error, (DistStoreError, DistNetworkError)) and not (
        isinstance(error, RuntimeError) and any(sign in text for sign in _LOST)
    ):
        return None
    # Of "[file:line] Connection closed by peer [address]. This is typically …" the middle says what happened.
    gist = re.sub(r"^\[\S+\] ", "", text.splitlines()[0]).split(". ")[0]
    if "timed out" in text.lower() or "timeout" in text.lower():
        return f"another rank gave no answer for {collective_timeout_s:g} s, so it hangs or is far too slow ({gist})"
    return f"another rank died or left ({gist})"


def _leave() -> None:
    dist.barrier()  # a rank that destroys its group while a peer still talks to it aborts that peer
    dismiss_guard()
    dist.destroy_process_group()
