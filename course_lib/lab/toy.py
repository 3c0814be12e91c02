"""The toy of the torchrun tutorial, killed once: what was lost and repeated, counted from what its runs left.

Epochs and steps count from 0, as the tutorial's script prints them. The runs are those of scripts/bench/classic_toy.py.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from course_lib.engine import UsageError, read_events
from course_lib.engine.runlog import Event
from course_lib.lab.markdown import markdown_table
from course_lib.lab.plots import max_abs_loss_difference

TITLES = {
    "published": "as published",
    "seeded": "with a seed",
    "momentum": "seed, mse, momentum 0.9",
    "counted": "the same, `EPOCHS_RUN` + 1",
    "engine": "this engine: seed, mse, momentum 0.9",
}
SOURCE = "https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html"


def measure(calm: Path, killed: Path) -> dict[str, Any]:
    """What a run that was killed once did again and did not keep, beside the same run undisturbed.

    Raises UsageError when one is not finished, or was not killed just once and restarted just once.
    """
    left, right = _report(calm), _report(killed)
    undisturbed, events = read_events(calm).events, read_events(killed).events
    kills = [event["step"] for event in events if event["event"] == "fault"]
    if len(kills) != 1 or (left["generations"], right["generations"]) != (1, 2):
        starts = f"{left['generations']} and {right['generations']} generations"
        raise UsageError(f"{killed}: one kill and one restart were wanted, and there are {len(kills)}, {starts}")
    size = right["steps"] // right["epochs"]  # steps of an epoch
    first, second = (_of(events, "step", generation) for generation in (1, 2))
    saved, loaded = max(_of(events, "snapshot_saved", 1), default=0), min(_of(events, "snapshot_loaded", 2))
    again = first & second
    drawn = [event for event in events if event["event"] == "drawn"]
    weights = {event["weights"] for event in drawn if event["generation"] in (None, 1) and event["rank"] == 0}
    return {
        "killed_in_step": kills[0],
        "killed_in_epoch": kills[0] // size,
        "steps": right["steps"],
        "steps_per_epoch": size,
        "restarted_at_epoch": loaded // size,
        "steps_done_again": len(again),
        "steps_done_again_though_saved": max(0, saved - loaded),
        "finished_epochs_done_again": [
            epoch for epoch in range(right["epochs"]) if again >= set(range(epoch * size, (epoch + 1) * size))
        ],
        "steps_at_the_end_in_no_file": right["steps"] - max(_of(events, "snapshot_saved"), default=0),
        "snapshot_holds": parts(killed),
        "learnt": right["weights_sha256"] not in weights,
        "largest_loss": max(abs(event["loss"]) for event in events if event["event"] == "step"),
        "same_weights": left["weights_sha256"] == right["weights_sha256"],
        "same_optimizer": left["optimizer_sha256"] == right["optimizer_sha256"],
        "max_abs_loss_difference": max_abs_loss_difference(undisturbed, events),
        "processes": len(drawn),
        "data_sets": len({event["data"] for event in drawn}),
    }


def _report(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run_dir / "report.json").read_text()))
    except FileNotFoundError:
        raise UsageError(f"{run_dir} is not finished: it has no report.json") from None


def _of(events: list[Event], kind: str, generation: int | None = None) -> set[int]:
    """The step numbers of the events of a kind, of one generation or of all."""
    return {e["step"] for e in events if e["event"] == kind and generation in (None, e["generation"])}


def parts(run_dir: Path) -> list[str]:
    """What the newest snapshot of a run holds, by the names in its file."""
    file = run_dir / "snapshot.pt"  # the tutorial's
    if not file.exists():
        file = max((run_dir / "snapshots").glob("*-step-*.pt"))
    content = torch.load(file, map_location="cpu", weights_only=True)
    return sorted(content.get("state", content))


def table(found: Mapping[str, Any]) -> str:
    """The ways that were run side by side, as Markdown, under a few lines that say what was done."""
    ways = {name: found["ways"][name] for name in TITLES if name in found["ways"]}
    some = next(iter(ways.values()))
    rows = [[text, *(show(way) for way in ways.values())] for text, show in ROWS.items()]
    head = (
        f"The toy of the torchrun tutorial (S. Subramanian, PyTorch tutorials, 2022, {SOURCE}), "
        f"`{found['epochs']} {found['save_every']}`, on {found['ranks']} ranks with gloo. A rank was killed with "
        f"SIGKILL in step {some['killed_in_step']} of {some['steps']}, in epoch {some['killed_in_epoch']}; epochs and "
        "steps count from 0, as its script prints them. SGD without momentum has no state of its own.\n\n"
    )
    return head + markdown_table(["", *(TITLES[name] for name in ways)], rows)


def _yes(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda way: "yes" if way[key] else "no"


def _range(epochs: list[int]) -> str:
    return f"{len(epochs)} ({epochs[0]} to {epochs[-1]})" if len(epochs) > 1 else str(epochs or "0").strip("[]")


ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started again at epoch": lambda way: str(way["restarted_at_epoch"]),
    "steps done again": lambda way: str(way["steps_done_again"]),
    "of these, in the saved weights already": lambda way: str(way["steps_done_again_though_saved"]),
    "finished epochs trained again": lambda way: _range(way["finished_epochs_done_again"]),
    "the optimizer is in the snapshot": lambda way: "yes" if "optimizer" in way["snapshot_holds"] else "no",
    "training changed the weights": lambda way: (
        "yes" if way["learnt"] else f"no: the largest loss is {way['largest_loss']:g}"
    ),
    "same final weights as undisturbed": _yes("same_weights"),
    "same state of the optimizer": _yes("same_optimizer"),
    "largest difference of a loss": lambda way: f"{way['max_abs_loss_difference']:.2g}",
    "last steps that are in no file": lambda way: str(way["steps_at_the_end_in_no_file"]),
    "data sets drawn": lambda way: f"{way['data_sets']} by {way['processes']} processes",
}
