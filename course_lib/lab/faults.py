"""Break one rank on purpose: `--fault KIND[:key=value,…]`.

    kill                          SIGKILL rank 1 in the backward pass of step 10
    kill:rank=0,step=37           the same for rank 0 in step 37
    hang:how=gil,at=forward       a rank that holds the interpreter's lock for ever
    exception:at=load,times=3     three process starts in a row that fail while they load
    slow:seconds=0.1,times=50     from step 10 on, 50 steps that take 0.1 s longer

A fault happens once per run (`times` in all; but for slow, at most once in each process): a file in `RUN_DIR/faults/`
proves it to the next process. Step numbers are global and count from 0. `start` and `load` come once per process and
ignore the step; `snapshot` and `eval` do not come at every step: the first one at or after it is taken.
"""

import ctypes
import faulthandler
import math
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from course_lib.engine.errors import UsageError

KINDS = ("kill", "exit", "exception", "segfault", "sigterm", "sigint", "hang", "slow", "nan", "oom")
HOWS = ("stop", "spin", "gil", "loader")
POINTS = ("start", "load", "data", "forward", "backward", "optimizer", "snapshot", "eval")
SIGNALS = {"kill": "SIGKILL", "segfault": "SIGSEGV", "sigterm": "SIGTERM", "sigint": "SIGINT"}
KEYS = ("rank", "step", "times", "seconds", "how", "at")
FOREVER = 1e6  # seconds: eleven days outlast every timeout of a course


@dataclass(frozen=True)
class Fault:
    """What breaks, where, when. `rank` None is rank 1 (0 in a job of one); `seconds` None, the kind's own."""

    kind: str
    rank: int | None = None
    step: int = 10
    times: int = 1
    seconds: float | None = None
    how: str = "stop"
    at: str = "backward"


def _refuse(text: str, problem: str) -> NoReturn:
    raise UsageError(f"--fault {text!r}: {problem}")


def _one_of(text: str, what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        _refuse(text, f"{what} {value!r} is unknown; use one of {', '.join(allowed)}")
    return value


def _number(text: str, key: str, value: str) -> int | float:
    if key == "seconds":
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", value) or not 0 < float(value) <= FOREVER:
            _refuse(text, f"seconds={value!r} must be a number above 0, at most {FOREVER:.0f}, such as 2.5")
        return float(value)
    least = 1 if key == "times" else 0
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < least:
        _refuse(text, f"{key}={value!r} must be a whole number, {least} or more")
    return int(value)


def _check_combination(text: str, kind: str, given: dict[str, Any]) -> None:
    """Refuse a key that would do nothing: a learner would wait for an effect that never comes."""
    if kind != "hang" and "how" in given:
        _refuse(text, f"how belongs to hang, not to {kind}; leave it out or use hang:how={given['how']}")
    if kind not in ("hang", "slow") and "seconds" in given:
        _refuse(text, f"seconds belongs to hang and slow, not to {kind}; leave it out")
    how = given.get("how", "stop")
    if kind == "hang" and how == "stop" and "seconds" in given:
        _refuse(text, "seconds does not go with how=stop (nobody wakes it); use how=spin, gil or loader")
    if how == "loader" and given.get("at", "data") != "data":
        _refuse(text, f"how=loader blocks at=data, not at={given['at']}; leave at out")


def parse(text: str | None) -> Fault | None:
    """Read the value of `--fault`; None stays None. Raises UsageError, which says what is wrong."""
    if text is None:
        return None
    kind, colon, rest = text.partition(":")
    _one_of(text, "kind", kind, KINDS)
    given: dict[str, Any] = {}
    for item in rest.split(",") if colon else []:
        key, equals, value = item.partition("=")
        _one_of(text, "key", key, KEYS)
        if not equals or key in given:
            _refuse(text, f"{key} must be given once, as {key}=VALUE; the keys are {', '.join(KEYS)}")
        if key in ("how", "at"):
            given[key] = _one_of(text, key, value, HOWS if key == "how" else POINTS)
        else:
            given[key] = _number(text, key, value)
    _check_combination(text, kind, given)
    if given.get("how") == "loader":
        given["at"] = "data"
    return Fault(kind, **given)


def _hang(how: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "loader":
        time.sleep(seconds)
    while how == "spin" and time.monotonic() < end:
        pass
    # PyDLL, unlike CDLL, keeps the lock during the call. A signal ends poll() early, hence the loop.
    while how == "gil" and (left := end - time.monotonic()) > 0:
        ctypes.PyDLL(None).poll(None, 0, math.ceil(left * 1000))


def _strike(fault: Fault) -> None:
    """Do it, in this process. Every kind is here but nan, which needs a tensor."""
    match fault.kind:
        case "kill" | "segfault" | "sigterm" | "sigint":
            if fault.kind == "segfault":  # a stack dump and a core file would only be noise
                faulthandler.disable()
                resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
            os.kill(os.getpid(), signal.Signals[SIGNALS[fault.kind]])
        case "exit":
            os._exit(5)
        case "exception":
            raise RuntimeError(f"injected exception at {fault.at}")
        case "oom":
            raise torch.OutOfMemoryError(f"injected out of memory at {fault.at}")
        case "slow":
            time.sleep(fault.seconds or 1.0)
        case "hang":
            _hang(fault.how, fault.seconds or FOREVER)


def _spoil(value: Any) -> Any:
    """The same value with NaN in all its floating-point tensors, inside tuples, lists and dicts too."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value * math.nan
    if isinstance(value, tuple | list):
        return type(value)(_spoil(item) for item in value)
    return {key: _spoil(item) for key, item in value.items()} if isinstance(value, dict) else value


def _create_durably(marker: Path) -> bool:
    """Create an empty file that survives this process and a power cut; False if it was there already."""
    marker.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    directory = os.open(marker.parent, os.O_RDONLY)
    for descriptor in (file, directory):
        os.fsync(descriptor)
        os.close(descriptor)
    return True


class Injector:
    """Makes one fault happen on one rank; on all others, and with `fault=None`, it does nothing.

    The scripts call `injector("start", 0)`. After `attach`, which covers what is inside a step, the engine
    calls it at load, data, snapshot and eval, and at "warmup" before its throw-away step, where nothing may
    break. Right before the fault it calls `log("fault", kind=…, at=…, step=…)`, which must write at once.
    """

    def __init__(
        self, fault: Fault | None, run_dir: Path, rank: int, world_size: int, log: Callable[..., None]
    ) -> None:
        """Raises UsageError for a rank that is not there, unless it struck before: then the world shrank."""
        self.step: int | None = None  # the step in progress; None before the first one and in the warm-up
        self._fault, self._log, self._armed = fault, log, False
        self._nan = fault is not None and fault.kind == "nan"
        self._weight: nn.Parameter | None = None
        if fault is None:
            return
        target = min(1, world_size - 1) if fault.rank is None else fault.rank
        who = "default" if fault.rank is None else str(fault.rank)
        stem = f"{fault.kind}-at-{fault.at}-step-{fault.step}-rank-{who}"
        self._markers = [run_dir / "faults" / f"{stem}-time-{n + 1}" for n in range(fault.times)]
        if target >= world_size and not self._markers[0].exists():
            raise UsageError(f"--fault: there is no rank={target}; this job has ranks 0 to {world_size - 1}")
        self._armed = target == rank

    def __call__(self, point: str, step: int) -> None:
        """Say that the process is at `point` of `step`. A fault that is due happens before this returns."""
        if point in ("data", "warmup"):
            self.step = step if point == "data" else None
        if not self._nan:
            self._pass(point, step, None)
        elif self._weight is not None and point != "data":  # whose batch a hook spoils
            self._weight.data.copy_(self._pass(point, step, self._weight.data))

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Hook into the model (bare, in DDP or in DataParallel) and the optimizer, where the fault is."""
        if self._fault is None:
            return
        inner = model.module if isinstance(model, DataParallel | DistributedDataParallel) else model
        trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
        self._weight = trained[len(trained) // 2]  # its gradient comes when half of the backward pass is done
        match self._fault.at:
            case "data" if self._nan:
                inner.register_forward_pre_hook(self._at_batch, with_kwargs=True)
            case "forward":
                inner.register_forward_hook(lambda _, args, output: self._pass("forward", self.step, output))
            case "backward":
                self._weight.register_hook(lambda grad: self._pass("backward", self.step, grad))
            case "optimizer":
                optimizer.register_step_pre_hook(self._at_optimizer)
            case "start" if self._nan:
                self("start", 0)  # the script's own call came before there was a weight

    def _at_batch(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in (*args, *kwargs.values())):
            raise UsageError("--fault nan:at=data: the batch holds only whole numbers; use at=forward")
        return self._pass("data", self.step, (args, kwargs))

    def _at_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._weight is not None:
            self._weight.grad = self._pass("optimizer", self.step, self._weight.grad)

    def _pass(self, point: str, step: int | None, value: Any) -> Any:
        """A batch, output, gradient or weight that passes `point`: it comes out as it is, or as NaN."""
        if step is None or not (fault := self._claim(point, step)):
            return value
        _strike(fault)
        return _spoil(value) if fault.kind == "nan" else value

    def _claim(self, point: str, step: int) -> Fault | None:
        """The fault if it must happen here and now: `times` in the run."""
        if (fault := self._fault) is None or not self._armed or point != fault.at:
            return None
        lasts = fault.kind == "slow"  # for `times` steps in a row
        due = step >= fault.step if lasts or point in ("snapshot", "eval") else step == fault.step
        if not (due or point in ("start", "load")):
            return None
        self._armed = lasts
        # The marker comes first: a fault that is not on record would strike again after every restart.
        if not any(_create_durably(marker) for marker in self._markers):
            return None
        self._log("fault", kind=fault.kind, at=fault.at, step=step)
        return fault
