"""Training from a manifest: three pods, a real rendezvous, a pod lost in the middle, and the same bits at the end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import REPO
from pytorchjob_tools import MANIFESTS, at_free_port

from course_lib.engine import read_events
from course_lib.lab import claims
from course_lib.lab.processes import kernel_mark, marked
from course_lib.lab.pytorchjob import LocalJob, read_job

LIMIT_S = 280.0
SETTINGS = ["--data=digits", "--epochs=2", "--snapshot-every=4"]


def report(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "report.json").read_text()))


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in claims.surviving_steps(read_events(run).events).values()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str], list[str]]]:
    """(run directory, lines, conditions) of the text's manifest as it stands; /workspace/mingpt is of its image."""
    folder = tmp_path_factory.mktemp("text")
    arguments = [*SETTINGS, f"--run-dir={folder / 'run'}"]
    script = str(REPO / "scripts" / "ddp_torchrun.py")
    start = f"sys.argv[1:] = {arguments!r}\nrunpy.run_path({script!r}, run_name='__main__')\n"
    (folder / "main.py").write_text(f"import runpy, sys\n{start}")
    lines: list[str] = []
    made = at_free_port(read_job(MANIFESTS / "mingpt.yaml"))
    with LocalJob(made, folder / "work", maps={"/workspace/mingpt": str(folder)}, say=lines.append) as job:
        job.start()
        assert job.wait(LIMIT_S) == "Succeeded", "\n".join(lines)
        yield folder / "run", lines, [*job.conditions.history]


def test_the_texts_manifest_runs_as_it_stands(text: tuple[Path, list[str], list[str]]) -> None:
    run, lines, conditions = text
    assert conditions == ["Created", "Running", "Succeeded"]
    found = report(run)
    assert (found["world_sizes"], found["generations"], found["steps_replayed"]) == ([3], 1, 0)
    assert claims.every_sample_once(run)
    # torchrun's rank 0 is not the operator's: the lines of the training come from one pod all the same.
    assert len({line.split(" | ")[0] for line in lines if "| epoch " in line}) == 1


def until_step(job: LocalJob, run: Path, step: int) -> None:
    while not any(e["event"] == "step" and e["step"] >= step for e in read_events(run).events):
        job.wait(0.1)
        assert not job.done


def assert_same(run: Path, other: Path) -> dict[str, Any]:
    mine, expected = report(run), report(other)
    for name in ("steps", "epochs", "weights_sha256", "optimizer_sha256", "test_accuracy"):
        assert mine[name] == expected[name], name
    assert losses(run) == losses(other) and claims.every_sample_once(run)
    assert set(mine["world_sizes"]) == {3} and mine["generations"] >= 2
    assert [p for p in marked(kernel_mark()) if "distributed" in " ".join(p.command)] == []
    return mine


@pytest.mark.timeout(600)
def test_a_pod_that_is_killed_twice_comes_back(text: tuple[Path, list[str], list[str]], tmp_path: Path) -> None:
    """The second time the kubelet waits for 10 s: agents that start so far apart still meet (G5)."""
    lines: list[str] = []
    run = tmp_path / "work" / "volumes" / "snapshots" / "run"
    made = at_free_port(read_job(MANIFESTS / "digits.yaml"))
    with LocalJob(made, tmp_path / "work", maps={"/workspace": str(REPO)}, say=lines.append) as job:
        job.start()
        until_step(job, run, 9)
        job.kill("digits-worker-1")
        while job.restarts("digits-worker-1") < 1:
            job.wait(0.1)
        job.kill("digits-worker-1")
        assert job.wait(LIMIT_S) == "Succeeded", "\n".join(lines)
        assert job.restarts("digits-worker-1") == 2
        assert job.conditions.history == ["Created", "Running", "Succeeded"]
    assert any("starts again in 10 s (CrashLoopBackOff)" in line for line in lines)
    assert_same(run, text[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pod_that_is_drained_saves_and_nothing_is_replayed(
    text: tuple[Path, list[str], list[str]], tmp_path: Path
) -> None:
    """With the agent that ends with 143, and ExitCode: the new pod goes on from the step at which the old one left."""
    manifest = (MANIFESTS / "digits.yaml").read_text().replace("OnFailure", "ExitCode")
    manifest = manifest.replace("command: [torchrun]", "command: [python, -m, course_lib.engine.launch]")
    (tmp_path / "job.yaml").write_text(manifest)
    lines: list[str] = []
    run = tmp_path / "work" / "volumes" / "snapshots" / "run"
    made = at_free_port(read_job(tmp_path / "job.yaml"))
    with LocalJob(made, tmp_path / "work", maps={"/workspace": str(REPO)}, say=lines.append) as job:
        job.start()
        until_step(job, run, 9)
        job.delete("digits-worker-1")
        assert job.wait(LIMIT_S) == "Succeeded", "\n".join(lines)
        assert job.conditions.history == ["Created", "Running", "Restarting", "Running", "Succeeded"]
    assert any("digits-worker-1: container ended with exit code 143" in line for line in lines)
    assert assert_same(run, text[0])["steps_replayed"] == 0
