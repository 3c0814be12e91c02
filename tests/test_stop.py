"""Asked to stop, all ranks stop after the same step, with a snapshot; and the run goes on as if nothing had been."""

import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import fine, on_ranks
from torch.nn.parallel import DistributedDataParallel
from toys import Toy, dropout_net, events

from course_lib.engine import Preempted, SnapshotError, SnapshotStore, World
from course_lib.engine.step import Step
from course_lib.engine.watchdog import StopWatch


class Asked(Toy):
    """A signal arrives in step `at`, or in the evaluation after epoch `in_epoch`."""

    def __init__(self, run_dir: Path, at: int | None = None, in_epoch: int | None = None, **given: Any) -> None:
        super().__init__(run_dir, evaluate=self.evaluate, **given)
        self.at, self.in_epoch = at, in_epoch

    def ask(self) -> None:
        self.world.stop._note(signal.SIGTERM, None)

    def body(self, step: Step) -> None:
        super().body(step)
        if step.number == self.at and not step.warmup:
            self.ask()

    def evaluate(self) -> Mapping[str, float]:
        if len(self.trainer.progress.history) == self.in_epoch:
            self.ask()
        return {"test_accuracy": 0.5}


def newest(run_dir: Path) -> int:
    """The step of the newest snapshot."""
    return max(manifest.step for manifest in SnapshotStore(run_dir).listing().manifests)


@pytest.mark.parametrize("at", [0, 2, 3, 4, 9], ids=["first", "save due", "plain", "epoch's last", "last"])
def test_it_stops_after_the_step_with_a_snapshot(tmp_path: Path, at: int) -> None:
    """In the run's last step, too: the evaluation that is left may be longer than the time that is given."""
    whole = Asked(tmp_path / "whole").run()
    with pytest.raises(Preempted, match=f"after {at + 1} steps, with a snapshot"):
        Asked(tmp_path / "run", at).run()
    assert newest(tmp_path / "run") == at + 1
    assert [event["step"] for event in events(tmp_path / "run", "stop_requested")] == [at + 1]
    assert events(tmp_path / "run", "finish") == []

    again = Asked(tmp_path / "run").run()
    assert sorted(again.losses) == list(range(at + 1, 10))
    assert again.digests() == whole.digests()
    assert again.trainer.progress == whole.trainer.progress


@pytest.mark.parametrize("snapshot_every", [3, 5])
def test_it_stops_after_the_evaluation_that_it_was_in(tmp_path: Path, snapshot_every: int) -> None:
    """Whether the snapshot of that step is there already, from before the evaluation, or not."""
    whole = Asked(tmp_path / "whole").run()
    with pytest.raises(Preempted, match="after 5 steps"):
        Asked(tmp_path / "run", in_epoch=0, snapshot_every=snapshot_every).run()
    assert newest(tmp_path / "run") == 5
    again = Asked(tmp_path / "run", snapshot_every=snapshot_every).run()
    assert sorted(again.losses) == list(range(5, 10))
    assert again.digests() == whole.digests()
    assert again.trainer.progress == whole.trainer.progress


def test_asked_in_the_last_evaluation_it_is_done(tmp_path: Path) -> None:
    toy = Asked(tmp_path, in_epoch=1).run()
    assert toy.lines[-1].startswith("finished after 10 steps")
    assert newest(tmp_path) == 10


def test_two_stops_in_a_row(tmp_path: Path) -> None:
    """Each life makes at least a step; a second signal while the first is being obeyed changes nothing."""

    class Twice(Asked):
        def ask(self) -> None:
            super().ask()
            super().ask()

    for at in (3, 4):
        with pytest.raises(Preempted, match=f"after {at + 1} steps"):
            Twice(tmp_path / "run", at).run()
    assert Asked(tmp_path / "run").run().digests() == Asked(tmp_path / "whole").run().digests()


def test_a_stop_without_a_snapshot_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SnapshotStore, "draft", full)
    with pytest.raises(SnapshotError, match="asked to stop after 2 steps, but no snapshot"):
        Asked(tmp_path, 1).run()


@pytest.mark.parametrize("by_agent", [True, False])
def test_the_agent_is_told_unless_it_asked_itself(tmp_path: Path, by_agent: bool) -> None:
    class Sent(Asked):
        def ask(self) -> None:
            self.world.stop._note(signal.SIGTERM, os.getppid() if by_agent else os.getpid())

    with pytest.raises(Preempted) as caught:
        Sent(tmp_path, 1).run()
    assert caught.value.tell_agent != by_agent


class Killed(Asked):
    """A real signal, from the process to itself."""

    signum = signal.SIGTERM

    def ask(self) -> None:
        os.kill(os.getpid(), self.signum)
        while self.world.stop.requested is None:  # a thread receives it
            time.sleep(0.001)


def _killed(world: World, run_dir: Path, signum: int, on: int, at: int | None, in_epoch: int | None) -> list[Any]:
    """How a run ends in which rank `on` gets a signal, and what becomes of it, and of one that gets none."""

    def make(name: str, *when: int | None) -> Killed:
        fresh = replace(world, stop=StopWatch())  # as each process has its own
        return Killed(run_dir / name, *when, world=fresh, model=DistributedDataParallel(dropout_net()))

    toy = make("run", *((at, in_epoch) if world.rank == on else ()))
    toy.signum = signal.Signals(signum)
    with pytest.raises(Preempted) as caught:
        toy.run()
    steps = toy.trainer.progress.position.step
    return [str(caught.value), steps, make("run").run().digests(), make("whole").run().digests()]


@pytest.mark.parametrize(
    ("ranks", "on", "signum", "at", "in_epoch"),
    [(1, 0, signal.SIGTERM, 3, None), (1, 0, signal.SIGINT, None, 0), (2, 1, signal.SIGTERM, 3, None)],
    ids=["SIGTERM in a step", "SIGINT in the evaluation", "SIGTERM on rank 1 of 2"],
)
def test_a_real_signal_stops_every_rank_at_one_step(
    tmp_path: Path, ranks: int, on: int, signum: int, at: int | None, in_epoch: int | None
) -> None:
    """Also case D2: ranks that stop on their own leave the others waiting, so the flag is reduced."""
    steps = 5 if at is None else at + 1
    results = fine(on_ranks(ranks, _killed, tmp_path, signum, on, at, in_epoch))
    for text, stopped_after, resumed, whole in results:
        assert text.startswith(f"stopped as asked after {steps} steps")
        assert stopped_after == steps
        assert resumed == whole == results[0][3]
    assert newest(tmp_path / "run") == 10


def test_a_time_limit_stops_the_job_as_a_preemption_does(tmp_path: Path) -> None:
    toy = Asked(tmp_path / "run", time_limit=0.001)  # long over: it counts from the start of the process
    with pytest.raises(Preempted, match="after 1 steps, with a snapshot") as caught:
        toy.run()
    assert caught.value.tell_agent
    assert [event["step"] for event in events(tmp_path / "run", "stop_requested")] == [1]
    assert Asked(tmp_path / "run", time_limit=1e6).run().digests() == Asked(tmp_path / "whole").run().digests()
