"""What notebook 07 shows of manifests, and what it recorded."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import REPO
from pytorchjob_tools import manifest, replica
from pytorchjob_tools import write as write_manifest
from test_claims import calm_run, write

from course_lib.engine import UsageError
from course_lib.lab import pods_claims
from course_lib.lab.claims import BrokenRecord
from course_lib.lab.exercises import n07
from course_lib.lab.pods_job import ToldJob
from course_lib.lab.pods_manifest import MANIFEST, bare, changed, trap
from course_lib.lab.pods_scenes import FLAWS, _shortened, evidence, read_record
from course_lib.lab.pods_tables import CLUSTER, environments, table, three_ways
from course_lib.lab.pytorchjob import read_job
from course_lib.workloads.gpt_job import compare
from course_lib.workloads.text import load_text

RECORD = REPO / "notebooks" / "recorded" / "pods.json"
SOURCE = REPO / "notebooks" / "src" / "07_kubernetes_mingpt.py"


def test_a_manifest_without_comments_is_the_same_manifest(tmp_path: Path) -> None:
    text = bare(MANIFEST)
    assert "#" not in text and "\n\n" not in text
    (tmp_path / "bare.yaml").write_text(text)
    assert read_job(tmp_path / "bare.yaml") == read_job(MANIFEST)
    (tmp_path / "odd.yaml").write_text("a: |\n  x\n  # not a comment\n")
    with pytest.raises(UsageError, match="is no comment"):
        bare(tmp_path / "odd.yaml")


def test_a_change_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path / "new" / "job.yaml", ("--epochs=#", "--epochs=1"), ("OnFailure", "Never"))
    assert "--epochs=1\n" in path.read_text() and "OnFailure" not in read_job(path).replicas[1].restart_policy
    with pytest.raises(UsageError, match="no '--epoch='"):
        changed(tmp_path / "job.yaml", ("--epoch=", "x"))
    with pytest.raises(UsageError, match="the trap shm is not what"):
        trap("shm", ("backoffLimit: #", "backoffLimit: 5"))


def test_the_notebook_shows_the_traps_that_the_linter_knows() -> None:
    rules = [REPO / "course_lib" / "lab" / "pytorchjob" / name for name in ("lint.py", "lint_pod.py")]
    names = {name for path in rules for name in re.findall(r'yield \(?\s*"([a-z-]+)"', path.read_text())}
    assert len(names) > 15
    shown = set(re.findall(r'trap\(\s*"([a-z-]+)"', SOURCE.read_text()))
    assert names - shown == {"nnodes-differs", "nnodes-halves", "never"} and shown < names  # "and a few more"


def test_answers_in_another_form_are_told_the_form() -> None:
    def moves(policy: str, code: int) -> str | None:
        return str(n07.next_move_of(policy, code))

    assert "for ('Never', 0) it gives 'None'; a move is \"same pod\", \"new pod\" or None" in n07.next_move.verdict(
        moves
    )
    for given in ("²", "twelve", None):
        assert "WORLD_SIZE: " in n07.injected.verdict({"PET_NNODES": "3", "WORLD_SIZE": given, "RANK": 2})
    for wrong in ("True", 1, None):
        assert n07.bets.verdict(n07.bets.solution | {"B": wrong}).startswith("not yet: B: put True or False, without")
    assert n07.bets.verdict({key: np.bool_(value) for key, value in n07.bets.solution.items()}).startswith("solved")


def test_a_text_of_one_character_leaves_nothing_to_guess(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 2000)
    assert "a table of character pairs reaches 0.0000" in compare(0.0, load_text(str(tmp_path / "a.txt"), 16))


def test_tables() -> None:
    assert table(["", "b"], [["name", "1"], ["x", "22"]]) == "      b\nname  1\nx     22"
    row = next(line for line in environments(read_job(MANIFEST)).splitlines() if line.startswith("PET_NODE_RANK"))
    assert row.split() == ["PET_NODE_RANK", "0", "1", "2"]


def test_three_ways_reads_the_files_themselves(tmp_path: Path) -> None:
    for path in CLUSTER.iterdir():
        shutil.copy(path, tmp_path)
    assert "--nodes=3" in three_ways(tmp_path)
    script = tmp_path / "train.sbatch"
    script.write_text(script.read_text().replace("--nodes=3", "--nodes=5"))
    assert "--nodes=5" in three_ways(tmp_path)
    script.write_text(script.read_text().replace("#SBATCH --requeue", "#SBATCH"))
    with pytest.raises(UsageError, match="requeue"):
        three_ways(tmp_path)


def test_held_out_losses_rest_on_the_record(tmp_path: Path) -> None:
    files = calm_run()
    for events in files.values():
        for event in events:
            if event["event"] == "epoch":
                event["test_loss"] = 2.0
    run = write(tmp_path / "run", files)
    assert set(pods_claims.held_out_losses(run)) == {2.0} and pods_claims.beats_pairs(run)
    assert not pods_claims.began_near_uniform(run)
    for events in files.values():
        events[:] = [event for event in events if event.get("step") != 3]
    with pytest.raises(BrokenRecord):
        pods_claims.beats_pairs(write(tmp_path / "broken", files))


def test_a_told_job_tells_who_was_started_and_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = manifest({"cleanPodPolicy": "Running"}, master=replica("sleep 60; true"), worker=replica("sleep 60"))
    path = write_manifest(tmp_path, made)
    with ToldJob(path, tmp_path / "run", isolated=False) as job:
        job.start()
        with pytest.raises(UsageError, match="there is no pod 'worker-0'"):
            job.kill("worker-0")
        while len(job.pids()) < 2:
            job.wait(0.05)
        job.kill("demo-worker-0")
        job.wait(0.5)
    deeds = [(deed["what"], deed["node"]) for deed in _deeds(tmp_path / "run")]
    assert deeds.count(("start", "worker-0")) == 2 and ("kill", "worker-0") in deeds and ("start", "master-0") in deeds
    assert "restartPolicy OnFailure: it starts again at once" in capsys.readouterr().out


def _deeds(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "logs" / "story.jsonl").read_text().splitlines()]


def test_waiting_for_a_step_of_a_job_that_ends_says_what_it_said(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, manifest(master=replica("echo hello; exit 3", policy="Never")))
    with ToldJob(path, tmp_path / "run", show=False, isolated=False) as job:
        job.start()
        with pytest.raises(UsageError, match=r"has ended \(Failed\)") as refused:
            job.wait_for(step=0)
        assert job.wait_end() == "Failed"
    assert "hello" in str(refused.value)


# --- what was recorded ----------------------------------------------------------------------------------------------

# In each job's log what gives its flaw away, and what would be there without it.
TELLS = {
    "A": (["stopped as asked", "a new pod takes its place", "Succeeded"], ["resumed from"]),
    "B": (["RendezvousTimeoutError", "backoffLimit"], ["running on", "epoch "]),
    "C": (["delete pod gpt-worker-1", "grace period is over, SIGKILL", "resumed from"], ["stopped as asked"]),
    "D": (["failed (exitcode: -9)", "container ended with exit code 1", "Failed"], ["starts again", "a new pod"]),
}


@pytest.mark.parametrize("letter", FLAWS)
def test_recorded_jobs_give_their_flaws_away(letter: str) -> None:
    said = evidence(read_record(RECORD), letter)
    there, absent = TELLS[letter]
    assert all(word in said for word in there), said
    assert not any(word in said for word in absent), said
    assert n07.flaws.solution.keys() == FLAWS.keys()
    assert not re.search(r"/(tmp|root|work|home)\b", said) and all(len(line) < 160 for line in said.splitlines())


def test_the_recorded_training_beats_its_baseline() -> None:
    training = read_record(RECORD)["training"]
    assert training["held_out"][-1] < training["bigram"] < training["uniform"]
    assert training["steps"] == len(training["held_out"]) * 103 and training["ranks"] == 3 and training["sample"]


def test_a_file_that_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(UsageError, match="record it anew"):
        read_record(tmp_path / "no.json")


def test_what_a_log_is_shortened_to() -> None:
    lines = [
        (0.1, "kubelet  | a: started, process 7"),
        (0.2, "a | frame #0: c10::Error"),
        (0.3, "a | E1130 00:01:31.587000 1 torch/x.py:1002] failed (exitcode: -9) local_rank: 0"),
        (0.4, "a | finished after 103 steps: /some/where/report.json"),
        (0.5, "a | rank 0, after step 29: PeerLost: gone [traceback: /x]"),
    ]
    assert [line for _, line in _shortened(lines)] == [
        "kubelet  | a: started, process 7",
        "a | E failed (exitcode: -9)",
        "a | finished after 103 steps: report.json",
        "a | rank 0, after step 29: PeerLost: gone",
    ]
