"""Bad input: one clear line that names what is wrong, exit code 2 from the worker, nothing lost, no restart."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers import REPO, Completed, launch, running, torchrun, torchrun_cmd, torchrun_env
from jobs import SHORT, job
from PIL import Image

from course_lib.engine import UsageError
from course_lib.workloads.options import parse_options

WRONG = {
    "--data mnist": "--data",
    "--model huge": "--model",
    "--norm layer": "--norm",
    "--epochs 0": "--epochs",
    "--epochs two": "--epochs",
    "--global-batch-size 0": "--global-batch-size",
    "--lr -1": "--lr",
    "--lr nan": "--lr",
    "--seed x": "--seed",
    "--seed 99999999999999999999": "--seed",
    "--collective-timeout 1e30": "--collective-timeout",
    "--run-dir ''": "--run-dir",
    "--num-workers -1": "--num-workers",
    "--device tpu": "--device",
    "--dtype int8": "--dtype",
    "--snapshot-every 0": "--snapshot-every",
    "--keep 0": "--keep",
    "--collective-timeout 0": "--collective-timeout",
    "--no-such-option": "--no-such-option",
    "--epoch 3": "--epoch",
}


@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_option_is_named_in_one_line(options: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options("", "group", "snapshots", argv=shlex.split(options))
    assert WRONG[options] in str(caught.value) and "\n" not in str(caught.value)


def alone(*options: str | Path) -> Completed:
    """The training script as a plain process, whose exit code is the worker's."""
    command = [sys.executable, REPO / "scripts/ddp_torchrun.py", *map(str, SHORT), *options]
    return launch(command, env=torchrun_env())


def refused(done: Completed, *words: str) -> None:
    """Exit code 2, and exactly one line of complaint, which holds these words."""
    assert done.returncode == 2, done.tail()
    lines = [line for line in done.output.splitlines() if not line.startswith("running on")]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.tail()
    for word in words:
        assert word in lines[0]


def picture_tree(root: Path) -> Path:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
            for i in range(2):
                Image.new("RGB", (32, 32), (i * 40, 80, 120)).save(root / part / name / f"{i}.png")
    return root


def test_folders_that_cannot_be_trained_on(tmp_path: Path) -> None:
    run = ("--run-dir", tmp_path / "run", "--data", "image_folder", "--data-root")
    refused(alone(*run, tmp_path / "missing"), str(tmp_path / "missing"))
    (tmp_path / "empty").mkdir()
    refused(alone(*run, tmp_path / "empty"), str(tmp_path / "empty"))
    tree = picture_tree(tmp_path / "tree")
    broken = tree / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    refused(alone(*run, tree), str(broken))
    assert not (tmp_path / "run").exists()


def test_data_that_need_a_network_say_what_to_do(tmp_path: Path) -> None:
    dead = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    command = [sys.executable, REPO / "scripts/ddp_torchrun.py", "--data", "cifar10", "--data-root", tmp_path / "data"]
    done = launch([*command, "--run-dir", tmp_path / "run"], env=torchrun_env(dead))
    refused(done, "--data cifar10", str(tmp_path / "data"))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    refused(alone("--run-dir", tmp_path / "file" / "run"), str(tmp_path / "file" / "run"), "--run-dir")


def test_snapshots_of_another_job_are_refused_and_kept(tmp_path: Path) -> None:
    run = ("--run-dir", tmp_path / "run")
    assert alone(*run).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused(alone(*run, "--norm", "group"), "norm batch there, group here", "--run-dir")
    refused(alone(*run, "--seed", "1"), "seed 0 there, 1 here")
    refused(alone(*run, "--global-batch-size", "400"), "global batch size 500 there, 400 here")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_directory_in_use_by_a_live_run_is_refused(tmp_path: Path) -> None:
    options = ("--epochs", "2000", "--snapshot-every", "5")
    holder = torchrun_cmd(*options, script="scripts/ddp_torchrun.py", nproc=1, run_dir=tmp_path / "run")
    with running(holder, env=torchrun_env()) as process:
        process.wait_for("epoch 1/2000")
        refused(alone("--run-dir", tmp_path / "run"), "in use by a live job", str(tmp_path / "run"))
        size = len(list((tmp_path / "run" / "snapshots").glob("*.claim.json")))
    assert size == 1


@pytest.mark.parametrize("options", [("--lr", "fast"), ("--data", "image_folder"), ("--fault", "kill:rank=9")])
def test_torchrun_does_not_restart_a_job_that_can_never_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = job(tmp_path / "run", *options, max_restarts=3)
    assert done.returncode == 1  # torchrun's own, whatever its workers returned
    assert len(re.findall(r"^error: .*", done.output, re.MULTILINE)) == 1, done.tail()
    assert not (tmp_path / "run" / "snapshots").exists()


def test_the_line_is_said_even_when_another_rank_is_the_first_to_leave(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\n"
        "from course_lib.engine import UsageError, run\n"
        "def main():\n"
        "    time.sleep(2 if os.environ['RANK'] == '0' else 0)\n"
        "    raise UsageError('--option is wrong: leave it out')\n"
        "run(main)\n"
    )
    done = torchrun(script=script, nproc=3, max_restarts=2)
    assert done.returncode == 1
    assert re.findall(r"^error: .*", done.output, re.MULTILINE) == ["error: --option is wrong: leave it out"]
