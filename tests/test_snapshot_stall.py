"""The measurement of a snapshot's stall: its structure, what it checks, and that its verdicts can be bad ones."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from helpers import BENCH

from course_lib.engine import open_world

Launch = Callable[..., helpers.Completed]


def test_each_way_to_save_is_measured_and_its_files_hold_the_state(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "stall.json"
    command = [sys.executable, BENCH / "snapshot_stall.py", "--state", "tiny", "--saves", "2", "--json", path]
    done = launch(command, timeout=200, env=helpers.torchrun_env({"TMPDIR": str(tmp_path)}))
    assert done.returncode == 0, done.tail()
    figures = json.loads(path.read_text())["stalls"]["tiny"]
    lightning = "Lightning AsyncCheckpointIO"
    others = {"torch.save", "clone + thread", "dcp.save", "dcp.async_save", "dcp.async_save, stager reused"}
    assert {*figures["ways"], *figures["left_out"]} == {*others, lightning, "memcpy", "the course's engine"}
    assert set(figures["left_out"]) <= {lightning}
    for way, row in figures["ways"].items():
        assert row["saves"] == 2 and 0 < row["stall_ms"]["min"] <= row["stall_ms"]["median"] <= row["stall_ms"]["max"]
        if way != "memcpy":
            assert row["read_back_right"] == 2 and row["written_ms"]["max"] >= row["stall_ms"]["min"]
        assert way in done.output
    assert list(tmp_path.glob("snapshot-stall-*")) == []


@pytest.mark.parametrize("damage", [False, True])
def test_a_save_that_cannot_be_read_back_as_it_was_is_no_save(
    tmp_path: Path, bench: Callable[[str], Any], damage: bool
) -> None:
    stall, ways, jobs = bench("snapshot_stall"), bench("_stall_ways"), bench("_stall_jobs")
    honest = ways.WAYS["clone + thread"]

    def read(path: Path, like: dict[str, Any]) -> Any:
        state = honest.read(path, like)
        if damage:
            state["optimizer"]["state"][0]["momentum_buffer"].view(torch.int32).view(-1)[0] ^= 1
        return state

    way = ways.Way(honest.open, read, "the file")
    with open_world("cpu") as world, honest.open() as begin:
        job = jobs.Job("tiny", world, tmp_path / "run", 100)
        taken = [stall.one_save(job, way, begin, tmp_path / "saved") for _ in range(2)]
        job.close()
    assert [save.right for save in taken] == [not damage] * 2
    row = stall.row(way, taken, taken)
    assert stall.wrong({"tiny": {"ways": {"mine": row}}}) == (["tiny by mine"] if damage else [])


@pytest.mark.parametrize(("factor", "met"), [(1.4, [True, True, True]), (1.6, [False, False, True])])
def test_the_targets_of_the_stall_can_be_missed(bench: Callable[[str], Any], factor: float, met: list[bool]) -> None:
    stall, ways = bench("snapshot_stall"), bench("_stall_ways")

    def row(name: str, milliseconds: float) -> Any:
        taken = [stall.Save(milliseconds * scale / 1000, 1.0, 0.0, True) for scale in (1, 1, 9)]
        return stall.row(ways.WAYS[name], taken, [stall.Save(0.01, 0.0, 0.0, True)] * 3)

    rows = {
        ways.ENGINE: row(ways.ENGINE, 10 * factor),
        ways.ASYNC: row(ways.ASYNC, 15),
        ways.REUSED: row(ways.REUSED, 20),
    }
    assert list(stall.targets(rows).values()) == met


def test_the_steps_of_two_ranks_with_snapshots_and_without(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "throughput.json"
    command = [sys.executable, BENCH / "snapshot_stall.py", "--throughput", "--state", "tiny", "--blocks", "4"]
    done = launch([*command, "--json", path], timeout=200, env=helpers.torchrun_env({"TMPDIR": str(tmp_path)}))
    assert done.returncode == 0, done.tail()
    result = json.loads(path.read_text())
    figures = result["throughput"]["tiny"]
    assert (result["ranks"], result["steps_a_block"], figures["global_batch"]) == (2, 10, 64)
    assert [block["snapshot"] for block in figures["blocks"]] == [False, True, True, False]
    assert all(len(block["step_s"]) == 10 and min(block["step_s"]) > 0 < block["cpu_s"] for block in figures["blocks"])
    assert len(figures["stall_ms"]) == len(figures["written_ms"]) == 2


def test_a_snapshot_that_makes_blocks_slower_lowers_the_ratios(bench: Callable[[str], Any]) -> None:
    def block(snapshot: bool, pace: float) -> dict[str, Any]:
        steps = [pace * (3.5 if snapshot and number == 0 else 1.0) for number in range(10)]
        return {"snapshot": snapshot, "step_s": steps, "cpu_s": 2.0}

    times = {"stall_ms": [1.0], "written_ms": [2.0]}
    calm = {"blocks": [block(kind, 0.1) for kind in (False, True, True, False)], **times}
    figures = bench("_throughput").figures(calm)
    assert (figures["ratio"], figures["ratio_by_cpu"], figures["ratio_by_first_steps"]) == (0.8, 1.0, 0.8)
    assert figures["excess_s"] == {"without": 0.0, "with": 0.25}
    busier = [block(True, 0.2) | {"step_s": [0.2] * 10} if item["snapshot"] else item for item in calm["blocks"]]
    figures = bench("_throughput").figures({"blocks": busier, **times})
    assert (figures["ratio"], figures["ratio_by_first_steps"]) == (0.5, 1.0)  # the machine's doing, not the snapshot's


@pytest.mark.parametrize(("option", "value"), [("--saves", "1"), ("--blocks", "6")])
def test_a_stall_that_cannot_be_measured_so_is_refused(launch: Launch, option: str, value: str) -> None:
    done = launch([sys.executable, BENCH / "snapshot_stall.py", option, value], env=helpers.torchrun_env())
    assert (done.returncode, done.output.count("\n")) == (2, 1) and f"{option} must be" in done.output
