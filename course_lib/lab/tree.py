"""Who is who among the processes of a job: the agent, the ranks, and their helpers."""

from collections.abc import Mapping
from pathlib import Path

from course_lib.lab.processes import Process


def ranks_of(processes: list[Process], recorded: Mapping[int, int]) -> dict[int, int]:
    """pid -> rank of the workers among `processes`, by rank; `recorded` is what their event files say (pid -> rank).

    torchrun tells a worker its rank in a variable, which a worker's children, such as data loaders, inherit. Workers
    that `mp.spawn` started are known from their events only.
    """
    by_pid = {process.pid: process for process in processes}
    found = {}
    for process in processes:
        parent = by_pid.get(process.parent)
        if "RANK" in process.environment and (parent is None or "RANK" not in parent.environment):
            found[process.pid] = int(process.environment["RANK"])
        elif "RANK" not in process.environment and process.pid in recorded:
            found[process.pid] = recorded[process.pid]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def local_size(processes: list[Process]) -> int:
    """How many workers the agent here started, or `mp.spawn`; 1 for a plain script, 0 while nobody knows."""
    if any(_is_agent(process) for process in processes):
        return max(int(process.environment.get("LOCAL_WORLD_SIZE", "0")) for process in processes)
    spawned = {process.pid for process in processes if "--multiprocessing-fork" in process.command}
    mine = [process for process in processes if process.pid in spawned and process.parent not in spawned]
    return max(len(mine), min(1, len(processes)))


def draw_tree(processes: list[Process], ranks: dict[int, int]) -> str:
    """The processes below each other's parents, workers with the rank that `ranks` (pid -> rank) gives them."""
    pids = {process.pid for process in processes}

    def lines(process: Process, before: str, branch: str, after: str) -> list[str]:
        children = [p for p in processes if p.parent == process.pid]
        children.sort(key=lambda p: ranks.get(p.pid, len(ranks)))
        role = "agent" if _is_agent(process) else "main" if children else "helper"
        name = f"rank {ranks[process.pid]}" if process.pid in ranks else role
        drawn = [f"{before}{branch}{name}  pid {process.pid}  {_program(process)}"]
        for child in children:
            last = child is children[-1]
            drawn += lines(child, before + after, "└── " if last else "├── ", "    " if last else "│   ")
        return drawn

    return "\n".join(line for p in processes if p.parent not in pids for line in lines(p, "", "", ""))


def _is_agent(process: Process) -> bool:
    return bool({"torch.distributed.run", "course_lib.engine.launch"} & set(process.command))


def _program(process: Process) -> str:
    """What runs in it: the module after -m, else the script, without the Python before it."""
    words = process.command
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    scripts = [word for word in words if word.endswith(".py")]
    return scripts[0] if scripts else Path(words[0]).name if words else "?"
