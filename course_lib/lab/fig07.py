"""The figures of notebook 07: operator, pods and ranks; restart rules; the life of a job; what the model learns."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from course_lib.lab import fig06
from course_lib.lab.answers import is_open
from course_lib.lab.fig05 import ORANGE, PURPLE, SKY, figure_of
from course_lib.lab.plots import BLUE, DARK, GREEN, GREY, VERMILION, NotebookFigure
from course_lib.lab.pytorchjob import PyTorchJob, environment
from course_lib.lab.pytorchjob.injected import processes

RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
POLICIES = ("Never", "OnFailure", "Always", "ExitCode")
CODES = {0: "0\ndone", 1: "1\ntorchrun's", 2: "2\nbad input", 137: "137\nSIGKILL", 143: "143\npreempted"}
MOVES = {"same pod": (GREEN, "again,\nsame pod"), "new pod": (BLUE, "again,\nnew pod"), None: (GREY, "stays\nended")}
Rule = Callable[[str, int], Any]


def pods(job: PyTorchJob) -> NotebookFigure:
    """The operator above, a box for each pod with what it is told, its agent and its ranks, and the volume below.

    torchrun numbers nodes in the order of their names, which is here that of the pods.
    """
    figure, (ax,) = figure_of(4.0)
    each, told = processes(job), environment(job)
    _box(ax, 0.0, 3.72, 3 * len(told) - 0.2, 0.42, DARK)
    _say(ax, (3 * len(told) - 0.2) / 2, 3.93, f"training operator: makes the pods of PyTorchJob {job.name}", "white")
    for number, pod in enumerate(job.pods):
        left, variables = 3.0 * number, told[pod.name]
        ax.annotate("", (left + 1.4, 3.25), (left + 1.4, 3.72), arrowprops={"arrowstyle": "-|>", "color": DARK})
        ax.add_patch(FancyBboxPatch((left + 0.05, 0.78), 2.7, 2.42, boxstyle="round,pad=0.05", fc="white", ec=DARK))
        _say(ax, left + 1.4, 3.02, pod.name, DARK)
        shown = ("PET_NNODES", "PET_NODE_RANK", "WORLD_SIZE", "RANK")
        words = "\n".join(f"{name} = {variables[name]}" for name in shown if name in variables)
        ax.text(left + 0.15, 2.83, words, va="top", size=9, family="monospace", color=DARK)
        ax.plot([left + 1.4] * 2, [0.47, 0.73], color=DARK, lw=1.5)
        _box(ax, left + 0.1, 1.35, 2.6, 0.34, VERMILION)
        _say(ax, left + 1.4, 1.52, "agent: process 1", "white")
        width = 2.6 / each
        for local in range(each):
            rank = number * each + local
            _box(ax, left + 0.1 + local * width, 0.85, width - 0.05, 0.36, RANKS[rank % len(RANKS)])
            _say(ax, left + 0.1 + (local + 0.5) * width, 1.03, f"rank {rank}" if each < 3 else str(rank), "white")
    _meet(ax, job)
    _box(ax, 0.0, 0.05, 3 * len(told) - 0.2, 0.4, GREY)
    mount = next((m for m in job.replicas[0].container.mounts if m.kind == "persistentVolumeClaim"), None)
    words = f"one volume for all: claim {mount.claim}, at {mount.path}" if mount is not None else "no shared volume"
    _say(ax, (3 * len(told) - 0.2) / 2, 0.25, words, "black")
    ax.set(xlim=(-0.1, 3 * len(told) - 0.1), ylim=(-0.05, 4.2))
    ax.axis("off")
    return figure


def _meet(ax: Axes, job: PyTorchJob) -> None:
    """Where the agents meet: lines from each of them to the first pod's, which serves the store."""
    first = environment(job)[job.pods[0].name]
    where = f"{first['MASTER_ADDR']}:{first['MASTER_PORT']}" if "MASTER_ADDR" in first else first["PET_RDZV_ENDPOINT"]
    centres = [3.0 * number + 1.4 for number in range(len(job.pods))]
    for left, right in pairwise(centres):
        ax.annotate("", (left + 1.25, 1.52), (right - 1.25, 1.52), arrowprops={"arrowstyle": "-", "color": VERMILION})
    ax.text(1.4, 1.76, f"all meet at {where}", va="bottom", ha="center", size=9, color=VERMILION)


def _box(ax: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", fc=color, ec="white"))


def _say(ax: Axes, x: float, y: float, words: str, color: str) -> None:
    ax.text(x, y, words, ha="center", va="center", size=9.5, color=color, weight="bold")


def rules(next_move: Rule) -> NotebookFigure:
    """What becomes of a container, by its policy and exit code, as the learner's own function says."""
    figure, (ax,) = figure_of(3.1)
    for row, policy in enumerate(POLICIES):
        for column, code in enumerate(CODES):
            try:
                color, words = MOVES[None if is_open(next_move) else next_move(policy, code)]
            except Exception:  # whatever a half-written function does
                color, words = "white", "?"
            if is_open(next_move):
                color, words = "white", "?"
            ax.barh(row, 0.95, left=column - 0.475, height=0.88, color=color, ec=DARK if color == "white" else "white")
            ax.text(column, row, words, ha="center", va="center", size=9, weight="bold",
                    color="white" if color in (GREEN, BLUE) else "black")  # fmt: skip
    ax.set_yticks(range(len(POLICIES)), POLICIES)
    ax.set_xticks(range(len(CODES)), list(CODES.values()))
    ax.set(ylim=(len(POLICIES) - 0.5, -0.5), xlim=(-0.5, len(CODES) - 0.5))
    ax.xaxis.tick_top()
    ax.tick_params(left=False, top=False)
    ax.spines[:].set_visible(False)
    return figure


def timeline(run: Path | str, undisturbed: Path | str) -> NotebookFigure:
    """The life of a job that was told, a lane for each pod; pale is starting and waiting, full is training."""
    figure = fig06.timeline(run, undisturbed)
    lanes = figure.axes[1]
    names = [label.get_text().removeprefix("node ") for label in lanes.get_yticklabels()]
    lanes.set_yticks(lanes.get_yticks(), names)
    return figure


def learning(training: Mapping[str, Any], live: Sequence[float] = ()) -> NotebookFigure:
    """The held-out loss after each epoch of the recorded training, with the baselines, and the reader's own."""
    figure, (ax,) = figure_of(3.3)
    losses, end = training["held_out"], len(training["held_out"])
    for name, words in {"uniform": "every character equally likely", "bigram": "a table of character pairs"}.items():
        ax.axhline(training[name], color=DARK, lw=1.5, ls="--")
        ax.text(end + 0.3, training[name] - 0.06, f"{words}: {training[name]:.2f}", ha="right", va="top", color=DARK)
    ax.plot(range(1, end + 1), losses, "o-", color=BLUE, lw=2)
    ax.annotate(f"recorded, {end} epochs: {losses[-1]:.2f}", (end, losses[-1]), (0, 9), textcoords="offset points",
                ha="right", color=BLUE, weight="bold")  # fmt: skip
    if live:
        ax.plot(len(live), live[-1], "D", color=VERMILION, ms=9, mec="white")
        ax.annotate(f"yours, one epoch: {live[-1]:.2f}", (len(live), live[-1]), (2, 22), textcoords="offset points",
                    color=VERMILION, weight="bold")  # fmt: skip
    ax.set(xlabel="epochs", ylabel="nats a character", xlim=(0.6, end + 0.4), ylim=(0, training["uniform"] + 0.3))
    return figure
