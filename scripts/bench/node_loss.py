"""Time from the loss of a node to the next step of the others: our rendezvous settings against torchrun's own.

Three nodes train on this machine, each an agent with one rank; one is killed, agent and worker at once, and two go on.
Of the time, the heartbeats' age and the last call are what the settings decide; the rest is a start of the workers.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from course_lib.engine import UsageError, run
from course_lib.lab.node_agents import DEFAULT, TUNED
from course_lib.lab.nodes import Cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = f"{ROOT / 'scripts' / 'ddp_torchrun.py'} --norm group --virtual-shards 4 --epochs 1000 --snapshot-every 20"
TARGET_S, LIMIT_S = 12.0, 300.0
VICTIMS = "abc"  # the node of rank 0, which serves the group's own store, is one of them


def one_loss(settings: Mapping[str, int], victim: str) -> float:
    """The seconds from the kill to the first step of the group without the node."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder) / "run", SCRIPT, "2:3", settings=settings, limit_s=LIMIT_S) as c,
    ):
        c.start(*VICTIMS)
        before = c.wait_for(step=10, ranks=3)
        killed = time.time()
        c.kill(victim)
        after = c.wait_for(ranks=2, after=before["generation"])
        return float(after["t"]) - killed


def figures(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """The medians, all measurements, and how much the tuned settings save."""
    tuned, default = (statistics.median(seconds[name]) for name in ("tuned", "default"))
    rounded = {f"{name}_seconds": [round(value, 1) for value in values] for name, values in seconds.items()}
    ratio = round(default / tuned, 1)
    return {"tuned_median": round(tuned, 1), "default_median": round(default, 1), "ratio": ratio, **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=int, default=3, help="nodes to lose with each of the settings (3)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if options.losses < 1:
        raise UsageError("--losses must be at least 1")
    ways: dict[str, Mapping[str, int]] = {"tuned": TUNED, "default": DEFAULT}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.losses):  # in turn, so that what else the machine does falls on both
        for name, settings in ways.items():
            victim = VICTIMS[number % len(VICTIMS)]
            seconds[name].append(one_loss(settings, victim))
            print(f"{name:8} node {victim} lost: {seconds[name][-1]:5.1f} s to the next step", flush=True)
    result = figures(seconds)
    for name, value in result.items():
        print(f"{name:16} {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if result["tuned_median"] >= TARGET_S:
        print(f"above the target of {TARGET_S:g} s", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
