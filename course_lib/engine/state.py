"""TrainState: everything that a snapshot must hold of a training job."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.nn.parallel import DataParallel, DistributedDataParallel

from course_lib.engine.errors import UsageError
from course_lib.engine.tree import all_finite, digest, portable


class Stateful(Protocol):
    """What can be saved and restored: a module, an optimizer, an average, a best metric."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Best:
    """The best value of a metric so far. It belongs into the snapshot, or a resume forgets it.

    >>> best = Best()
    >>> best.update(0.0), best.update(-1.0), best.value
    (True, False, 0.0)
    """

    def __init__(self, larger_is_better: bool = True) -> None:
        self.value: float | None = None
        self._sign = 1 if larger_is_better else -1

    def update(self, value: float) -> bool:
        """Whether `value` is a new best; a NaN never is."""
        better = self.value is None or self._sign * value > self._sign * self.value
        if better and value == value:
            self.value = float(value)
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, so that a snapshot's keys never carry a wrapper's `module.`."""
    while isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    return model


class TrainState:
    """The parts of a training job that change from step to step and must survive.

    `extra` names whatever else has a state: an average of the weights, a best metric, a second optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler
        self.extra = dict(extra or {})
        # Such as the mask of an attention: its minus infinity is no accident.
        self._may_be_infinite = {name for name, b in self.module.named_buffers() if not all_finite(b)}
        self._configured_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]

    @property
    def module(self) -> nn.Module:
        """The model without its parallel wrapper."""
        return unwrap(self.model)

    @property
    def lr(self) -> float:
        """The learning rate that the next optimizer step will use, of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _parts(self) -> dict[str, Stateful]:
        parts: dict[str, Stateful] = {"model": self.module, "optimizer": self.optimizer}
        if self.scheduler is not None:
            parts["scheduler"] = self.scheduler
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        return parts | {f"extra.{name}": part for name, part in self.extra.items()}

    def state_dict(self) -> dict[str, Any]:
        """Tensors, where they are and sharing their memory, and plain values, by part."""
        state = {name: portable(part.state_dict(), name) for name, part in self._parts().items()}
        return state | {"configured_lrs": list(self._configured_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore every part and return what was changed on the way, a sentence each.

        Raises UsageError, and changes nothing, when a part is missing in `state` or has no place here.
        """
        parts = self._parts()
        _same_keys(set(state), {*parts, "configured_lrs"}, "")
        _same_keys(set(state["model"]), set(self.module.state_dict()), "model.")
        there, here = _group_sizes(state["optimizer"]), _group_sizes(self.optimizer.state_dict())
        if there != here:
            raise _refusal(f"parameter groups of {there} tensors there, of {here} here")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        return self._apply_configured_lrs(state["configured_lrs"])

    def _apply_configured_lrs(self, saved: list[float]) -> list[str]:
        """A learning rate may be changed at a resume: scale the restored one, so that the schedule keeps its shape."""
        changes = []
        for i, (old, new) in enumerate(zip(saved, self._configured_lrs, strict=True)):
            if old != new and old > 0:
                group = self.optimizer.param_groups[i]
                # Cyclic schedules keep their peaks, one in the groups and the other in itself.
                for key in group.keys() & {"lr", "initial_lr", "max_lr", "min_lr"}:
                    group[key] *= new / old
                for scheduler in _flat(self.scheduler):
                    for rates in (scheduler.base_lrs, getattr(scheduler, "max_lrs", None)):
                        if rates is not None:
                            rates[i] *= new / old
                changes.append(f"learning rate {old:g} -> {new:g}")
        return changes

    def update(self, max_norm: float | None = None) -> None:
        """One step of the optimizer and the schedule; clips the gradients to `max_norm` (2-norm over all) first."""
        if max_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of rank 0: after a step they differ, as each saw other samples."""
        _broadcast(self.module.buffers())

    def broadcast_parameters(self) -> None:
        """Give every rank the parameters of rank 0, as DDP does when it wraps a model."""
        _broadcast(parameter.detach() for parameter in self.module.parameters())

    def weights_digest(self) -> str:
        """SHA-256 of the parameters and buffers."""
        return digest(self.module.state_dict())

    def optimizer_digest(self) -> str:
        """SHA-256 of the optimizer's state."""
        return digest(self.optimizer.state_dict())

    def is_finite(self) -> bool:
        """Whether weights, buffers and optimizer state hold no NaN and no infinity."""
        return self.finite({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()})

    def finite(self, state: Mapping[str, Any]) -> bool:
        """The same of a `state_dict()`; buffers that were infinite from the start do not count."""
        model = {name: value for name, value in state["model"].items() if name not in self._may_be_infinite}
        return all_finite([model, state["optimizer"]])


def _broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """In few messages, as DDP does it: one for each buffer takes ten times as long, and more on a busy machine."""
    if (group := dist.group.WORLD) is not None and (together := list(tensors)):
        _broadcast_coalesced(group, together, 2**28, 0)


def _same_keys(saved: set[str], here: set[str], prefix: str) -> None:
    missing, unknown = sorted(here - saved), sorted(saved - here)
    if missing or unknown:
        words = [f"lacks {prefix}{key}" for key in missing[:3]] + [f"has {prefix}{key}" for key in unknown[:3]]
        raise _refusal(f"it {', '.join(words)}")


def _group_sizes(optimizer: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in optimizer["param_groups"]]


def _refusal(why: str) -> UsageError:
    return UsageError(f"the snapshot is not of this job: {why}; use another --run-dir or the job's own options")


def _flat(scheduler: Any) -> list[Any]:
    """A scheduler and those inside it that hold base learning rates."""
    if scheduler is None:
        return []
    inner = [leaf for part in getattr(scheduler, "_schedulers", []) for leaf in _flat(part)]
    return inner + [scheduler] * hasattr(scheduler, "base_lrs")
