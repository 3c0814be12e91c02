"""Processes find each other, in whatever state the dead have left the store, and leave without a word."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import UsageError, World, open_world, read_events, run
from course_lib.engine import world as world_module
from course_lib.engine.place import Place, find_place
from course_lib.engine.roster import agree_on_name

# --- the roster, in threads that share one store as the restarts of a torchrun job do -----------------------------


class Died(Exception):
    """The process is gone at this operation."""


class Mortal:
    """A rank's connection to the store. The rank dies instead of operation `last`, and with it all, as by an agent."""

    def __init__(self, store: TCPStore, killed: threading.Event, last: int | None) -> None:
        self._store, self._killed, self._left = store, killed, last

    def __getattr__(self, name: str) -> Any:
        if self._left == 0:
            self._killed.set()
        if self._killed.is_set():
            raise Died
        if self._left is not None:
            self._left -= 1
        return getattr(self._store, name)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returned, or raised, when all run at the same time."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (TimeoutError, Died) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def names(stores: Sequence[Any], sizes: Sequence[int] = (), timeout_s: float = 20.0) -> list[Any]:
    """The name that each rank arrived at; `sizes` are the world sizes that they believe in."""
    sizes = sizes or [len(stores)] * len(stores)
    ranks = enumerate(zip(stores, sizes, strict=True))
    return together([partial(agree_on_name, store, rank, size, timeout_s) for rank, (store, size) in ranks])


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def clients(server: TCPStore) -> list[TCPStore]:
    """Connections to a store that remembers all generations, as those of a torchrun job do."""
    limit = timedelta(seconds=20)
    return [TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit) for _ in range(4)]


def test_each_generation_has_a_name_of_its_own_whatever_its_size(clients: list[TCPStore]) -> None:
    seen: set[Any] = set()
    for size in [1, 2, 3, 4, 3, 3, 2, 2, 3, 1, 4, 2, 3] * 3:
        found = names(clients[:size])
        assert len(set(found)) == 1 and isinstance(found[0], str) and found[0] not in seen
        seen |= set(found)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_at_any_operation_leaves_nothing_that_the_next_generation_trips_over(
    clients: list[TCPStore], victim: int
) -> None:
    old: set[Any] = set()
    for last in range(100):
        killed = threading.Event()
        outcomes = names([Mortal(clients[rank], killed, last if rank == victim else None) for rank in range(3)])
        old |= {name for name in outcomes if isinstance(name, str)}
        for size in (2, 3):
            found = names(clients[:size])
            assert len(set(found)) == 1 and isinstance(found[0], str) and found[0] not in old
            old |= set(found)
        if not any(isinstance(outcome, Died) for outcome in outcomes):
            return  # it was through before its turn to die came
    pytest.fail("the victim never got through, so not every operation was tried")


def test_a_rank_that_posts_and_dies_is_replaced_while_the_others_wait(
    server: TCPStore, clients: list[TCPStore]
) -> None:
    def replacement() -> str:
        server.set("roster/post/1", "dead/3")
        while not server.check(["roster/current"]) or "dead/3" not in server.get("roster/current").decode():
            time.sleep(0.01)
        first = json.loads(server.get("roster/current"))["name"]
        server.wait([f"roster/confirmed/{first}/2"], timedelta(seconds=20))
        second = agree_on_name(clients[1], 1, 3, 20)
        assert second != first
        return second

    found = together([partial(agree_on_name, clients[rank], rank, 3, 20) for rank in (0, 2)] + [replacement])
    assert len(set(found)) == 1 and isinstance(found[0], str)


def test_who_is_missing_is_named(clients: list[TCPStore]) -> None:
    zero, two = together([partial(agree_on_name, clients[rank], rank, 3, 0.4 + 0.2 * rank) for rank in (0, 2)])
    assert "rank 1 of 3 has not shown up" in str(zero)
    assert "rank 0 waited for a rank that has not shown up" in str(two)


def test_a_missing_rank_0_is_named(server: TCPStore) -> None:
    with pytest.raises(TimeoutError, match="rank 0 has not shown up"):
        agree_on_name(server, 1, 2, 0.2)


def test_a_dead_rank_that_is_not_replaced_is_named(server: TCPStore) -> None:
    server.set("roster/post/1", "dead/2")
    with pytest.raises(TimeoutError, match="no answer from rank 1"):
        agree_on_name(server, 0, 2, 0.2)


def test_ranks_that_disagree_about_the_size_say_so(clients: list[TCPStore]) -> None:
    zero, one = names(clients[:2], sizes=[2, 3], timeout_s=0.5)
    assert "rank 1 expects a world of 3 ranks, rank 0 one of 2" in str(zero)
    assert "rank 0 expects a world of 2 ranks, rank 1 one of 3" in str(one)


# --- where a process is ---------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "here", "MASTER_PORT": "0"}


def place(monkeypatch: pytest.MonkeyPatch, **env: str) -> Place:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return find_place(None, None, None)


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": ""}])
def test_without_a_launcher_a_process_is_alone(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    assert place(monkeypatch, **env) == Place(0, 0, 1, 1, None, serves=False)


def test_torchrun_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = place(monkeypatch, **TORCHRUN, LOCAL_WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    assert inside == Place(1, 0, 3, 2, ("here", 0), serves=False, under_torchrun=True)


@pytest.mark.parametrize(("rank", "agent_serves", "serves"), [("0", "False", True), ("0", "True", False)])
def test_rank_0_serves_the_store_when_the_agent_does_not(
    monkeypatch: pytest.MonkeyPatch, rank: str, agent_serves: str, serves: bool
) -> None:
    env = TORCHRUN | {"RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": agent_serves}
    assert place(monkeypatch, **env).serves is serves


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "3", "RANK": "2"}, "WORLD_SIZE=3 is set but LOCAL_RANK is not: start the script with torchrun"),
        ({"WORLD_SIZE": "three"}, "WORLD_SIZE=three is set"),
        ({"LOCAL_RANK": "0"}, "RANK"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "http"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match="start the script with torchrun") as refusal:
        place(monkeypatch, **env)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


# --- real groups, from a process that has torch loaded and forks a rank in a few milliseconds ---------------------


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, what it returned, and what it wrote."""

    code: int | None
    value: Any
    output: str


ZYGOTE = get_context("forkserver")
ZYGOTE.set_forkserver_preload(["torch.distributed", "torch.nn.parallel", "course_lib.engine"])


@pytest.fixture(scope="module")
def zygote() -> Iterator[None]:
    """Nothing of the process that forks the ranks outlives the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _rank(
    work: Callable[..., Any], rank: int, args: tuple[Any, ...], env: dict[str, str], path: Path, box: Any
) -> None:
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)} | env)
    box.send(work(rank, *args))


def ranks(
    tmp_path: Path, count: int, work: Callable[..., Any], *args: Any, env: dict[str, str] | None = None
) -> list[End]:
    """Run `work(rank, *args)` in `count` processes to their ends."""
    started = []
    for rank in range(count):
        out, box = ZYGOTE.Pipe(duplex=False)
        path = tmp_path / f"rank-{rank}.txt"
        process = ZYGOTE.Process(target=_rank, args=(work, rank, args, env or {}, path, box), daemon=True)
        process.start()
        box.close()
        started.append((process, out, path))
    ends = []
    deadline = time.monotonic() + 60
    try:
        for process, out, path in started:
            process.join(max(0.0, deadline - time.monotonic()))
            value = None
            if out.poll():
                with contextlib.suppress(EOFError):
                    value = out.recv()
            ends.append(End(process.exitcode, value, path.read_text() if path.exists() else ""))
    finally:
        for process, _, _ in started:
            process.kill()
            process.join()
    return ends


def spawned(rank: int, size: int, port: int, **more: Any) -> Any:
    """`open_world` for a process started by a parent that serves the store."""
    return open_world("cpu", rank=rank, world_size=size, master=("127.0.0.1", port), say=lambda text: None, **more)


def everything(rank: int, size: int, port: int) -> dict[str, Any]:
    with spawned(rank, size, port) as world:
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), float(rank))).sum().backward()
        return {
            "world": (world.rank, world.local_rank, world.world_size, world.device.type, world.generation),
            "gather": world.gather({"rank": rank}),
            "broadcast": world.broadcast(f"from {rank}", source=size - 1),
            "sum": world.sum([1.0, float(rank)]),
            "agree": world.agree(lambda: rank),
            "gradient": float(model.module.weight.grad),
        }


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize("size", [1, 3])
def test_spawned_ranks_form_a_world(tmp_path: Path, server: TCPStore, size: int) -> None:
    ends = ranks(tmp_path, size, everything, size, server.port)
    total = size * (size - 1) / 2
    for rank, end in enumerate(ends):
        assert (end.code, end.output) == (0, "")
        assert end.value == {
            "world": (rank, rank, size, "cpu", None),
            "gather": [{"rank": r} for r in range(size)],
            "broadcast": f"from {size - 1}",
            "sum": [float(size), total],
            "agree": rank,
            "gradient": pytest.approx(total / size),
        }


def fail_on(world: World, bad: int, error: Exception) -> str:
    def action() -> None:
        if world.rank == bad:
            raise error

    try:
        world.agree(action)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return "nothing"


def agreements(rank: int, port: int) -> list[str]:
    with spawned(rank, 3, port) as world:
        first = fail_on(world, 1, ValueError("no"))
        second = fail_on(world, 2, UsageError("--lr is wrong"))
        return [first, second, str(world.agree(lambda: "and on we go"))]


@pytest.mark.usefixtures("zygote")
def test_what_fails_on_one_rank_is_raised_on_all_of_them(tmp_path: Path, server: TCPStore) -> None:
    ends = ranks(tmp_path, 3, agreements, server.port)
    expected = ["RuntimeError: rank 1: ValueError: no", "UsageError: --lr is wrong", "and on we go"]
    assert [(end.code, end.value) for end in ends] == [(0, expected)] * 3


def prepare_badly(rank: int, port: int, error: Exception) -> None:
    def prepare() -> None:
        if rank == 1:
            raise error

    def main() -> None:
        with spawned(rank, 3, port, prepare=prepare):
            print("never reached")

    run(main)


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("--data-root: no such folder"), 2, ["error: --data-root: no such folder\n", "", ""]),
        (OSError("disk gone"), 1, ["RuntimeError: rank 1: OSError: disk gone\n"] * 2 + [""]),
    ],
)
def test_a_prepare_that_fails_on_one_rank_ends_all(
    tmp_path: Path, server: TCPStore, error: Exception, code: int, words: list[str]
) -> None:
    ends = ranks(tmp_path, 3, prepare_badly, server.port, error)
    assert [end.code for end in ends] == [code] * 3
    assert all(end.output.endswith(word) and (word or not end.output) for end, word in zip(ends, words, strict=True))


def open_and_close(rank: int, sizes: list[int], master: tuple[str, int]) -> str:
    try:
        with open_world(
            "cpu", rank=rank, world_size=sizes[rank], master=master, start_timeout_s=1.0, say=lambda text: None
        ):
            return "it formed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.usefixtures("zygote")
def test_a_group_that_cannot_form_names_the_cause(tmp_path: Path, server: TCPStore) -> None:
    ends = ranks(tmp_path, 2, open_and_close, [2, 3], ("127.0.0.1", server.port))
    where = f"TimeoutError: no process group at 127.0.0.1:{server.port}, limit 1 s: "
    assert [end.value for end in ends] == [
        where + "rank 1 expects a world of 3 ranks, rank 0 one of 2",
        where + "rank 0 expects a world of 2 ranks, rank 1 one of 3",
    ]


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize(
    ("host", "cause"), [("127.0.0.1", "refused"), ("nowhere.invalid", "the name does not resolve")]
)
def test_an_address_without_a_store_is_named_with_the_cause(tmp_path: Path, host: str, cause: str) -> None:
    port = helpers.free_port()
    end = ranks(tmp_path, 1, open_and_close, [1], (host, port))[0]
    assert end.value.startswith(f"TimeoutError: no connection to the rendezvous store at {host}:{port} within 1 s: ")
    assert cause in end.value and end.output == ""


@pytest.mark.usefixtures("zygote")
def test_a_listener_that_is_no_store_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = ranks(tmp_path, 1, open_and_close, [1], ("127.0.0.1", listener.getsockname()[1]))[0]
    assert end.value.startswith("TimeoutError: no process group at 127.0.0.1:")
    assert end.value.endswith("whoever listens there does not answer: it is stopped, or no rendezvous store")


def leave_or_not(rank: int, port: int, how: str) -> str:
    try:
        with spawned(rank, 2, port, collective_timeout_s=2.0) as world:
            world.gather(None)
            if rank == 1:
                if how == "hangs":
                    time.sleep(3)
                os._exit(9)
            if how != "does not meet the others at the end":
                world.gather(None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


@pytest.mark.usefixtures("zygote")
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("dies", "PeerLost: another rank died or left ("),
        ("does not meet the others at the end", "PeerLost: another rank died or left ("),
        ("hangs", "PeerLost: another rank gave no answer for 2 s, so it hangs or is far too slow ("),
    ],
)
def test_a_lost_peer_is_told_in_one_line_with_the_likely_cause(
    tmp_path: Path, server: TCPStore, how: str, cause: str
) -> None:
    end = ranks(tmp_path, 2, leave_or_not, server.port, how)[0]
    assert end.value.startswith(cause) and "\n" not in end.value and "/gloo/" not in end.value


@pytest.mark.parametrize("text", ["DataLoader timed out after 5 seconds", "Socket is a word", "shapes do not match"])
def test_an_error_of_ones_own_is_no_lost_peer(text: str) -> None:
    with pytest.raises(RuntimeError, match=text) as failure, open_world("cpu", say=lambda text: None):
        raise RuntimeError(text)
    assert type(failure.value) is RuntimeError
    dist.destroy_process_group()  # an error of one rank leaves the group to the end of the process


def test_all_ranks_meet_before_any_of_them_takes_the_group_down(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("barrier", "destroy_process_group"):
        original = getattr(dist, name)
        monkeypatch.setattr(world_module.dist, name, lambda n=name, f=original: (calls.append(n), f()))
    with open_world("cpu", say=lambda text: None):
        pass
    assert calls == ["barrier", "destroy_process_group"] and not dist.is_initialized()


def test_one_world_after_another_in_one_process() -> None:
    for _ in range(2):
        with open_world("cpu", say=lambda text: None) as world:
            assert world.gather(1) == [1] and dist.get_world_size() == 1


# --- under a launcher and without one -------------------------------------------------------------------------

JOB = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
from course_lib.engine import open_world, run

def main():
    with open_world("cpu") as world:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if (attempt, str(world.rank)) == ("0", os.environ.get("DIES")):
            os._exit(1)
        ranks = world.gather((world.rank, world.local_rank, world.world_size))
        if world.rank == 0:
            print("attempt", attempt, ranks, flush=True)

if __name__ == "__main__":
    run(main)
"""
PRESET = {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "nowhere"}  # as an operator sets them in a pod

Launch = Callable[..., helpers.Completed]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def test_a_plain_script_is_a_world_of_one_and_ends_without_a_word(launch: Launch, job: Path) -> None:
    done = launch([sys.executable, job], env=helpers.torchrun_env())
    assert (done.returncode, done.output) == (0, "attempt 0 [(0, 0, 1)]\n")


def test_a_plain_script_in_a_pod_is_refused_in_one_line(launch: Launch, job: Path) -> None:
    done = launch([sys.executable, job], env=helpers.torchrun_env(PRESET))
    assert done.returncode == 2
    assert done.output.count("\n") == 1
    assert done.output.startswith("error: WORLD_SIZE=3 is set but LOCAL_RANK is not: start the script with torchrun")


def test_torchrun_overrules_the_pod_and_all_end_without_a_word(torchrun: Launch, job: Path) -> None:
    done = torchrun(script=job, env=PRESET)
    assert (done.returncode, done.output) == (0, "attempt 0 [(0, 0, 2), (1, 1, 2)]\n")


def test_a_group_whose_rank_failed_is_restarted_once_under_a_plain_torchrun(torchrun: Launch, job: Path) -> None:
    restart_once(torchrun, job, victim=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ten_groups_in_a_row_are_restarted_once_each(torchrun: Launch, job: Path) -> None:
    for i in range(10):
        restart_once(torchrun, job, victim=i % 2)


def restart_once(torchrun: Launch, job: Path, victim: int) -> None:
    """The rank dies in the first attempt; the second one must not trip over what it left in the store."""
    done = torchrun(script=job, max_restarts=3, env={"DIES": str(victim)})
    assert done.returncode == 0, done.tail()
    assert [line for line in done.output.splitlines() if line.startswith("attempt")] == [
        "attempt 1 [(0, 0, 2), (1, 1, 2)]"
    ]


def test_two_agents_share_one_run_and_the_rank_alone_decides(tmp_path: Path, running: Callable[..., Any]) -> None:
    port, run_dir = helpers.free_port(), tmp_path / "run"
    options = ("--epochs", 1, "--snapshot-every", 8)

    def agent(node_rank: int) -> list[str]:
        # An agent's --node-rank means nothing to this rendezvous; the numbers are swapped to show it.
        rendezvous = ["--nnodes=2", f"--node-rank={1 - node_rank}", "--rdzv-backend=c10d", "--rdzv-id=two-agents"]
        rendezvous += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--local-addr=127.0.0.{node_rank + 1}"]
        return helpers.torchrun_cmd(
            *options,
            script="scripts/ddp_torchrun.py",
            nproc=1,
            run_dir=run_dir,
            standalone=False,
            agent_args=rendezvous,
        )

    with running(agent(0), env=helpers.torchrun_env()) as a, running(agent(1), env=helpers.torchrun_env()) as b:
        ends = [a.wait(), b.wait()]
    assert [end.returncode for end in ends] == [0, 0], "\n".join(end.tail() for end in ends)
    assert sorted(end.output.count("finished after 24 steps") for end in ends) == [0, 1]
    events = read_events(run_dir).events
    saves = [(e["step"], e["rank"]) for e in events if e["event"] == "snapshot_saved"]
    assert saves == [(8, 0), (16, 0), (24, 0)]
    assert {e["rank"] for e in events} == {0, 1} and {e["generation"] for e in events} == {None, 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_two_launches_at_once_do_not_meet_even_when_the_usual_port_is_taken(
    tmp_path: Path, running: Callable[..., Any], job: Path
) -> None:
    try:
        stale: Any = socket.create_server(("127.0.0.1", 29500))  # torchrun's default, held by somebody
    except OSError:
        stale = socket.socket()  # taken already, which is as good
    cmd, env = helpers.torchrun_cmd(script=job, nproc=1), helpers.torchrun_env()
    with stale, running(cmd, env=env) as one, running(cmd, env=env) as two:
        ends = [one.wait(), two.wait()]
    assert [(end.returncode, end.output) for end in ends] == [(0, "attempt 0 [(0, 0, 1)]\n")] * 2
