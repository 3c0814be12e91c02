"""A run's record with one thing changed in it, as an accident or a bug in the code that writes it might."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from course_lib.engine.report import surviving_steps

Event = dict[str, Any]
Record = dict[Path, list[Any]]  # a file's lines; report.json and evidence.json each as a list of one
Edit = Callable[[Event], Event | None]  # None removes it
Change = Callable[[Record], Record]  # gives back an equal record where it finds nothing to change

MOVED = 1e-6


def read_record(run: Path) -> Record:
    files = {path: path.read_text().splitlines() for path in sorted((run / "events").glob("*.jsonl"))}
    files |= {path: [path.read_text()] for path in sorted(run.glob("*.json"))}
    # A pod that is started again keeps its process id, and goes on in its file behind an empty line.
    return {path: [json.loads(line) for line in lines if line.strip()] for path, lines in files.items()}


@contextmanager
def written(record: Record) -> Iterator[None]:
    """The record stands in the run's files for the block; afterwards what was there before."""
    before = {path: path.read_bytes() for path in record}
    try:
        for path, lines in record.items():
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        yield
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def edited(record: Record, chosen: Callable[[Event], bool], edit: Edit) -> Record:
    """The record with `edit` applied to each line that is `chosen`."""

    def new(line: Any) -> Any:
        return edit(line) if isinstance(line, dict) and chosen(line) else line

    return {path: [kept for line in lines if (kept := new(line)) is not None] for path, lines in record.items()}


def _events(record: Record) -> list[Event]:
    return [line for path, lines in record.items() if path.suffix == ".jsonl" for line in lines]


def _in_one_step(edit: Edit, every_rank: bool) -> Change:
    """Edit what one rank, or every rank, recorded of a step in the middle of the epochs that were finished."""

    def change(record: Record) -> Record:
        events = _events(record)
        ended = {event["epoch"] for event in events if event["event"] == "epoch"}
        steps = list(surviving_steps(events).values())
        steps = [step for step in steps if step["epoch"] in ended] or steps
        if not steps:
            return record
        one = steps[len(steps) // 2]
        fields = ("event", "generation", "step") if every_rank else ("event", "generation", "step", "rank")
        return edited(record, lambda line: all(line.get(name) == one[name] for name in fields), edit)

    return change


def _last_start_removed(record: Record) -> Record:
    """As if the newest of several starts had not been recorded."""
    loads = {event["generation"] for event in _events(record) if event["event"] == "snapshot_loaded"}
    return edited(record, lambda line: len(loads) > 1 and line.get("generation") == max(loads), lambda line: None)


def _other_weights(record: Record) -> Record:
    return edited(record, lambda line: "weights_sha256" in line, lambda line: line | {"weights_sha256": "0" * 64})


def _of_rank_1(edit: Edit) -> Change:
    return lambda record: edited(record, lambda line: line.get("event") == "scene" and line["rank"] == 1, edit)


def _in_own_files(edit: Callable[[Any], Any]) -> Change:
    """Edit what a run wrote beside its events and its report, such as evidence.json: a dict or a list of entries."""
    return lambda record: {
        path: lines if path.suffix == ".jsonl" or path.name == "report.json" else [edit(lines[0])]
        for path, lines in record.items()
    }


def _last_dropped(entries: Any) -> Any:
    return dict(list(entries.items())[:-1]) if isinstance(entries, dict) else entries[:-1]


def _all_moved(entries: Any) -> Any:
    return {k: _moved(v) for k, v in entries.items()} if isinstance(entries, dict) else list(map(_moved, entries))


def _moved(value: Any) -> Any:
    """A nest of values whose first number is moved, and if it has none, its first text."""
    if isinstance(value, dict):
        first = next(iter(value), None)
        return value if first is None else value | {first: _moved(value[first])}
    if isinstance(value, list):
        return [_moved(item) for item in value[:1]] + value[1:]
    if isinstance(value, bool) or value is None:
        return not value
    return value + ("!" if isinstance(value, str) else MOVED)


# What each change is to a claim: whatever the claim says, it rests on the steps or on the scenes.
CHANGES: dict[str, Change] = {
    "a rank's step dropped": _in_one_step(lambda line: None, every_rank=False),
    "a step dropped": _in_one_step(lambda line: None, every_rank=True),
    "a rank's loss moved": _in_one_step(lambda line: line | {"loss": line["loss"] + MOVED}, every_rank=False),
    "a loss moved": _in_one_step(lambda line: line | {"loss": line["loss"] + MOVED}, every_rank=True),
    "a rank's samples moved": _in_one_step(
        lambda line: line | {"samples": [end + 1 for end in line["samples"]]}, every_rank=False
    ),
    "a start removed": _last_start_removed,
    "a rank's scenes dropped": _of_rank_1(lambda line: None),
    "a rank's scenes moved": _of_rank_1(lambda line: line | {"seen": _moved(line["seen"])}),
    "a file's last entry dropped": _in_own_files(_last_dropped),
    "a file's entries moved": _in_own_files(_all_moved),
}
# Only for claims about the weights.
WEIGHTS: dict[str, Change] = {"the weights' digest changed": _other_weights}
