"""The conditions of a job, as the operator keeps them (kubeflow/trainer, tag v1.9.4: `pkg/util/status.go`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from course_lib.lab.pytorchjob.policies import Condition


@dataclass(frozen=True)
class Status:
    """One condition: whether it holds now, and why it changed last."""

    type: Condition
    holds: bool
    reason: str
    message: str


class Conditions:
    """The list in `status.conditions`; `say` is told of each change. `history` has the types in order."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.now: list[Status] = []
        self.history: list[Condition] = []
        self._say = say

    def set(self, kind: Condition, message: str) -> None:
        """Add a condition unless it holds already. Running and Restarting replace each other; after Failed is nothing.

        The end of the job keeps Running in the list, as false.
        """
        if self.holds("Failed") or self.holds(kind):
            return
        other = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
        kept = [status for status in self.now if status.type not in (kind, other)]
        if kind in ("Failed", "Succeeded"):
            kept = [replace(status, holds=False) if status.type == "Running" else status for status in kept]
        self.now = [*kept, Status(kind, True, f"PyTorchJob{kind}", message)]
        self.history.append(kind)
        self._say(f"{kind} (PyTorchJob{kind}): {message}")

    def holds(self, kind: Condition) -> bool:
        """Whether the job is in this condition."""
        return any(status.type == kind and status.holds for status in self.now)
