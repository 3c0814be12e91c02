"""A fresh name for the process group, agreed through a store that may remember dead workers.

Under a plain `torchrun` all restarts share one TCPStore without a prefix, so a restarted rank can read the address
that a dead peer left there (pytorch issue 135712): of 18 restarts 7 were clean, 5 hung. The restart count is no
help, because each agent keeps its own. What all members of the new group share, and no dead one has, is a token
that each draws at its start. Rank 0 publishes the roster of tokens that it finds until every rank has confirmed a
roster that holds its own; the roster's name then prefixes every key that the group writes.
"""

import json
import secrets
import socket
import time

from torch._C._distributed_c10d import Store

_POLL_S = 0.01


def agree_on_name(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """The name that exactly this generation of `world_size` ranks shares; TimeoutError says who is missing."""
    post = f"{secrets.token_hex(8)}/{world_size}"
    store.set(f"roster/post/{rank}", post)
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return _publish(store, world_size, deadline)
    return _follow(store, rank, world_size, post, deadline)


def _read(store: Store, key: str) -> str | None:
    """A key's value now, without waiting for it as `Store.get` does."""
    return store.get(key).decode() if store.check([key]) else None


def _publish(store: Store, world_size: int, deadline: float) -> str:
    published: list[str | None] = []
    name = ""
    while time.monotonic() < deadline:
        posts = [_read(store, f"roster/post/{rank}") for rank in range(world_size)]
        # A post of another world size is a dead worker's, or a mistake that the time limit will show.
        if all(post and post.endswith(f"/{world_size}") for post in posts):
            if posts != published:
                name, published = secrets.token_hex(8), posts
                store.set("roster/current", json.dumps({"name": name, "posts": posts}))
            if store.check([f"roster/confirmed/{name}/{rank}" for rank in range(1, world_size)]):
                store.set(f"roster/sealed/{name}", "1")
                return name
        time.sleep(_POLL_S)
    raise TimeoutError(_who_is_missing(store, world_size, name))


def _follow(store: Store, rank: int, world_size: int, post: str, deadline: float) -> str:
    confirmed = ""
    while time.monotonic() < deadline:
        text = _read(store, "roster/current")
        roster = json.loads(text) if text else {"name": "", "posts": []}
        if post in roster["posts"]:
            name = str(roster["name"])
            if name != confirmed:
                store.set(f"roster/confirmed/{name}/{rank}", "1")
                confirmed = name
            if store.check([f"roster/sealed/{name}"]):
                return name
        time.sleep(_POLL_S)
    other = _read(store, "roster/post/0")
    if other is None:
        raise TimeoutError("rank 0 has not shown up")
    size = other.rsplit("/", 1)[1]
    if size != str(world_size):
        raise TimeoutError(f"rank 0 expects a world of {size} ranks, rank {rank} one of {world_size}")
    raise TimeoutError("rank 0 waited for a rank that has not shown up")


def _who_is_missing(store: Store, world_size: int, name: str) -> str:
    for rank in range(world_size):
        post = _read(store, f"roster/post/{rank}")
        if post is None:
            return f"rank {rank} of {world_size} has not shown up"
        size = post.rsplit("/", 1)[1]
        if size != str(world_size):
            return f"rank {rank} expects a world of {size} ranks, rank 0 one of {world_size}"
    silent = [r for r in range(1, world_size) if not store.check([f"roster/confirmed/{name}/{r}"])]
    return f"no answer from rank {', '.join(map(str, silent))}"


def wait_for_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens there; TimeoutError says why nobody could be reached.

    TCPStore's own retries end in a page of C++ stack instead of a line.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                cause = "the name does not resolve" if isinstance(error, socket.gaierror) else str(error)
                raise TimeoutError(
                    f"no connection to the rendezvous store at {host}:{port} within {timeout_s:g} s: {cause}"
                ) from None
            time.sleep(0.1)
