"""What a job says: whole lines, each with the rank that wrote it, however many processes write at once."""

import re
from dataclasses import dataclass
from pathlib import Path

from course_lib.lab.follow import Follower

AGENT_LOG = "agent.log"
# What the elastic agent says on its own account; the workers' lines have no such head.
AGENT_LINE = re.compile(r"[WEI]\d{4} \d\d:\d\d")
_TAIL = 12  # lines of the workers, and of the agent, that a failure shows


def root_cause(lines: list[str]) -> list[str]:
    """torchrun's word on who failed first, out of the box that ends what it says; empty when there is none."""
    cause = next((n for n, text in enumerate(lines) if text.startswith("Root Cause")), None)
    return [] if cause is None else [text for text in lines[cause:] if not set(text) <= set("-=")]


def without_agent(lines: list[str]) -> list[str]:
    """A terminal's lines without what torchrun's agent says: its log, and the traceback that it ends with."""
    end = max((n for n, text in enumerate(lines) if "ChildFailedError" in text), default=len(lines))
    if end < len(lines):
        end = max((n for n, text in enumerate(lines[:end]) if text.startswith("Traceback")), default=end)
    return [text for text in lines[:end] if not AGENT_LINE.match(text)]


@dataclass(frozen=True)
class Line:
    """`rank` is None for the agent, and for a script without one."""

    rank: int | None
    text: str


class Output:
    """The lines in a job's folder of logs: agent.log, and below it what torchrun makes for each attempt and rank."""

    def __init__(self, logs: Path) -> None:
        self._follower = Follower(lambda: logs.rglob("*.log"))
        self._lines: list[Line] = []
        self._shown = 0

    def update(self, rest: bool = False) -> list[Line]:
        """All lines so far, in the order in which they were found; with `rest` unfinished ones, too."""
        for path, text in self._follower.new_lines(rest):
            rank = None if path.name == AGENT_LOG else int(path.parent.name)
            self._lines.append(Line(rank, text))
        return self._lines

    def show(self, rest: bool = False) -> None:
        """Print what came since the last call: the workers' lines, and those of a script without an agent."""
        new = self.update(rest)[self._shown :]
        self._shown = len(self._lines)
        has_agent = any(line.rank is not None for line in self._lines)
        for line in new:
            if line.rank is not None or not (has_agent or AGENT_LINE.match(line.text)):
                print(line.text, flush=True)

    def tail(self, ended: bool = True) -> str:
        """The last lines of the workers, and the agent's view of who failed first, which it gives in a box.

        Only when the job has `ended` is a line without an end a line; before, its other half is still to come.
        """
        lines = self.update(rest=ended)
        workers = [line.text for line in lines if line.rank is not None and line.text.strip()]
        agent = [line.text for line in lines if line.rank is None and line.text.strip()]
        agent = root_cause(agent) or agent[-_TAIL:]
        return "\n".join(f"  {text[:300]}" for text in workers[-_TAIL:] + agent[: _TAIL + 1]) or "  (no output)"
