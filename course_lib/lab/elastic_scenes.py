"""Record what notebook 06 has no time for: `python -m course_lib.lab.elastic_scenes FILE.json`, some five minutes.

A node is lost under four settings of the rendezvous; a hot spare takes over; the agent that serves the store is lost;
and jobs in which a rank hangs, is slow, is killed, or nothing happens. All of it is real: torchrun, on this machine.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from course_lib.engine import UsageError, read_events, run
from course_lib.lab.launch import start
from course_lib.lab.node_agents import DEFAULT, TUNED
from course_lib.lab.nodes import Cluster
from course_lib.lab.story import ToldCluster, tell

Event = dict[str, Any]
TRAIN = "scripts/ddp_torchrun.py --norm group --virtual-shards 4 --epochs 200 --snapshot-every 10"
SLOW = "--fault slow:rank=0,step=0,seconds=0.2,times=10000"  # so that a job doesn't end before its time
SHORT = "scripts/ddp_torchrun.py --epochs 1 --collective-timeout 4"
SETTINGS = {
    "the defaults": DEFAULT,
    "a short last call": {**DEFAULT, "last_call_timeout": 2},
    "a fast heartbeat": {**TUNED, "last_call_timeout": 30},
    "both": TUNED,
}
JOBS = {
    "hang": "hang:how=spin,rank=2,step=12",
    "A": "slow:rank=2,step=2,seconds=0.1,times=20,at=forward",
    "B": "hang:how=gil,rank=1,step=9",
    "C": "kill:rank=0,step=14",
    "D": "hang:how=stop,rank=0,step=17",
}
_KEPT: tuple[str, ...] = (
    "process_start",
    "imported",
    "group_ready",
    "snapshot_loaded",
    "step",
    "stop_requested",
    "error",
    "straggler",
)
_KEPT += ("finish",)
_FIELDS: tuple[str, ...] = ("t", "event", "rank", "world_size", "generation", "step", "loss", "seconds", "own_seconds")
_FIELDS += ("error", "slow_rank", "others_seconds")


def node_loss(folder: Path, settings: dict[str, int]) -> dict[str, Any]:
    """Two of 1:2 nodes train; one loses its power. What the other does until it trains alone, in seconds."""
    with Cluster(folder, f"{TRAIN} {SLOW}", nodes="1:2", settings=settings) as c:
        c.start("a", "b")
        first = c.wait_for(step=3, ranks=2)
        killed = time.time()
        c.kill("b")
        alone = c.wait_for(ranks=1, after=first["generation"])
        born = [e["t"] for e in c.events if e["event"] == "process_start" and e["t"] > killed]
    return {"settings": settings, "until_new_worker": min(born) - killed, "until_next_step": alone["t"] - killed}


def hot_spare(folder: Path) -> dict[str, Any]:
    """Of three nodes the job takes two; one of these is lost."""
    with ToldCluster(folder, f"{TRAIN} {SLOW}", nodes="2:2") as c:
        c.start("a", "b")
        first = c.wait_for(step=3, ranks=2)
        c.start("c")
        c.wait_for(step=20)
        waits = c.report()
        c.kill("a")
        both = c.wait_for(ranks=2, after=first["generation"])
        c.wait_for(step=both["step"] + 15)
        for name in ("b", "c"):
            c.stop(name)
        c.wait(check=False, show=False)
    return {"report": waits.splitlines(), **told(folder)}


def lost_store(folder: Path) -> dict[str, Any]:
    """Two of 1:2 nodes train, and the first one's agent serves the store; that node is lost."""
    with ToldCluster(folder, f"{TRAIN} {SLOW}", nodes="1:2", rendezvous=False) as c:
        c.start("a", "b")
        c.wait_for(step=8, ranks=2)
        c.kill("a")
        c.wait(check=False, show=False)
        tell(folder, "lost", "b")
        report = c.report()
    return {"report": report.splitlines(), **told(folder)}


def one_job(folder: Path, fault: str) -> dict[str, Any]:
    """Three ranks on one machine, without restarts, of which one has a fault."""
    command = f"torchrun --standalone --nproc-per-node 3 {SHORT} --run-dir {folder} --fault {fault}"
    with start(command) as job:
        job.wait(check=False, show=False)
        guard = [line for line in job.output().splitlines() if "its guard kills it" in line]
    return {"command": command.replace(str(folder), "RUN"), "guard": guard, **told(folder)}


def told(folder: Path) -> dict[str, Any]:
    """The deeds and the events of a run, with times in seconds since the first of either."""
    path = folder / "logs" / "story.jsonl"
    deeds = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    events = [e for e in read_events(folder).events if e["event"] in _KEPT]
    zero = min(item["t"] for item in [*deeds, *events])
    kept = [{name: _short(e[name]) for name in _FIELDS if name in e} for e in events]
    return {"deeds": [_at(deed, zero) for deed in deeds], "events": [_at(event, zero) for event in kept]}


def _at(item: Event, zero: float) -> Event:
    return item | {"t": round(item["t"] - zero, 3)}


def _short(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) and value < 1e6 else value


def evidence(record: dict[str, Any], letters: str) -> str:
    """What recorded jobs of three ranks have left: of each rank the last step, its times, and what came after it."""
    lines = []
    for letter in letters:
        events = record["jobs"][letter]["events"]
        lines += ["", f"job {letter:8}{'last step':>10}{'at':>9}{'whole step':>12}{'by itself':>11}   after that"]
        for rank in sorted({event["rank"] for event in events}):
            mine = [event for event in events if event["rank"] == rank]
            steps = [event for event in mine if event["event"] == "step"]
            last = steps[-1]
            times = [median(step[name] for step in steps[-10:]) for name in ("seconds", "own_seconds")]
            cells = f"{last['step']:>10}{last['t']:>7.2f} s{times[0] * 1e3:>9.0f} ms{times[1] * 1e3:>8.0f} ms"
            lines.append(f"rank {rank}       {cells}   {_after(mine, last['t'])}")
    return "\n".join(lines[1:])


def _after(mine: list[Event], t: float) -> str:
    end = mine[-1]
    if end["event"] == "error":
        return f"{end['t'] - t:.2f} s later: {end['error'].split(':')[0]}"
    return "finished" if end["event"] == "finish" else "nothing"


def read_scenes(path: Path) -> dict[str, Any]:
    """The record; prints that it is one, and the command that makes it."""
    found = dict(json.loads(path.read_text()))
    print(f"RECORDED {found['recorded']}, torch {found['versions']['torch']}\n{found['command']}")
    return found


def record(say: Callable[[str], None]) -> dict[str, Any]:
    """All scenes, in a minute each or less."""
    found: dict[str, Any] = {"losses": {}, "jobs": {}}
    with TemporaryDirectory() as name:
        folder = Path(name)
        for number, (words, settings) in enumerate(SETTINGS.items()):
            found["losses"][words] = node_loss(folder / f"loss-{number}", dict(settings))
            say(f"{words}: {found['losses'][words]}")
        for letter, fault in JOBS.items():
            found["jobs"][letter] = one_job(folder / f"job-{letter}", fault)
            say(f"job {letter}: {found['jobs'][letter]['guard'] or 'no guard'}")
        found["spare"] = hot_spare(folder / "spare")
        say("\n".join(found["spare"]["report"]))
        found["store"] = lost_store(folder / "store")
        say("\n".join(found["store"]["report"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m course_lib.lab.elastic_scenes", description=__doc__)
    parser.add_argument("file", type=Path, help="where to write the record")
    file = parser.parse_args().file
    if not file.parent.is_dir():
        raise UsageError(f"{file}: there is no folder {file.parent}")
    head = {
        "what": "jobs on several nodes, for notebook 06; seconds",
        "recorded": time.strftime("%Y-%m-%d") + ", on a machine with two CPU cores that other programs used at the "
        "same time; not made by this notebook",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": f"python -m course_lib.lab.elastic_scenes {file}",
    }
    found = record(lambda text: print(text, file=sys.stderr, flush=True))
    lines = json.dumps(head | found, indent=1)
    with suppress(FileNotFoundError):
        file.unlink()
    file.write_text(lines + "\n")


if __name__ == "__main__":
    run(main)
