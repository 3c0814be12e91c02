"""The experiment of the series beside ours: its published figures, our three runs, their table and their picture."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from course_lib.engine import UsageError, read_events
from course_lib.engine.report import surviving_steps
from course_lib.engine.runlog import Event
from course_lib.lab import toy
from course_lib.lab.claims import epochs
from course_lib.lab.markdown import markdown_table
from course_lib.lab.plots import BLUE, DARK, GREEN, VERMILION, NotebookFigure, max_abs_loss_difference

NAMES = ("undisturbed", "interrupted", "other-ranks")


@dataclass(frozen=True)
class Published:
    """What the series prints of its run on two GPUs, stopped with Ctrl-C after epoch 7 and resumed from epoch 6.

    Epochs count from 1; accuracies are percent.
    """

    train_accuracy: float = 97.82
    test_accuracy: float = 73.05
    replayed_epoch: int = 7
    first_loss: float = 0.4458
    second_loss: float = 0.4456
    first_accuracy: float = 84.78
    second_accuracy: float = 84.77


PUBLISHED = Published()


def snapshots(events: list[Event]) -> dict[int, str]:
    """SHA-256 of the snapshot file after so many steps, for all that were published, by their number of steps."""
    saved = {event["step"]: event["sha256"] for event in events if event["event"] == "snapshot_saved"}
    return dict(sorted(saved.items()))


def compare(undisturbed: list[Event], other: list[Event]) -> dict[str, Any]:
    """How far the record of a run is the undisturbed one's: epochs to the last digit, snapshot files, step losses."""
    left, right = snapshots(undisturbed), snapshots(other)
    common = left.keys() & right.keys()
    pairs = list(zip(epochs(undisturbed), epochs(other), strict=False))
    return {
        "epochs_compared": len(pairs),
        "epochs_equal": sum(_figures(one) == _figures(two) for one, two in pairs),
        "snapshots_compared": len(common),
        "snapshots_equal": sum(left[step] == right[step] for step in common),
        "steps_compared": len(surviving_steps(undisturbed).keys() & surviving_steps(other).keys()),
        "max_abs_loss_difference": max_abs_loss_difference(undisturbed, other),
    }


def _figures(epoch: Event) -> dict[str, Any]:
    """What an epoch's record says of the training, without when and by whom it was written."""
    return {key: value for key, value in epoch.items() if key not in ("t", "rank", "world_size", "generation")}


def results(run_dir: Path) -> dict[str, Any]:
    """Everything that the table shows, of the runs below `run_dir` that are finished."""
    done = [name for name in NAMES if (run_dir / name / "report.json").exists()]
    if NAMES[0] not in done:
        raise UsageError(f"{run_dir / NAMES[0]} is not finished: run scripts/reproduce.py again, it goes on from there")
    found: dict[str, Any] = {}
    events = {name: read_events(run_dir / name).events for name in done}
    for name in done:
        report = json.loads((run_dir / name / "report.json").read_text())
        newest = max((run_dir / name / "snapshots").glob("*-step-*.json"))
        manifest = json.loads(newest.read_text())
        found[name] = {
            "report": report,
            "epochs": [_figures(epoch) for epoch in epochs(events[name])],
            "snapshots": {str(step): digest for step, digest in snapshots(events[name]).items()},
            "processor": {key: manifest["machine"][key] for key in ("cpu", "gpu")},
            "versions": manifest["versions"],
            "config": manifest["config"],
        }
        if name != NAMES[0]:
            calm = found[NAMES[0]]["report"]
            same = {
                f"same_{part}": report[f"{part}_sha256"] == calm[f"{part}_sha256"] for part in ("weights", "optimizer")
            }
            found[name]["against_undisturbed"] = compare(events[NAMES[0]], events[name]) | same
    return found


def table(found: Mapping[str, Any]) -> str:
    """The runs beside the published figures, as Markdown."""
    names = [name for name in NAMES if name in found]
    last = {name: found[name]["epochs"][-1] for name in names}
    rows = [
        ["training accuracy, last epoch", _percent(PUBLISHED.train_accuracy)]
        + [_percent(100 * last[name]["train_accuracy"]) for name in names],
        ["test accuracy, last epoch", _percent(PUBLISHED.test_accuracy)]
        + [_percent(100 * last[name]["test_accuracy"]) for name in names],
        ["ranks", "2", *("→".join(map(str, found[name]["report"]["world_sizes"])) for name in names)],
        ["steps done again", "a whole epoch", *(str(found[name]["report"]["steps_replayed"]) for name in names)],
        _row(found, "epochs with the same losses and accuracies, to the last digit", "epochs"),
        _row(found, "snapshot files with the same bytes", "snapshots"),
        ["largest difference of a step's loss", f"{PUBLISHED.first_loss - PUBLISHED.second_loss:.4f} of an epoch's"]
        + [_against(found[name], lambda a: f"{a['max_abs_loss_difference']:.2g}") for name in names],
        ["same final weights and optimizer", "–"]
        + [
            _against(found[name], lambda a: "yes" if a["same_weights"] and a["same_optimizer"] else "no")
            for name in names
        ],
    ]
    return markdown_table(["", "published", *names], rows)


def _percent(value: float) -> str:
    return f"{value:.2f} %"


def _against(run: Mapping[str, Any], show: Callable[[Mapping[str, Any]], str]) -> str:
    """What is shown of the comparison with the undisturbed run, which itself has none."""
    return show(run["against_undisturbed"]) if "against_undisturbed" in run else "–"


def _row(found: Mapping[str, Any], text: str, what: str) -> list[str]:
    def show(against: Mapping[str, Any]) -> str:
        return f"{against[f'{what}_equal']} of {against[f'{what}_compared']}"

    return [text, "–", *(_against(found[name], show) for name in NAMES if name in found)]


def figure(found: Mapping[str, Any]) -> NotebookFigure:
    """Loss and accuracy an epoch: the undisturbed run, the interrupted ones on it, the published points."""
    picture = NotebookFigure(figsize=(10, 4.2), layout="constrained")
    loss, accuracy = picture.subplots(1, 2)
    styles = {NAMES[0]: (BLUE, "-", 4.0), NAMES[1]: (VERMILION, "--", 1.8), NAMES[2]: (GREEN, ":", 2.0)}
    for name, run in found.items():
        colour, dashes, width = styles[name]
        numbers = [record["epoch"] + 1 for record in run["epochs"]]
        style = {"color": colour, "linestyle": dashes, "linewidth": width, "label": name.replace("-", " ")}
        loss.plot(numbers, [record["train_loss"] for record in run["epochs"]], **style)
        for key in ("train_accuracy", "test_accuracy"):
            accuracy.plot(numbers, [100 * record[key] for record in run["epochs"]], **style)
    at, final = PUBLISHED.replayed_epoch, max(len(run["epochs"]) for run in found.values())
    _point(loss, at, PUBLISHED.first_loss, "published", below=True)
    _point(accuracy, at, PUBLISHED.first_accuracy, "published")
    _point(accuracy, final, PUBLISHED.train_accuracy, "published")
    _point(accuracy, final, PUBLISHED.test_accuracy, "published")
    for text, key in (("training", "train_accuracy"), ("test", "test_accuracy")):
        middle = found[NAMES[0]]["epochs"][final * 3 // 4]
        accuracy.annotate(
            text, (middle["epoch"] + 1, 100 * middle[key]), xytext=(0, -16), textcoords="offset points", fontsize=10
        )
    for axes, title in ((loss, "training loss"), (accuracy, "accuracy, %")):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("epoch")
        axes.axvline(7.5, color=DARK, linewidth=0.8, linestyle=(0, (1, 3)))
        axes.spines[["top", "right"]].set_visible(False)
    loss.text(7.6, loss.get_ylim()[1] * 0.7, "Ctrl-C in epoch 8", color=DARK, fontsize=9)
    loss.legend(frameon=False, fontsize=9)
    return picture


def _point(axes: Axes, epoch: int, value: float, text: str, below: bool = False) -> None:
    axes.plot([epoch], [value], "D", color=DARK, markersize=6, fillstyle="none")
    at = (-6, -14 if below else 7)
    axes.annotate(text, (epoch, value), xytext=at, textcoords="offset points", ha="right", fontsize=9, color=DARK)


def write_results(run_dir: Path, folder: Path) -> str:
    """Write `series.json`, `series.md` and `series.png` into `folder`, and return what the second of them says.

    A `toy.json` there, which scripts/bench/classic_toy.py writes, adds the table of the tutorial's toy.
    """
    found = results(run_dir)
    text = table(found)
    if (beside := folder / "toy.json").exists():
        text += "\n" + toy.table(json.loads(beside.read_text()))
    (folder / "series.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "series.md").write_text(text)
    figure(found).savefig(folder / "series.png", dpi=150)
    return text
