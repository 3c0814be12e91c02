"""Training goes on while a snapshot is being written, and what is written is the moment of the save."""

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from toys import Points, Toy, events, files, net

from course_lib.engine import SnapshotError, SnapshotStore, World, saver
from course_lib.engine.snapshots import open_payload
from course_lib.engine.step import Step
from course_lib.engine.tree import HostCopy, digest


class Disk:
    """A disk that takes its time: drafts wait until `free` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        self.at_once = 0  # the most drafts that were being written at the same time
        self._writing = 0
        whole = SnapshotStore.draft

        def draft(store: SnapshotStore, *args: Any, **facts: Any) -> Any:
            self._writing += 1
            self.at_once = max(self.at_once, self._writing)
            assert self.free.wait(30)
            self._writing -= 1
            return whole(store, *args, **facts)

        monkeypatch.setattr(SnapshotStore, "draft", draft)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.free.set()


class Freeing(Toy):
    """The disk becomes free before step `when`; `states` remembers the state after each step."""

    def __init__(self, run_dir: Path, disk: Disk, when: int, **options: Any) -> None:
        super().__init__(run_dir, **options)
        self.disk, self.when, self.states = disk, when, dict[int, str]()

    def body(self, step: Step) -> None:
        if step.number == self.when and not step.warmup:
            self.disk.free.set()
        super().body(step)
        self.states[step.number + 1] = digest(self.state.state_dict())


def order(run_dir: Path) -> list[str]:
    """The run's steps and snapshots as they happened."""
    return [f"{e['event'].split('_')[-1]} {e['step']}" for e in events(run_dir, "step", "snapshot_saved")]


def test_training_goes_on_while_the_disk_writes_and_the_snapshot_is_that_of_its_moment(
    tmp_path: Path, slow: Disk
) -> None:
    toy = Freeing(tmp_path, slow, when=5).run()
    happened = order(tmp_path)
    assert happened.index("saved 3") > happened.index("step 4")  # two steps further than the one it shows
    for manifest in SnapshotStore(tmp_path).listing().manifests[:-1]:  # the last one is of after the evaluation
        content = open_payload(SnapshotStore(tmp_path).read(manifest))
        assert digest(content["state"]) == toy.states[manifest.step]
        assert content["progress"]["position"]["step"] == manifest.step
    assert toy.digests() == Toy(tmp_path / "whole").run().digests()


def test_a_disk_that_is_too_slow_costs_snapshots_and_says_so(
    tmp_path: Path, slow: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saver, "PATIENCE_S", 0.05)
    Freeing(tmp_path, slow, when=9, snapshot_every=2).run()
    assert slow.at_once == 1
    assert [e["step"] for e in events(tmp_path, "snapshot_skipped")] == [4, 6, 8]
    assert [e["step"] for e in events(tmp_path, "snapshot_saved")] == [2, 10]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all("still being written, so the disk is slower than the interval" in s for s in said)


def test_with_patience_no_snapshot_is_left_out_and_the_log_tells_the_wait(tmp_path: Path, slow: Disk) -> None:
    threading.Timer(0.3, slow.free.set).start()
    Toy(tmp_path, snapshot_every=2).run()
    saved = events(tmp_path, "snapshot_saved")
    assert [e["step"] for e in saved] == [2, 4, 6, 8, 10]
    assert saved[1]["waited_s"] > 0 and saved[1]["stall_s"] >= saved[1]["waited_s"]
    assert all(e["write_s"] >= e["stall_s"] - e["waited_s"] for e in saved)


def test_what_the_disk_refuses_is_known_one_step_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    whole = SnapshotStore.draft
    monkeypatch.setattr(SnapshotStore, "draft", full)

    class Mended(Toy):
        def body(self, step: Step) -> None:
            while step.number == 5 and not self.trainer._keeper.saver.vote():
                time.sleep(0.001)  # a step as long as the disk takes to say no
            if step.number == 6:
                monkeypatch.setattr(SnapshotStore, "draft", whole)
            super().body(step)

    Mended(tmp_path, snapshot_every=5).run()
    happened = [f"{e['event']} {e['step']}" for e in events(tmp_path, "step", "snapshot_skipped")]
    assert happened[5:7] == ["step 5", "snapshot_skipped 5"]
    assert [e["step"] for e in events(tmp_path, "snapshot_saved")] == [10]


def test_a_loop_that_is_left_early_keeps_the_snapshot_in_flight(tmp_path: Path, slow: Disk) -> None:
    threading.Timer(0.2, slow.free.set).start()
    Toy(tmp_path).run(until=4)
    assert [m.step for m in SnapshotStore(tmp_path).listing().manifests] == [3]
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]


def keys_left(world: World, run_dir: Path) -> int:
    Toy(run_dir, world=world, model=DistributedDataParallel(net())).run()
    return sum("snapshot/" in key for key in world.store.list_keys())


def test_two_ranks_publish_what_both_hold_and_leave_nothing_in_the_store(tmp_path: Path) -> None:
    assert on_ranks(2, keys_left, tmp_path) == [0, 0]
    assert [e["step"] for e in events(tmp_path, "snapshot_saved")] == [3, 6, 9, 10]


def without_an_answer(world: World, run_dir: Path) -> str:
    saver.PATIENCE_S, saver.LAST_PATIENCE_S = 0.1, 0.5
    if world.rank == 1:
        saver.Saver._post = lambda *_: None  # type: ignore[method-assign]
    try:
        Toy(run_dir, world=world, model=DistributedDataParallel(net())).run()
    except SnapshotError as error:
        return str(error)
    return ""


def test_a_rank_that_never_answers_costs_the_snapshot(tmp_path: Path) -> None:
    """Its digest doesn't come: nothing is published, training goes on, and the end says that it is not done."""
    answers = on_ranks(2, without_an_answer, tmp_path)
    assert all("its last snapshot could not be published" in text for text in answers)
    assert SnapshotStore(tmp_path).listing().manifests == ()
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]


NESTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: {"a": torch.rand(3, 4), "b": [torch.arange(5), (torch.tensor(2.0),)], "c": "text"},
    "strided": lambda: {
        "t": torch.rand(4, 6).t(),
        "last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    },
    "expanded": lambda: {
        "e": torch.rand(1, 3).expand(4, 3),
        "none": torch.empty(0, 3),
        "half": torch.rand(3).bfloat16(),
    },
    "counter": lambda: {"milestones": Counter({5: 1, 9: 2})},
}


@pytest.mark.parametrize("name", NESTS)
def test_a_copy_is_equal_and_does_not_follow_its_original(name: str) -> None:
    nest = NESTS[name]()
    before = digest(nest)
    copy = HostCopy()(nest)
    assert digest(copy) == before and type(copy.get("milestones", Counter())) is Counter
    for value in nest.values():
        if isinstance(value, torch.Tensor) and value.is_contiguous():
            value.zero_()
    assert digest(copy) == before


def test_the_memory_of_a_copy_is_used_again_and_shared_tensors_are_copied_once() -> None:
    copy, weight = HostCopy(), torch.rand(100)
    nest = {"encoder": weight, "decoder": weight, "parameters": {"w": weight.detach()}, "other": torch.rand(100)}
    first = copy(nest)
    places = [first["encoder"].data_ptr(), first["other"].data_ptr()]
    assert first["encoder"] is first["decoder"] is first["parameters"]["w"] and len(set(places)) == 2
    weight.add_(1)
    second = copy(nest)
    assert [second["encoder"].data_ptr(), second["other"].data_ptr()] == places
    assert torch.equal(second["decoder"], weight)
    grown = copy(nest | {"other": torch.rand(7), "more": torch.rand(3)})
    assert grown["encoder"].data_ptr() == places[0] and grown["other"].shape == (7,)


def test_a_state_too_large_for_one_interval_is_whole(tmp_path: Path) -> None:
    """80 MB, a snapshot at every step: each is waited for, and the last is the state at the end."""
    wide = Toy(tmp_path, model=net(torch.nn.Linear(8, 8)), dataset=Points(16), snapshot_every=1)
    wide.state.extra["ballast"] = torch.nn.Linear(1000, 20_000)
    wide.run()
    manifest = max(SnapshotStore(tmp_path).listing().manifests, key=lambda m: m.step)
    assert manifest.bytes > 80_000_000
    content = open_payload(SnapshotStore(tmp_path).read(manifest))
    assert digest(content["state"]) == digest(wide.state.state_dict())
