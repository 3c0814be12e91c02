"""What the four image scripts share, so that their differences are the lesson: data, model, logs, evaluation."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.engine import Plan, Position, RunLog, TrainState, World, evaluate
from course_lib.engine.report import epoch_line, write_report
from course_lib.engine.step import Step, steps_from, totals_over_ranks
from course_lib.workloads.data import ImageData
from course_lib.workloads.options import DTYPES, Options
from course_lib.workloads.precision import settle
from course_lib.workloads.vision import MOMENTUM, build_model, schedule, step_schedule


def image_model(options: Options, data: ImageData, device: torch.device) -> nn.Module:
    """The network that the options ask for, for these data, on this device."""
    model = build_model(
        options.model, options.norm, data.shape[0], len(data.classes), options.seed, DTYPES[options.dtype]
    )
    return settle(model, device, options.amp, options.deterministic, options.compile)


def sgd(
    options: Options, data: ImageData, model: nn.Module
) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
    """SGD with momentum, and the schedule of its learning rate, to be stepped after each optimizer step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=MOMENTUM, weight_decay=options.weight_decay)
    plan = Plan(len(data.train), options.global_batch_size)  # type: ignore[arg-type]  # map-style: it has a length
    if options.schedule == "steps":
        return optimizer, step_schedule(optimizer, plan.steps_per_epoch)
    return optimizer, schedule(optimizer, options.epochs * plan.steps_per_epoch)


def correct(scores: Tensor, labels: Tensor) -> Tensor:
    """How many of the (N, classes) scores are highest at their label, as a 0-d tensor."""
    return (scores.argmax(dim=1) == labels).sum()


def test_metrics(model: nn.Module, data: ImageData, world: World) -> dict[str, float]:
    """Loss and accuracy over the whole test set, the same on every rank."""

    def totals(module: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        scores = module(images)
        return {
            "test_loss": cross_entropy(scores, labels, reduction="sum"),
            "test_accuracy": correct(scores, labels),
        }

    return evaluate(model, data.test, world, totals)


def plain_steps(options: Options, plan: Plan, data: ImageData, world: World, model: nn.Module) -> Iterator[Step]:
    """All steps of the job from the first one on, with a progress bar; nothing is saved or resumed."""
    steps = steps_from(
        Position(),
        options.epochs,
        data.train,
        plan,
        world,
        model,
        max_local_batch=options.max_local_batch,
        num_workers=options.num_workers,
    )
    return progress(steps, options.epochs * plan.steps_per_epoch, world)


class Recorder:
    """Logs steps and prints epochs for the scripts without a Trainer."""

    def __init__(self, options: Options, plan: Plan, world: World, log: RunLog) -> None:
        self._options = options
        self._plan = plan
        self._world = world
        self._log = log
        self._totals: dict[str, float] = {}
        self._last: dict[str, Any] = {}
        self._since = time.monotonic()
        log.open()

    def step(self, step: Step, lr: float) -> None:
        """Record a step that is done: its mean loss over all ranks, and the learning rate it used."""
        size = step.samples[1] - step.samples[0]
        sums, _ = totals_over_ranks(step, [])
        for name, total in sums.items():
            self._totals[name] = self._totals.get(name, 0.0) + total
        now = time.monotonic()
        self._log(
            "step",
            step=step.number,
            epoch=step.epoch,
            samples=list(step.samples),
            lr=lr,
            seconds=now - self._since,
            **{name: total / size for name, total in sums.items()},
        )
        self._since = now

    def epoch(self, epoch: int, lr: float, metrics: Mapping[str, float]) -> None:
        """Print the line of an epoch on rank 0 and record it."""
        means = {f"train_{name}": total / self._plan.samples for name, total in self._totals.items()}
        self._totals = {}
        record = {"epoch": epoch, "steps": self._plan.steps_per_epoch, "lr": lr} | means | dict(metrics)
        self._log("epoch", **record)
        self._last = {"test_accuracy": record.get("test_accuracy")}
        if self._world.rank == 0:
            say(epoch_line(record, self._options.epochs, self._options.global_batch_size))
        self._since = time.monotonic()  # an evaluation is no part of the next step

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the run's report on rank 0."""
        self._log("finish")
        self._world.gather(None)  # all ranks' events are written before rank 0 reads them
        if self._world.rank == 0:
            state = TrainState(model, optimizer)
            digests = {"weights_sha256": state.weights_digest(), "optimizer_sha256": state.optimizer_digest()}
            report = write_report(self._options.run_dir, {"epochs": self._options.epochs, **self._last, **digests})
            say(f"finished after {report['steps']} steps: {self._options.run_dir / 'report.json'}")


def say(text: str) -> None:
    """Print a line at once, above a progress bar when there is one."""
    if _bar_wanted():
        from tqdm import tqdm

        tqdm.write(text)
    else:
        print(text, flush=True)


def progress(steps: Iterable[Step], total: int, world: World) -> Iterator[Step]:
    """The same steps, with a bar on rank 0's terminal; TQDM_DISABLE silences it."""
    if world.rank != 0 or not _bar_wanted():
        yield from steps
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="step", leave=False) as bar:
        for step in steps:
            if not step.warmup:
                bar.update(step.number + 1 - bar.n)
            yield step


def _bar_wanted() -> bool:
    return sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE")
