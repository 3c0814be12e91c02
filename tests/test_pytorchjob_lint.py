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
    ("nnodes-differs", "args:\n", "args:\n                - --nnodes=2\n", f"{BOX}.args", "2 of the 3 pods can train"),
    ("nnodes-differs", "args:\n", "args:\n                - --nnodes=2:5\n", f"{BOX}.args", "last_call_timeout"),
    ("nnodes-differs", "args:\n", "args:\n                - --nnodes=4:5\n", f"{BOX}.args", "waits for 4 nodes"),
    ("never", "restartPolicy: OnFailure", "restartPolicy: Never", f"{AT}.restartPolicy", "ends the job"),
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
    ("shell", WHOLE, SHELL % ("bash", " 2>&1 | tee log"), f"{BOX}.command", "does not pass it on"),
    ("shell", WHOLE, SHELL % ("bash", " & wait"), f"{BOX}.command", "does not pass it on"),
    ("shell", WHOLE, SHELL % ("bash", " & p=$!; trap 'kill $p' TERM; wait $p"), f"{BOX}.command", "wait ends with it"),
    ("shell", WHOLE, SHELL % ("bash", "; trap 'kill $p; wait' TERM"), f"{BOX}.command", "does not pass it on"),
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
        ("command: [torchrun]", "command: [torchrun, --nnodes=3]", "nnodes-differs"),
        ("command: [torchrun]", "command: [torchrun, --nnodes=1:3]", "nnodes-halves"),  # the claim is shared
    ],
)
def test_what_is_cured_is_not_found(old: str, new: str, name: str, tmp_path: Path) -> None:
    text = GOOD.replace("OnFailure", "ExitCode").replace('value: "1"', 'value: "0"').replace(": /dev/shm", ": /m")
    assert name not in {trap for trap, _, _ in traps(text.replace(old, new), tmp_path)}


def test_a_shell_that_gives_its_process_away_is_no_trap(tmp_path: Path) -> None:
    waits = " & pid=$!; trap 'kill -TERM $pid; wait $pid' TERM; wait $pid"
    function = " & p=$!; stop() { kill $p; wait $p; }; trap stop TERM; wait $p"
    for shell, script in (
        ("bash", ""),
        ("sh", waits),
        ("bash", waits),
        ("bash", function),
        ("sh", waits.replace("; wait $pid'", "'") + "; wait"),
    ):
        found = traps(GOOD.replace(WHOLE, SHELL % (shell, script)), tmp_path)
        assert "shell" not in {trap for trap, _, _ in found}, script


@pytest.mark.parametrize(
    "command",
    [
        """[sh, -ec, 'exec "$@"', sh, torchrun]""",
        """[sh, -c, 'cd /workspace; exec torchrun "$@" # as process 1', sh]""",
        """[bash, -euo, pipefail, -c, 'echo "$(date; hostname)" && A="b;c" "$@"', bash, torchrun]""",
        """[bash, -lc, "if true; then\\n  exec torchrun $@\\nfi", bash]""",
    ],
)
def test_a_script_that_runs_its_arguments_is_read_with_them(command: str, tmp_path: Path) -> None:
    text = GOOD.replace("command: [torchrun]", f"command: {command}")
    assert traps(text, tmp_path) == []
    assert {trap for trap, _, _ in traps(text.replace("--max-restarts=3", "--nnodes=2"), tmp_path)} == {
        "max-restarts", "nnodes-differs",
    }  # fmt: skip


def test_half_of_the_nodes_is_a_trap_where_nothing_is_shared(tmp_path: Path) -> None:
    """In the command, or in an elasticPolicy, without a Master."""
    text = GOOD.replace("persistentVolumeClaim:\n                claimName: snapshots", "emptyDir: {}")
    master = text[text.index("    Master:") : text.index("      template:")]
    alone = text.replace("    Worker:\n      replicas: 2\n      restartPolicy: OnFailure\n      template: *pod\n", "")
    elastic = alone.replace(master, master.replace("Master", "Worker").replace(": 1", ": 3"))
    elastic = elastic.replace("                - --rdzv-endpoint=$(MASTER_ADDR):$(MASTER_PORT)\n", "")
    for low, most, there in ((1, 3, True), (2, 4, True), (2, 3, False), (3, 3, False)):
        given = text.replace("args:\n", f"args:\n                - --nnodes={low}:{most}\n")
        policy = elastic.replace(
            "  runPolicy:", f"  elasticPolicy: {{minReplicas: {low}, maxReplicas: {most}}}\n  runPolicy:"
        )
        for made, path in ((given, f"{BOX}.args"), (policy, "spec.elasticPolicy.minReplicas")):
            found = {(trap, where) for trap, where, _ in traps(made, tmp_path)}
            assert (("nnodes-halves", path) in found) == there, (low, most, found)


def test_what_is_torchruns_is_not_said_of_others(tmp_path: Path) -> None:
    """Nor what is c10d's, of a static rendezvous; and a pod that is alone waits for nobody."""
    short = GOOD.replace("          terminationGracePeriodSeconds: 60\n", "")
    conf, backend = "                - --rdzv-conf=join_timeout=600,read_timeout=120\n", "--rdzv-backend=c10d"
    assert [trap for trap, _, _ in traps(short, tmp_path)] == ["grace", "grace"]
    plain = short.replace(WHOLE, "command: [python, mnist.py, --num-workers=0, --run-dir=/tmp]\n")
    found = [trap for trap, _, _ in traps(plain.replace(": /dev/shm", ": /memory"), tmp_path)]
    assert found == ["run-dir", "run-dir"]
    (tmp_path / "job.yaml").write_text(GOOD.replace(conf, "").replace(backend, "--node-rank=$(RANK)"))
    static = lint(read_job(tmp_path / "job.yaml"))
    assert {trap.name for trap in static} == {"rendezvous"} and "--rdzv-conf timeout=" in static[0].cure
    one = GOOD.replace(conf, "")
    one = one.replace("    Worker:\n      replicas: 2\n      restartPolicy: OnFailure\n      template: *pod\n", "")
    assert traps(one, tmp_path) == []


def test_what_only_a_cluster_knows_is_no_trap(tmp_path: Path) -> None:
    bare = GOOD.replace("                - --max-restarts=3\n", "")
    bare = bare.replace("                - --rdzv-conf=join_timeout=600,read_timeout=120\n", "")
    given = "envFrom: [{configMapRef: {name: torchrun}}]\n              env:"
    assert {trap for trap, _, _ in traps(bare, tmp_path)} == {"max-restarts", "rendezvous"}
    assert traps(bare.replace("env:", given), tmp_path) == []
