"""Faults on order: the grammar of --fault, what each kind does to a process, and that it does so only once.

Run as a program, this file is a server that forks one process for each job it reads: importing torch takes longer
than all that a job does.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from course_lib.engine.errors import UsageError
from course_lib.lab.faults import Fault, Injector, parse

Train = Callable[..., tuple[int, list[str]]]
ROOT = Path(__file__).parents[1]
TIMEOUT = 60  # seconds


def silent(event: str, **fields: object) -> None:
    """A log for tests that do not look at it."""


class Tiny:
    """A model of two layers which learns one fixed batch and is driven as the engine drives one."""

    def __init__(self, spec: str, run_dir: Path, rank: int = 0, world: int = 1, log: Any = silent) -> None:
        self.injector = Injector(parse(spec), run_dir, rank, world, log)
        self.injector("start", 0)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.injector.attach(self.model, self.optimizer)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(5, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def finite(self) -> list[bool]:
        return [bool(weight.isfinite().all()) for weight in self.model.parameters()]


def job(spec: str, run_dir: str, rank: int, world: int, first: int) -> None:
    """Train from step `first` to 20, with an evaluation and a snapshot every 4 steps; print a line per event."""

    def log(*words: object, **fields: object) -> None:
        print(*words, *(f"{key}={value}" for key, value in fields.items()), flush=True)

    faulthandler.enable()  # as torchrun's error recorder does
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tiny = Tiny(spec, Path(run_dir), rank, world, log)
    tiny.injector("load", first)
    tiny.injector("warmup", first)
    tiny.step()
    for step in range(first, 20):
        tiny.injector("data", step)
        tiny.step()
        log("step", step)
        for point in ("eval", "snapshot") if (step + 1) % 4 == 0 else ():
            tiny.injector(point, step + 1)
    log("done")


def serve() -> None:
    Tiny("slow", Path()).optimizer.step()  # does torch's slow lazy imports once for all children
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        if (child := os.fork()) == 0:
            signal.alarm(TIMEOUT)
            file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:  # an ordinary exit would take a second to tear down what torch has imported
                job(*arguments)
                os._exit(0)
            except Exception:
                traceback.print_exc()
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__], env=environment, **pipes) as process:
        yield process
        process.communicate(timeout=TIMEOUT)


@pytest.fixture
def train(server: subprocess.Popen[str], tmp_path: Path) -> Train:
    """Runs `job` in a process of its own; returns its exit code (minus the signal) and the lines it printed."""

    def run(spec: str, rank: int = 0, world: int = 1, first: int = 0) -> tuple[int, list[str]]:
        output = tmp_path / "output"
        assert server.stdin and server.stdout
        print(json.dumps([str(output), spec, str(tmp_path), rank, world, first]), file=server.stdin, flush=True)
        return int(server.stdout.readline()), output.read_text().splitlines()

    return run


GOOD = {
    "kill": Fault("kill"),
    "kill:rank=0,step=37": Fault("kill", rank=0, step=37),
    "exit:times=3": Fault("exit", times=3),
    "exception:at=load": Fault("exception", at="load"),
    "segfault:at=forward": Fault("segfault", at="forward"),
    "sigterm:at=eval,step=0": Fault("sigterm", at="eval", step=0),
    "sigint:rank=12": Fault("sigint", rank=12),
    "hang": Fault("hang", how="stop"),
    "hang:how=gil,at=start,seconds=2.5": Fault("hang", how="gil", at="start", seconds=2.5),
    "hang:how=loader": Fault("hang", how="loader", at="data"),
    "hang:at=data,how=loader,seconds=3": Fault("hang", how="loader", at="data", seconds=3.0),
    "slow:seconds=0.25": Fault("slow", seconds=0.25),
    "nan:at=optimizer": Fault("nan", at="optimizer"),
    "oom:step=1,at=snapshot": Fault("oom", step=1, at="snapshot"),
}

# What the message must name: the wrong part, and what is allowed in its place.
BAD = {
    "": ("kind ''", "kill, exit"),
    "Kill": ("kind 'Kill'", "kill, exit"),
    "rank=1": ("kind 'rank=1'", "kill, exit"),
    "ki\nll": (r"kind 'ki\nll'", "kill, exit"),
    "kill:": ("key ''", "rank, step"),
    "kill:node=1": ("key 'node'", "rank, step"),
    "kill: rank=1": ("key ' rank'", "rank, step"),
    "kill:rank=1,": ("key ''", "rank, step"),
    "kill:rank": ("rank must", "rank=VALUE"),
    "kill:rank=0,rank=1": ("rank must", "once"),
    "kill:rank=": ("rank=''", "0 or more"),
    "kill:rank=-1": ("rank='-1'", "0 or more"),
    "kill:rank=all": ("rank='all'", "whole number"),
    "kill:step=-5": ("step='-5'", "0 or more"),
    "kill:step=3.5": ("step='3.5'", "whole number"),
    "kill:step=1_0": ("step='1_0'", "whole number"),
    "kill:step=٣": ("step='٣'", "whole number"),
    "kill:times=0": ("times='0'", "1 or more"),
    "kill:at=sleep": ("at 'sleep'", "start, load, data"),
    "kill:at=": ("at ''", "start, load, data"),
    "hang:how=nap": ("how 'nap'", "stop, spin, gil, loader"),
    "kill:how=spin": ("how belongs to hang", "hang:how=spin"),
    "kill:seconds=3": ("not to kill", "hang and slow"),
    "slow:seconds=soon": ("seconds='soon'", "above 0"),
    "slow:seconds=0": ("seconds='0'", "above 0"),
    "slow:seconds=nan": ("seconds='nan'", "above 0"),
    "slow:seconds=99999999": ("seconds='99999999'", "at most 1000000"),
    "hang:seconds=5": ("how=stop", "spin, gil or loader"),
    "hang:how=loader,at=eval": ("at=eval", "at=data"),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_good_fault_is_read(text: str) -> None:
    assert parse(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_fault_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("--fault") and "\n" not in message
    assert BAD[text][0] in message and BAD[text][1] in message


def test_no_fault_is_no_fault(tmp_path: Path) -> None:
    assert parse(None) is None
    injector = Injector(None, tmp_path, 0, 1, silent)
    injector.attach(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1.0))
    for point in ("start", "load", "warmup", "data", "eval", "snapshot"):
        injector(point, 10)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_not_there_is_refused_unless_it_struck_before(tmp_path: Path) -> None:
    fault = parse("exception:rank=2,times=2,at=load")
    with pytest.raises(UsageError, match=r"--fault.*rank=2.*0 to 1"):
        Injector(fault, tmp_path, 0, 2, silent)
    with pytest.raises(RuntimeError, match="injected"):
        Injector(fault, tmp_path, 2, 3, silent)("load", 0)
    Injector(fault, tmp_path, 0, 2, silent)("load", 0)  # the restarted job has one rank less


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2), (1, 4)])
def test_the_default_is_rank_one_or_zero_when_it_is_alone(tmp_path: Path, rank: int, world: int) -> None:
    fault = parse("exception:at=data")
    for other in {0, 1, 2, 3} - {rank}:
        Injector(fault, tmp_path, other, world, silent)("data", 10)
    with pytest.raises(RuntimeError, match="injected"):
        Injector(fault, tmp_path, rank, world, silent)("data", 10)
    Injector(fault, tmp_path, 0, 1, silent)("data", 10)  # the default moved, the fault stays spent


KINDS = {
    "kill": -signal.SIGKILL,
    "segfault": -signal.SIGSEGV,
    "sigterm": -signal.SIGTERM,
    "sigint": -signal.SIGINT,
    "exit": 5,
    "exception": 1,
    "oom": 1,
    "slow:seconds=0.01": 0,
    "hang:how=spin,seconds=0.01": 0,
}


@pytest.mark.parametrize("spec", KINDS)
def test_each_kind_ends_the_process_in_its_way(train: Train, spec: str) -> None:
    code, lines = train(spec)
    kind = spec.partition(":")[0]
    assert code == KINDS[spec]
    assert lines[9:11] == ["step 9", f"fault kind={kind} at=backward step=10"]
    last = {"exception": "RuntimeError: injected", "oom": "torch.OutOfMemoryError: injected"}
    assert lines[-1].startswith(last.get(kind, "fault" if code else "done"))


POINTS = {"start": [], "load": [], "eval": ["step 11"], "snapshot": ["step 11"]}


@pytest.mark.parametrize("at", ["start", "load", "data", "forward", "backward", "optimizer", "snapshot", "eval"])
def test_each_point_is_hit_in_its_step_and_not_after_the_restart(train: Train, at: str) -> None:
    code, lines = train(f"exit:at={at}")
    assert code == 5 and lines[-1].startswith(f"fault kind=exit at={at}")
    assert lines[-2:-1] == POINTS.get(at, ["step 9"])
    code, lines = train(f"exit:at={at}", first=8)
    assert code == 0 and lines[0] == "step 8" and lines[-1] == "done"


def test_times_counts_over_processes_and_each_strikes_once(train: Train, tmp_path: Path) -> None:
    codes = [train("kill:times=2,step=9", rank=1, world=2, first=8)[0] for _ in range(3)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert len(list((tmp_path / "faults").iterdir())) == 2


@pytest.mark.parametrize(("times", "steps"), [(1, [5]), (3, [5, 6, 7])])
def test_a_slow_rank_stays_slow_for_so_many_steps(train: Train, times: int, steps: list[int]) -> None:
    _, lines = train(f"slow:times={times},seconds=0.001,at=forward,step=5")
    assert [line for line in lines if "fault" in line] == [f"fault kind=slow at=forward step={n}" for n in steps]


def test_the_other_ranks_are_spared(train: Train) -> None:
    assert train("kill:rank=1", rank=0, world=2)[0] == 0


def test_the_record_comes_before_the_event_and_without_it_nothing_happens(tmp_path: Path) -> None:
    seen: list[list[Path]] = []
    fault = parse("slow:seconds=0.001,at=load")
    Injector(fault, tmp_path, 0, 1, lambda *_, **__: seen.append(list(tmp_path.glob("faults/*"))))("load", 0)
    assert [len(files) for files in seen] == [1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/faults").write_text("a file in the place of the directory")
    with pytest.raises(OSError):
        Injector(parse("kill:at=load"), tmp_path / "other", 0, 1, silent)("load", 0)


def test_a_stopped_process_stops(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:  # needs no torch, so that a fork of this process is safe
        signal.alarm(TIMEOUT)
        Injector(Fault("hang", at="load"), tmp_path, 0, 1, silent)("load", 0)
        os._exit(7)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    os.kill(child, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("how", ["spin", "loader", "gil"])
def test_only_a_held_lock_stops_the_other_threads(tmp_path: Path, how: str) -> None:
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    Injector(Fault("hang", how=how, seconds=0.6, at="data"), tmp_path, 0, 1, silent)("data", 10)
    end = time.monotonic()
    stop.set()
    thread.join()
    assert any(begin + 0.1 < tick < end - 0.1 for tick in ticks) == (how != "gil")


def test_signals_do_not_end_a_hang_that_holds_the_lock(tmp_path: Path) -> None:
    order: list[str] = []
    before = signal.signal(signal.SIGALRM, lambda *_: order.append("signal"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        Injector(Fault("hang", how="gil", seconds=0.3, at="data"), tmp_path, 0, 1, silent)("data", 10)
        order.append("end")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert order[:2] == ["signal", "signal"] and "end" in order


@pytest.mark.parametrize("at", ["data", "forward", "backward", "optimizer"])
def test_a_nan_inside_a_step(tmp_path: Path, at: str) -> None:
    tiny, clean = Tiny(f"nan:step=2,at={at}", tmp_path), Tiny("nan:step=99", tmp_path / "clean")
    for step in (0, 1):
        tiny.injector("data", step)
        clean.injector("data", step)
        assert tiny.step() == clean.step() and all(tiny.finite())
    tiny.injector("data", 2)
    loss = tiny.step()
    assert (loss != loss) == (at in ("data", "forward")) and not all(tiny.finite())
    assert len(list(tmp_path.glob("faults/*"))) == 1


@pytest.mark.parametrize("at", ["start", "load", "eval", "snapshot"])
def test_a_nan_between_steps_is_in_one_weight(tmp_path: Path, at: str) -> None:
    tiny = Tiny(f"nan:step=2,at={at}", tmp_path)
    assert all(tiny.finite()) == (at != "start")
    tiny.injector(at, 2)
    assert tiny.finite().count(False) == 1


def test_a_nan_reaches_every_tensor_of_a_nested_output(tmp_path: Path) -> None:
    class Nested(nn.Linear):
        def forward(self, input: torch.Tensor) -> Any:
            return {"logits": super().forward(input), "tokens": torch.ones(2, dtype=torch.long)}, ["name"], None

    model = Nested(1, 1)
    injector = Injector(parse("nan:at=forward,step=0"), tmp_path, 0, 1, silent)
    injector.attach(nn.DataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))
    injector("data", 0)
    outputs, *others = model(input=torch.ones(2, 1))
    assert outputs["logits"].isnan().all() and outputs["tokens"].tolist() == [1, 1] and others == [["name"], None]


@pytest.mark.parametrize("rank", [0, 1])  # all ranks refuse it: rank 0 tells the user, and ends the job
def test_a_nan_cannot_be_put_into_whole_numbers(tmp_path: Path, rank: int) -> None:
    model = nn.Embedding(4, 2)
    injector = Injector(parse("nan:at=data"), tmp_path, rank, 2, silent)
    injector.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="--fault nan:at=data.*whole numbers.*at=forward"):
        model(torch.tensor([1, 2]))


@pytest.mark.parametrize("at", ["forward", "backward", "optimizer", "data"])
def test_nothing_breaks_before_the_first_step_or_in_the_warm_up(tmp_path: Path, at: str) -> None:
    tiny = Tiny(f"nan:step=10,at={at}", tmp_path)
    tiny.step()
    tiny.injector("data", 9)
    tiny.step()
    tiny.injector("warmup", 10)
    tiny.step()
    assert all(tiny.finite())
    tiny.injector("data", 10)
    tiny.step()
    assert not all(tiny.finite())


def test_backward_breaks_in_the_middle_of_the_backward_pass(tmp_path: Path) -> None:
    tiny = Tiny("exception:at=backward,step=0", tmp_path)
    tiny.injector("data", 0)
    with pytest.raises(RuntimeError, match="injected"):
        tiny.step()
    assert {weight.grad is None for weight in tiny.model.parameters()} == {True, False}


if __name__ == "__main__":
    serve()
