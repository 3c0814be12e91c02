"""Disks that are full, read-only, broken or gone: that costs snapshots and not the run, and everybody can see it."""

import errno
import io
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import Running, running, torchrun_cmd, torchrun_env
from jobs import SCRIPT, SHORT, assert_same_result, job, report, undisturbed
from snapshot_tools import everything, find, names, start, unreadable
from test_bad_input import alone, refused
from toys import Toy, events, files

from course_lib.engine import SnapshotError, SnapshotStore, read_events
from course_lib.engine.snapshots import open_payload
from course_lib.engine.step import Step

MEGABYTE = 2**20


def mount(*words: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")


def unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", place], check=True, timeout=60)


@contextmanager
def mounted(place: Path, *words: str | Path) -> Iterator[Path]:
    """A disk at `place` for as long as the block lasts; skips the test where none can be mounted."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can mount a disk")
    place.mkdir(exist_ok=True)
    mount(*words, place)
    try:
        yield place
    finally:
        unmount(place)


def tmpfs(place: Path, size: str) -> Any:
    return mounted(place, "-t", "tmpfs", "-o", f"size={size}", "none")


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    path = disk / "ballast"
    with path.open("wb", buffering=0) as file:
        for size in (MEGABYTE, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return path


# --- the real job on real disks ----------------------------------------------------------------------------------

LONG = ("--epochs", 9, "--snapshot-every", 1)  # 27 steps


def wait_until(process: Running, what: str, condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.popen.poll() is None, f"it ended before {what}:\n{process.output()[-3000:]}"
        assert time.monotonic() < process.deadline, f"no {what} in time:\n{process.output()[-3000:]}"
        time.sleep(0.02)


def snapshot_files(run_dir: Path) -> dict[str, bytes]:
    """The published files, whole or not."""
    return {name: content for name, content in everything(run_dir / "snapshots").items() if name.startswith("gen-")}


@pytest.mark.timeout(600)
def test_a_job_goes_on_without_its_disk_and_saves_again_when_it_is_back(tmp_path: Path) -> None:
    """It vanishes, comes back read-only, then whole, and is full for a while: the result is as if nothing had been."""
    reference = undisturbed(*LONG)
    store, place = tmp_path / "store", tmp_path / "disk"
    with ExitStack() as stack:
        stack.enter_context(tmpfs(store, "30m"))
        stack.enter_context(mounted(place, "-t", "tmpfs", "-o", "ro", "none"))  # what is seen when the disk is gone
        run_dir = place / "run"
        command = torchrun_cmd(*SHORT, *LONG, script=SCRIPT, run_dir=run_dir)
        with mounted(place, "--bind", store):
            process = stack.enter_context(running(command, timeout=400, env=torchrun_env()))
            wait_until(process, "first snapshot", lambda: len(snapshot_files(run_dir)) > 2)

        old, before = snapshot_files(store / "run"), skipped(process)
        wait_until(process, "skipped snapshots", lambda: skipped(process) > before + 1)
        with mounted(place, "--bind", "-o", "ro", store):
            before = skipped(process)
            wait_until(process, "skipped snapshot", lambda: skipped(process) > before)
            assert snapshot_files(run_dir) == old
        with mounted(place, "--bind", store):
            saves_again(process, run_dir)
            reasons = [event["reason"] for event in read_events(run_dir).named("snapshot_skipped")]
            assert sum("Read-only file system" in reason for reason in reasons) > 1

            ballast = fill(store)
            wait_until(process, "full disk", lambda: "No space left" in process.output())
            ballast.unlink()
            saves_again(process, run_dir)
            done = process.wait()
            assert done.returncode == 0, done.tail()
            assert names(run_dir) == [f"gen-0001-step-000000{step}" for step in (25, 26, 27)]
            for what in ("weights_sha256", "optimizer_sha256", "test_accuracy", "steps"):
                assert report(run_dir)[what] == reference[what], what


def skipped(process: Running) -> int:
    return process.output().count("no snapshot after step")


def saves_again(process: Running, run_dir: Path) -> None:
    before = set(snapshot_files(run_dir))
    wait_until(process, "new snapshot", lambda: bool(set(snapshot_files(run_dir)) - before))


@pytest.mark.timeout(600)
def test_a_disk_that_stays_full_ends_the_job_with_an_error_and_keeps_what_was_saved(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "2500k") as disk:  # room for one snapshot of 1.5 MB, and for the event log
        run_dir = disk / "run"
        done = job(run_dir, "--snapshot-strict")
        assert done.returncode == 1 and "no snapshot after step 4: OSError: [Errno 28]" in done.output, done.tail()
        kept = snapshot_files(run_dir)
        assert names(run_dir) == ["gen-0001-step-00000002"]

        done = job(run_dir)
        assert done.returncode == 1 and "training is done, but its last snapshot could not be" in done.output, (
            done.tail()
        )
        assert done.output.count("no snapshot after step") == 2 and not (run_dir / "report.json").exists()
        assert kept.items() <= snapshot_files(run_dir).items()

        ballast = fill(disk)
        refused(alone("--run-dir", run_dir), "cannot write to the run directory", "No space left", "--run-dir")
        ballast.unlink()
        mount("-o", "remount,size=30m", disk)
        done = job(run_dir)
        assert done.returncode == 0 and "resumed from gen-0001-step-00000002" in done.output, done.tail()
        assert_same_result(run_dir, undisturbed())


def test_an_event_log_on_a_full_disk_costs_nothing(tmp_path: Path) -> None:
    """The snapshots have another disk, by a link, and the log has no room from its first line on."""
    with tmpfs(tmp_path / "disk", "64k") as disk:
        (tmp_path / "snapshots").mkdir()
        (disk / "run").mkdir()
        (disk / "run" / "snapshots").symlink_to(tmp_path / "snapshots")
        (disk / "run" / "events").mkdir()
        fill(disk)
        done = job(disk / "run")
        assert done.returncode == 0, done.tail()
        assert done.output.count("no event log any more") == 2 and "no report" in done.output
        assert sorted(path.name for path in (tmp_path / "snapshots").glob("*.pt")) == [
            f"gen-0001-step-0000000{step}.pt" for step in (2, 4, 6)
        ]


# --- what no disk does on request: broken calls, in one process --------------------------------------------------

CODES = [errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS]
AT_6 = "gen-0001-step-00000006"  # the second of the four snapshots of a Toy


def break_writes(patch: pytest.MonkeyPatch, broken: Callable[[str], bool], code: int) -> None:
    """The write that would fill a file fails, after half of what it was given."""
    real = Path.open

    class Broken(io.FileIO):
        def write(self, data: Any, /) -> int:
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(code, os.strerror(code))

    def opened(path: Path, mode: str = "r", *args: Any, **how: Any) -> Any:
        if "x" in mode and broken(path.name):
            return io.BufferedWriter(Broken(str(path), mode.replace("b", "")))
        return real(path, mode, *args, **how)

    patch.setattr(Path, "open", opened)


def break_fsync(patch: pytest.MonkeyPatch, broken: Callable[[str], bool], code: int) -> None:
    real = os.fsync

    def fsync(file: int) -> None:
        if broken(Path(f"/proc/self/fd/{file}").readlink().name):
            raise OSError(code, os.strerror(code))
        real(file)

    patch.setattr(os, "fsync", fsync)


def break_link(patch: pytest.MonkeyPatch, broken: Callable[[str], bool], code: int) -> None:
    real = os.link

    def link(source: Path, target: Path, **how: Any) -> None:
        if broken(Path(target).name):
            raise OSError(code, os.strerror(code))
        real(source, target, **how)

    patch.setattr(os, "link", link)


Break = Callable[[pytest.MonkeyPatch, Callable[[str], bool], int], None]
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
BREAKS = [break_writes, pytest.param(break_fsync, marks=needs_proc), break_link]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What becomes of a Toy when nothing is broken."""
    return Toy(tmp_path_factory.mktemp("whole")).run().digests()


def steps_on_disk(run_dir: Path) -> list[int]:
    """Of the snapshots that are good, by every byte."""
    store = SnapshotStore(run_dir)
    return sorted(m.step for m in store.listing().manifests if open_payload(store.read(m)))


@pytest.mark.parametrize("part", [".pt", ".json"])
@pytest.mark.parametrize("break_it", BREAKS)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_an_error_costs_one_snapshot_and_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: tuple[str, str],
    break_it: Break,
    code: int,
    part: str,
) -> None:
    break_it(monkeypatch, lambda name: f"{AT_6}{part}" in name, code)
    toy = Toy(tmp_path).run()
    assert toy.digests() == whole and toy.lines[-1].startswith("finished after 10 steps")
    assert steps_on_disk(tmp_path) == [3, 9, 10]
    (event,) = events(tmp_path, "snapshot_skipped")
    assert event["step"] == 6 and os.strerror(code) in event["reason"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "no snapshot after step 6, training goes on" in line and os.strerror(code) in line
    assert not [name for name in files(tmp_path) if name.endswith(".tmp") or AT_6 in name]


@pytest.mark.parametrize("break_it", BREAKS)
@pytest.mark.parametrize("code", CODES[:3], ids=errno.errorcode.get)
def test_a_disk_that_stays_broken_makes_the_end_a_failure_that_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, str], break_it: Break, code: int
) -> None:
    with monkeypatch.context() as patch:
        break_it(patch, lambda name: "step" in name and "00000003" not in name, code)
        with pytest.raises(SnapshotError, match="training is done, but its last snapshot could not be published"):
            Toy(tmp_path).run()
        assert steps_on_disk(tmp_path) == [3] and not (tmp_path / "report.json").exists()
        kept = {name: content for name, content in files(tmp_path / "snapshots").items() if "step" in name}
        with pytest.raises(SnapshotError, match=f"no snapshot after step 6: OSError: .*{os.strerror(code)}"):
            Toy(tmp_path, strict=True).run()
        assert kept.items() <= files(tmp_path / "snapshots").items()
    again = Toy(tmp_path).run()
    assert sorted(again.losses) == list(range(3, 10)) and again.digests() == whole


@pytest.mark.parametrize("most", [1, 1000])
def test_a_disk_that_takes_a_part_of_each_write_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[str, str], most: int
) -> None:
    real, counted = Path.open, [0]

    class Short(io.FileIO):
        def write(self, data: Any, /) -> int:
            counted[0] += 1
            return super().write(bytes(data)[:most])

    def opened(path: Path, mode: str = "r", *args: Any, **how: Any) -> Any:
        short = "x" in mode and "step" in path.name
        return io.BufferedWriter(Short(str(path), "x")) if short else real(path, mode, *args, **how)

    monkeypatch.setattr(Path, "open", opened)
    assert Toy(tmp_path).run(until=8).trainer.progress.position.step == 8
    assert counted[0] > 10 and steps_on_disk(tmp_path) == [3, 6]
    assert Toy(tmp_path).run().digests() == whole


class Vanishing(Toy):
    """Something happens to the run's directory before the steps of `acts`, when nothing is being written."""

    acts: dict[int, Callable[[], object]]

    def body(self, step: Step) -> None:
        if not step.warmup and step.number in self.acts:
            self.trainer._keeper.saver.wait()
            self.acts[step.number]()
        super().body(step)


@pytest.mark.parametrize("gone", ["snapshots", "."])
def test_a_directory_that_is_moved_away_is_made_again_and_both_parts_fit_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: tuple[str, str], gone: str
) -> None:
    run_dir, away = tmp_path / "run", tmp_path / "away"
    toy = Vanishing(run_dir)
    toy.acts = {4: lambda: (run_dir / gone).rename(away)}
    assert toy.run().digests() == whole
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"the directory {run_dir / 'snapshots'} had vanished, with the snapshots in it: it was made anew"
    assert steps_on_disk(run_dir) == [6, 9, 10]
    again = Toy(run_dir, epochs=3).run()
    assert sorted(again.losses) == list(range(10, 15))
    for path in (away if gone == "snapshots" else away / "snapshots").iterdir():
        path.rename(run_dir / "snapshots" / path.name)
    found = find(run_dir)
    assert found.manifest is not None and found.manifest.step == 15 and found.skipped == ()


def test_a_directory_that_is_no_longer_one_costs_snapshots_until_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: tuple[str, str]
) -> None:
    run_dir, away = tmp_path / "run", tmp_path / "away"

    def lose() -> None:
        (run_dir / "snapshots").rename(away)
        (run_dir / "snapshots").write_text("somebody's file")

    def find_again() -> None:
        (run_dir / "snapshots").unlink()
        away.rename(run_dir / "snapshots")

    toy = Vanishing(run_dir)
    toy.acts = {4: lose, 7: find_again}
    assert toy.run().digests() == whole
    assert [event["step"] for event in events(run_dir, "snapshot_skipped")] == [6]
    assert "no snapshot after step 6, training goes on" in capsys.readouterr().err
    assert steps_on_disk(run_dir) == [3, 9, 10]


def test_a_snapshot_that_cannot_be_read_just_now_is_reported_and_the_older_one_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = start(tmp_path)
    for step in (1, 2, 3):
        generation.save(step)
    for suffix, code in ((".pt", errno.EIO), (".pt", errno.ESTALE), (".json", errno.EIO), (".json", errno.ESTALE)):
        with monkeypatch.context() as patch:
            unreadable(patch, f"gen-0001-step-00000003{suffix}", code)
            found = find(tmp_path)
        assert found.content["step"] == 2
        ((name, reason),) = found.skipped
        assert name == "gen-0001-step-00000003" and os.strerror(code) in reason
    assert find(tmp_path).content["step"] == 3
