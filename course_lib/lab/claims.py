"""What a run's record proves, in numbers and words that are the same on every machine.

A notebook prints them in cells whose output is compared strictly. So each function first checks the record it rests
on: the ranks' files must tell the same story without a gap, and add up to the means that the epochs recorded. A step
that is missing, or a loss that was moved by a millionth, is a BrokenRecord, not a claim that still looks right.
"""

import json
import math
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from course_lib.engine import read_events
from course_lib.engine.report import steps_replayed, surviving_steps
from course_lib.engine.runlog import Event
from course_lib.lab.plots import max_abs_loss_difference

_ROUNDING = 1e-9  # of a mean of some thousand float64 losses, relative


class BrokenRecord(RuntimeError):
    """A run's events or report contradict each other, or miss something; the message names the first place."""


def restarts(run: Path | str) -> int:
    """How many times the run began again after its first start, in whatever launch."""
    return max(0, len(_loads(_verified(run))) - 1)


def replayed(run: Path | str) -> int:
    """How many steps were done again because a death had cost them."""
    return steps_replayed(_verified(run))


def world_sizes(run: Path | str) -> list[int]:
    """The number of ranks of each start, in order."""
    loads = _loads(_verified(run))
    return [loads[generation]["world_size"] for generation in sorted(loads)]


def max_difference(a: Path | str, b: Path | str) -> float:
    """The largest distance of the losses of two runs at the same step; infinite when they don't have the same steps."""
    return max_abs_loss_difference(_verified(a), _verified(b))


def first_difference(a: Path | str, b: Path | str, steps: int = 2) -> float:
    """Like `max_difference`, over the first steps only: before rounding, fed back through the weights, has grown."""
    first = [[event for event in _verified(run) if event.get("step", 0) < steps] for run in (a, b)]
    return max_abs_loss_difference(*first)


def same_weights(a: Path | str, b: Path | str) -> bool:
    """Whether two finished runs ended with the same weights and buffers, bit for bit."""
    digests = [_report(run)["weights_sha256"] for run in (a, b) if _verified(run)]
    return bool(digests[0] == digests[1])


def every_sample_once(run: Path | str) -> bool:
    """Whether the history that made the weights uses each sample of each epoch exactly once."""
    spans: dict[int, list[list[int]]] = defaultdict(list)
    for event in surviving_steps(_verified(run)).values():
        spans[event["epoch"]].append(event["samples"])
    joined = all(a[1] == b[0] for epoch in spans.values() for a, b in pairwise(epoch))
    ends = {(epoch[0][0], epoch[-1][1]) for epoch in spans.values()}
    return joined and len(ends) == 1 and min(ends)[0] == 0 and sorted(spans) == list(range(len(spans)))


def events_used_once(run: Path | str) -> list[Event]:
    """The events of a run whose epochs used each sample once; BrokenRecord when one did not."""
    if not every_sample_once(run):
        raise BrokenRecord(f"{run}: by its record, an epoch did not use each sample once")
    return read_events(run).events


def replay_difference(run: Path | str) -> float:
    """The largest distance of the losses that two starts of equal size had in the same step; infinite if none is."""
    done: dict[tuple[int, int], dict[int | None, float]] = defaultdict(dict)
    for event in _verified(run):
        if event["event"] == "step":
            done[event["world_size"], event["step"]][event["generation"]] = event["loss"]
    gaps = [max(losses.values()) - min(losses.values()) for losses in done.values() if len(losses) > 1]
    return max(gaps, default=math.inf)


def times_finished(run: Path | str) -> dict[int, int]:
    """Epoch -> how many starts trained it to its end."""
    ends = {(event["epoch"], event["generation"]) for event in _verified(run) if event["event"] == "epoch"}
    return dict(sorted(Counter(epoch for epoch, _ in ends).items()))


def accuracy(run: Path | str) -> float:
    """The accuracy on the test set after the last epoch, between 0 and 1. Print how it compares, not the number."""
    return float(epochs(_verified(run))[-1]["test_accuracy"])


def observed(run: Path | str, scene: str) -> list[Any]:
    """What each rank saw in a scene of `ddp_evidence`, in the order of the ranks.

    Each rank's own record of every scene must be what rank 0 gathered from it.
    """
    try:
        gathered = dict(json.loads((Path(run) / "evidence.json").read_text()))
    except (OSError, ValueError) as error:
        raise BrokenRecord(f"{run} has no evidence that can be read: run the cell that records it ({error})") from None
    told = {(name, rank): seen for name, ranks in gathered.items() for rank, seen in enumerate(ranks)}
    own = {(e.get("name"), e["rank"]): e.get("seen") for e in read_events(run).events if e["event"] == "scene"}
    for name, rank in sorted(own.keys() | told.keys() | {(scene, 0)}, key=str):
        if (name, rank) not in own or own[name, rank] != told.get((name, rank)):
            raise BrokenRecord(f"{run}: rank {rank}'s own record of the scene {name!r} is not what rank 0 gathered")
    return list(gathered[scene])


def _loads(events: list[Event]) -> dict[int, Event]:
    return {event["generation"]: event for event in events if event["event"] == "snapshot_loaded"}


def epochs(events: list[Event]) -> list[Event]:
    """The record of each epoch, in order; a replay by a newer generation wins."""
    found = {event["epoch"]: event for event in events if event["event"] == "epoch"}
    return [found[epoch] for epoch in sorted(found)]


def _report(run: Path | str) -> dict[str, Any]:
    try:
        return dict(json.loads((Path(run) / "report.json").read_text()))
    except (OSError, ValueError) as error:
        raise BrokenRecord(f"{run} has no report that can be read: the run has not finished ({error})") from None


def _verified(run: Path | str) -> list[Event]:
    """The events of the run in order; BrokenRecord unless they are whole and agree with each other."""
    events = read_events(run).events
    history = surviving_steps(events)
    if not history:
        raise BrokenRecord(f"{run} has no recorded step: run the cell that trains first")
    if list(history) != list(range(len(history))):
        missing = min(set(range(max(history))) - set(history))
        raise BrokenRecord(f"{run}: step {missing} is missing from the record")
    for generation, load in _loads(events).items():
        done = {e["step"] for e in events if e["event"] == "step" and e["generation"] == generation}
        # An older start may have done it, too, so that the history has no gap.
        if gap := set(range(load["step"], max(done, default=0))) - done:
            raise BrokenRecord(f"{run}: step {min(gap)} is missing from the record of generation {generation}")
    finished = any(e["event"] == "finish" and e["generation"] == history[max(history)]["generation"] for e in events)
    _check_ranks(run, events, history, finished)
    _check_epochs(run, events, history)
    if finished and _report(run)["steps"] != len(history):
        raise BrokenRecord(f"{run}: the report counts {_report(run)['steps']} steps, the record has {len(history)}")
    return events


def _check_ranks(run: Path | str, events: list[Event], history: dict[int, Event], finished: bool) -> None:
    """All ranks of a start recorded the same for each step that counts; of the newest only a finished run's must."""
    records: dict[tuple[int | None, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["event"] == "step":
            records[event["generation"], event["step"]].append(event)
    for step, chosen in history.items():
        found = records[chosen["generation"], step]
        absent = set(range(chosen["world_size"])) - {event["rank"] for event in found}
        if absent and (finished or step != max(history)):
            raise BrokenRecord(f"{run}: step {step} is missing from the record of rank {min(absent)}")
    for (_, step), found in records.items():
        for name in ("loss", "samples", "epoch", "lr"):
            if any(event.get(name) != found[0].get(name) for event in found):
                raise BrokenRecord(f"{run}: the ranks recorded different values of {name} for step {step}")


def _check_epochs(run: Path | str, events: list[Event], history: dict[int, Event]) -> None:
    """The losses of an epoch's steps, weighted by their samples, add up to the mean that was recorded after it."""
    for record in epochs(events):
        steps = [event for event in history.values() if event["epoch"] == record["epoch"]]
        sizes = [event["samples"][1] - event["samples"][0] for event in steps]
        if len(steps) != record["steps"]:
            raise BrokenRecord(f"{run}: epoch {record['epoch']} had {record['steps']} steps, {len(steps)} are recorded")
        mean = sum(event["loss"] * size for event, size in zip(steps, sizes, strict=True)) / sum(sizes)
        if not math.isclose(mean, record["train_loss"], rel_tol=_ROUNDING):
            raise BrokenRecord(f"{run}: the losses of epoch {record['epoch']} do not add up to its recorded mean")
