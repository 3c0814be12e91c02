"""The linter: the text's manifest has the traps that it is known for, a good one has none, and each is found alone."""

from pathlib import Path

import pytest
from pytorchjob_tools import MANIFESTS

from course_lib.lab.pytorchjob import lint, read_job
from course_lib.lab.pytorchjob.__main__ import main

GOOD = (MANIFESTS / "digits.yaml").read_text()
AT = "spec.pytorchReplicaSpecs.Master"
BOX = f"{AT}.template.spec.containers[0]"
ELASTIC = "spec:\n  elasticPolicy: {%s}\n  nproc"
SHELL = 'command: [%s, -c, "torchrun --max-restarts=3 --rdzv-conf=read_timeout=9 train.py%s"]\n              args: []\n'
WHOLE = GOOD[GOOD.index("command:") : GOOD.index("              env:")]

# (the trap, what is replaced in the good manifest, by what, the path that is named, what the line says)
TRAPS = [
    ("nnodes-world-size", "args:\n", "args:\n                - --nnodes=$(WORLD_SIZE)\n", f"{BOX}.args", "WORLD_SIZE"),
    ("nproc-auto", '  nprocPerNode: "1"\n', "", "spec.nprocPerNode", "auto"),
    ("nproc-differs", "args:\n", "args:\n                - --nproc_per_node=2\n", f"{BOX}.args", "another number"),
    ("max-restarts", "                - --max-restarts=3\n", "", f"{BOX}.args", "restarts nothing"),
    ("exit-code", "restartPolicy: OnFailure", "restartPolicy: ExitCode", f"{AT}.restartPolicy", "from 128 on"),
    ("always", "restartPolicy: OnFailure", "restartPolicy: Always", f"{AT}.restartPolicy", "never succeeds"),
    ("backoff-exit-code", "OnFailure", "ExitCode", "spec.runPolicy.backoffLimit", "bounds"),
    ("backoff-first", "backoffLimit: 6", "backoffLimit: 1", "spec.runPolicy.backoffLimit", "first restart"),
    ("no-shared-volume", "persistentVolumeClaim:\n                claimName: snapshots", "emptyDir: {}",
     f"{BOX}.volumeMounts", "emptyDir: a pod that is made anew"),
    ("run-dir", "--run-dir=/snapshots/run", "--run-dir=/snapshot/run", f"{BOX}.volumeMounts", "/snapshot/run"),
    ("shm", "mountPath: /dev/shm", "mountPath: /memory", f"{BOX}.volumeMounts", "64 MB"),
    ("grace", "terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 30",
     f"{AT}.template.spec.terminationGracePeriodSeconds", "30 s"),
    ("standalone", "args:\n", "args:\n                - --standalone\n", f"{BOX}.args", "alone"),
    ("standalone", "spec:\n  nproc", ELASTIC % "standalone: true", "spec.elasticPolicy.standalone", "PET_STANDALONE"),
    ("elastic-master", "spec:\n  nproc", ELASTIC % "minReplicas: 2", "spec.elasticPolicy", "workers only"),
    ("elastic-size", "spec:\n  nproc", ELASTIC % "maxReplicas: 1", "spec.elasticPolicy.maxReplicas", "2 workers"),
    ("rendezvous", "                - --rdzv-conf=join_timeout=600,read_timeout=120\n", "", f"{BOX}.args", "200 s"),
    ("clean-pod-policy", "    cleanPodPolicy: Running\n", "", "spec.runPolicy.cleanPodPolicy", "GPUs"),
    ("clean-pod-policy", "cleanPodPolicy: Running", "cleanPodPolicy: None", "spec.runPolicy.cleanPodPolicy", "GPUs"),
    ("shared-store", 'value: "1"', 'value: "0"', f"{BOX}.env", "dead one"),
    ("shell", WHOLE, SHELL % ("bash", "; true"), f"{BOX}.command", "process 1"),
    ("shell", WHOLE, SHELL % ("sh", ""), f"{BOX}.command", "process 1"),
]  # fmt: skip


def traps(text: str, folder: Path) -> list[tuple[str, str, str]]:
    (folder / "job.yaml").write_text(text)
    return [(trap.name, trap.path, trap.why) for trap in lint(read_job(folder / "job.yaml"))]


def test_a_good_manifest_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(MANIFESTS / "digits.yaml")])
    assert ended.value.code == 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "old", "new", "path", "words"), TRAPS, ids=[f"{t[0]}-{n}" for n, t in enumerate(TRAPS)]
)
def test_each_trap_is_found(name: str, old: str, new: str, path: str, words: str, tmp_path: Path) -> None:
    assert old in GOOD
    found = traps(GOOD.replace(old, new), tmp_path)
    assert any(trap == name and where == path and words in why for trap, where, why in found), found
    # The pods share their template, so that what is wrong with one is wrong with both; little else is.
    assert len({trap for trap, _, _ in found}) <= 2, found


def test_the_texts_manifest_has_its_traps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {trap.name for trap in lint(read_job(MANIFESTS / "mingpt.yaml"))}
    assert found == {
        "clean-pod-policy", "grace", "max-restarts", "nnodes-world-size", "no-shared-volume", "rendezvous",
        "shared-store", "shm",
    }  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(MANIFESTS / "mingpt.yaml")])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and len(lines) % 2 == 0
    assert all(line.startswith("spec.") for line in lines[::2])
    assert all(line.startswith("    cure: ") for line in lines[1::2])


def test_with_four_processes_world_size_is_plainly_wrong(tmp_path: Path) -> None:
    text = (MANIFESTS / "mingpt.yaml").read_text().replace("spec:\n  pyt", 'spec:\n  nprocPerNode: "4"\n  pyt', 1)
    assert any("waits for 12 nodes, and there are 3" in why for _, _, why in traps(text, tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("command: [torchrun]", "command: [python, -m, course_lib.engine.launch]", "exit-code"),
        ("command: [torchrun]", "command: [python, -m, course_lib.engine.launch]", "shared-store"),
        ("- --data=digits", "- --num-workers=0", "shm"),
        ("terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 31", "grace"),
    ],
)
def test_what_is_cured_is_not_found(old: str, new: str, name: str, tmp_path: Path) -> None:
    text = GOOD.replace("OnFailure", "ExitCode").replace('value: "1"', 'value: "0"').replace(": /dev/shm", ": /m")
    assert name not in {trap for trap, _, _ in traps(text.replace(old, new), tmp_path)}


def test_a_shell_that_gives_its_process_away_is_no_trap(tmp_path: Path) -> None:
    for shell, script in (("bash", ""), ("sh", "; exec torchrun again.py")):
        found = traps(GOOD.replace(WHOLE, SHELL % (shell, script)), tmp_path)
        assert "shell" not in {trap for trap, _, _ in found}
