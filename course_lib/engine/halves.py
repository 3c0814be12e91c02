"""Two halves of a job that cannot see each other: a shared disk fences one of them, and without it nothing does."""

import os
import re

from course_lib.engine.errors import UsageError
from course_lib.engine.watchdog import command_line


def refuse_halves(nodes: tuple[int, int] | None) -> None:
    """Refuse a job without a shared disk of which two halves could both go on, each with its own history.

    Where it is not known how many nodes the job may have (the agent is not torchrun), nothing is refused.
    """
    if nodes is not None and 2 * nodes[0] <= nodes[1]:
        low, high = nodes
        raise UsageError(
            f"--nnodes {low}:{high}: the nodes share no disk for the run directory, so after a partition two halves "
            f"of the job could both go on; let the smallest number be above half of the largest "
            f"({high // 2 + 1}:{high}), or give a --run-dir that all nodes share"
        )


def node_range() -> tuple[int, int] | None:
    """(MIN, MAX) of `--nnodes`, from the command line of the agent above or from PET_NNODES; None if in neither."""
    told = re.search(r"--nnodes?[= ](\S+)", " ".join(command_line(os.getppid())))
    match = re.fullmatch(r"(\d+)(?::(\d+))?", told[1] if told else os.environ.get("PET_NNODES", ""))
    return (int(match[1]), int(match[2] or match[1])) if match else None


def may_grow() -> bool:
    """Whether nodes may leave and join this job."""
    nodes = node_range()
    return nodes is not None and nodes[0] < nodes[1]
