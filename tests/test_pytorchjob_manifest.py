"""Manifests that a cluster would refuse, or that could not work: a line with the field's path each, and exit code 2."""

from pathlib import Path

import pytest

from course_lib.lab.pytorchjob import read_job
from course_lib.lab.pytorchjob.__main__ import main
from course_lib.lab.pytorchjob.documents import ManifestError

GOOD = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: demo
spec:
  runPolicy:
    backoffLimit: 3
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: none
              command: [python, train.py]
    Worker:
      replicas: 2
      template:
        spec:
          terminationGracePeriodSeconds: 60
          containers:
            - name: pytorch
              image: none
              command: [python, train.py, "--rank=$(RANK)"]
              env:
                - name: LEVEL
                  value: "1"
              volumeMounts:
                - name: data
                  mountPath: /data
          volumes:
            - name: data
              emptyDir: {}
"""
MASTER = "spec.pytorchReplicaSpecs.Master"
WORKER = "spec.pytorchReplicaSpecs.Worker"
POD = f"{WORKER}.template.spec"
BOX = f"{POD}.containers[0]"
ELASTIC = "  elasticPolicy: {%s}\n  pytorch"
MASTER_TEXT = GOOD[GOOD.index("    Master:") : GOOD.index("    Worker:")]

# (what is replaced, by what, the path that is named, what else the line says)
BROKEN = [
    ("kind: PyTorchJob", "kind: TFJob", "kind", "TFJob"),
    ("kind: PyTorchJob", "kind: PytorchJob", "kind", "PyTorchJob"),
    ("kind: PyTorchJob", "kind: TrainJob", "kind", "v2"),
    ("kind: PyTorchJob\n", "", "kind", "missing"),
    ("kubeflow.org/v1", "kubeflow.org/v1beta1", "apiVersion", "kubeflow.org/v1"),
    ("apiVersion: kubeflow.org/v1\n", "", "apiVersion", "missing"),
    ("metadata:\n  name: demo\n", "", "metadata", "missing"),
    ("  name: demo\n", "  labels: {}\n", "metadata.name", "missing"),
    ("name: demo", "name: My_Job", "metadata.name", "small letters"),
    ("name: demo", "name: 7", "metadata.name", '"7"'),
    ("name: demo", f"name: {'x' * 60}", "metadata.name", "too long"),
    ("spec:\n  runPolicy", "spek:\n  runPolicy", "spek", "did you mean spec"),
    ("pytorchReplicaSpecs:", "pytorchReplicaSpec:", "spec.pytorchReplicaSpec", "did you mean pytorchReplicaSpecs"),
    (GOOD[GOOD.index("    Master:") :], "    {}\n", "spec.pytorchReplicaSpecs", "empty"),
    ("    Master:", "    master:", "spec.pytorchReplicaSpecs.master", "did you mean Master"),
    ("    Worker:", "    Chief:", "spec.pytorchReplicaSpecs.Chief", "no such field"),
    ("    Worker:", "    Master:", "spec.pytorchReplicaSpecs.Master", "twice"),
    ("replicas: 1\n", "replicas: 2\n", f"{MASTER}.replicas", "one master"),
    ("      replicas: 1\n", "", f"{MASTER}.replicas", "has to be 1"),
    ("replicas: 2", "replicas: 0", f"{WORKER}.replicas", "1 or more"),
    ("replicas: 2", "replicas: -1", f"{WORKER}.replicas", "1 or more"),
    ("replicas: 2", 'replicas: "2"', f"{WORKER}.replicas", "whole number"),
    ("replicas: 2", "replicas: 1.5", f"{WORKER}.replicas", "whole number"),
    ("OnFailure", "Sometimes", f"{MASTER}.restartPolicy", "OnFailure"),
    ("OnFailure", "onfailure", f"{MASTER}.restartPolicy", "did you mean OnFailure"),
    ("OnFailure", "[Never]", f"{MASTER}.restartPolicy", "text"),
    ("      restartPolicy:", "      restart_policy:", f"{MASTER}.restart_policy", "did you mean restartPolicy"),
    ("backoffLimit: 3", "backoffLimit: -1", "spec.runPolicy.backoffLimit", "0 or more"),
    ("backoffLimit: 3", "backoffLimits: 3", "spec.runPolicy.backoffLimits", "did you mean backoffLimit"),
    ("backoffLimit: 3", "cleanPodPolicy: Some", "spec.runPolicy.cleanPodPolicy", "All"),
    ("backoffLimit: 3", "activeDeadlineSeconds: 0", "spec.runPolicy.activeDeadlineSeconds", "1 or more"),
    ("backoffLimit: 3", 'suspend: "yes"', "spec.runPolicy.suspend", "true or false"),
    ("  pytorch", "  nprocPerNode: 4\n  pytorch", "spec.nprocPerNode", 'as "4"'),
    ("  pytorch", "  nprocPerNode: four\n  pytorch", "spec.nprocPerNode", "number of processes"),
    ("  pytorch", ELASTIC % "minReplicas: 3, maxReplicas: 2", "spec.elasticPolicy.maxReplicas", "less than"),
    ("  pytorch", ELASTIC % "rdzvBackend: tcp", "spec.elasticPolicy.rdzvBackend", "c10d"),
    ("  pytorch", ELASTIC % "rdzvPort: 99999", "spec.elasticPolicy.rdzvPort", "65535"),
    ("  pytorch", ELASTIC % "rdzvConf: [{key: a, value: 1}]", "spec.elasticPolicy.rdzvConf[0].value", 'as "1"'),
    ("60\n          containers:\n            - name: pytorch", "60\n          containers:\n            - name: main",
     f"{POD}.containers", "pytorch"),
    ("              image: none\n              command: [python, train.py]", "              command: [a]",
     f"{MASTER}.template.spec.containers[0].image", "missing"),
    ("[python, train.py]", "python train.py", f"{MASTER}.template.spec.containers[0].command", "a list"),
    ("train.py]", "train.py, 3]", f"{MASTER}.template.spec.containers[0].command[2]", 'as "3"'),
    ("$(RANK)", "$(RANG)", f"{BOX}.command[2]", "$(RANG) is not defined"),
    ('value: "1"', "value: 1", f"{BOX}.env[0].value", 'as "1"'),
    ('value: "1"', "value: yes", f"{BOX}.env[0].value", "true"),
    ('value: "1"', "value: $(MASTER_ADDR)", f"{BOX}.env[0].value", "use it in command or args"),
    ('value: "1"', "valueFrom: {fieldRef: {}}", f"{BOX}.env[0].valueFrom.fieldRef.fieldPath", "missing"),
    ('value: "1"', "valueFrom: {}", f"{BOX}.env[0].valueFrom", "needs one of"),
    ('value: "1"', "valueFrom: {secretRef: {}}", f"{BOX}.env[0].valueFrom.secretRef", "did you mean secretKeyRef"),
    ('value: "1"', 'value: "1"\n                  valueFrom: {fieldRef: {fieldPath: a}}', f"{BOX}.env[0].valueFrom",
     "beside"),
    ('value: "1"', 'value: "1\\0"', f"{BOX}.env[0].value", "no program can be given: '1\\x00'"),
    ("train.py]", 'train.py, "\\ud800"]', f"{MASTER}.template.spec.containers[0].command[2]", "no program can be"),
    ("  name: demo\n", "  generateName: My_\n", "metadata.generateName", "small letters"),
    ("mountPath: /data", "mountPath: /data\n                  subPath: a\n                  subPathExpr: b",
     f"{BOX}.volumeMounts[0].subPathExpr", "beside"),
    ("name: LEVEL", "nam: LEVEL", f"{BOX}.env[0]", "name"),
    ("name: data\n                  m", "name: d\n                  m", f"{BOX}.volumeMounts[0].name", "no volume"),
    ("mountPath: /data", "mountPath: data", f"{BOX}.volumeMounts[0].mountPath", "absolute"),
    ("emptyDir: {}", "hostPath: {}", f"{POD}.volumes[0].hostPath.path", "missing"),
    ("              emptyDir: {}\n", "", f"{POD}.volumes[0]", "one kind of volume"),
    ("Seconds: 60", "Seconds: -1", f"{POD}.terminationGracePeriodSeconds", "0 or more"),
    ("terminationGrace", "terminationGrase", f"{POD}.terminationGrasePeriodSeconds", "did you mean"),
]  # fmt: skip


# The same of what a cluster takes and this machine has not: only `run` refuses it.
TAKEN = GOOD.replace("train.py", "train")
LIMITS = [
    ("backoffLimit: 3", "suspend: true", "spec.runPolicy.suspend", "set it to false"),
    ("  name: demo\n", "  generateName: demo-\n", "metadata.generateName", "give metadata.name"),
    ("              command: [python, train]\n", "", f"{MASTER}.template.spec.containers[0].command", "missing"),
    ("command: [python, train]", "args: [--epochs=3]", f"{MASTER}.template.spec.containers[0].command", "missing"),
    ('value: "1"', "valueFrom: {secretKeyRef: {name: a, key: b}}", f"{BOX}.env[0].valueFrom", "needs a cluster"),
    ('value: "1"', "valueFrom: {configMapKeyRef: {name: a, key: b}}", f"{BOX}.env[0].valueFrom", "give a value"),
    ('value: "1"', "valueFrom: {fieldRef: {fieldPath: spec.nodeName}}", f"{BOX}.env[0].valueFrom", "spec.nodeName"),
    ("env:", "envFrom: [{secretRef: {name: a}}]\n              env:", f"{BOX}.command[2]", "may come from envFrom"),
    ('value: "1"', "value: $(WEB_SERVICE_HOST)", f"{BOX}.env[0].value", "is of a service"),
    ("mountPath: /data", "mountPath: /data\n                  subPathExpr: x", f"{BOX}.volumeMounts[0].subPathExpr",
     "give a subPath"),
]  # fmt: skip


def refused(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that the command says about a manifest, which it refuses with 2."""
    (folder / "job.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(folder / "job.yaml"), "--workdir", str(folder / "work")])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and not (folder / "work").exists()
    return said.err.splitlines()


def test_the_good_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    job = read_job(tmp_path / "job.yaml")
    assert [pod.name for pod in job.pods] == ["demo-master-0", "demo-worker-0", "demo-worker-1"]
    assert [(r.restart_policy, r.grace_s) for r in job.replicas] == [("OnFailure", 30), ("OnFailure", 60)]


@pytest.mark.parametrize(("old", "new", "path", "words"), BROKEN, ids=[f"{b[2]}-{n}" for n, b in enumerate(BROKEN)])
def test_a_broken_manifest_gets_one_line(
    old: str, new: str, path: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in GOOD
    at = GOOD.rindex(old) if old == "    Worker:" else GOOD.index(old)
    lines = refused(GOOD[:at] + new + GOOD[at + len(old) :], tmp_path, capsys)
    mine = [line for line in lines if path in line]
    assert mine and words in mine[0], lines
    # A field under another name is also missing under its own.
    assert len(lines) == 1 or ("did you mean" in mine[0] or "no such field" in lines[0]) and len(lines) == 2, lines


@pytest.mark.parametrize(("old", "new", "path", "words"), LIMITS, ids=[f"{b[2]}-{n}" for n, b in enumerate(LIMITS)])
def test_what_needs_a_cluster_is_refused_by_run_alone(
    old: str, new: str, path: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in TAKEN
    text = TAKEN.replace("$(RANK)", "$(SECRET)") if "envFrom" in new else TAKEN
    (line,) = refused(text.replace(old, new, 1), tmp_path, capsys)
    assert line.startswith(f"error: {path}: ") and words in line
    for verb, codes in (("env", (0,)), ("lint", (0, 1))):
        with pytest.raises(SystemExit) as ended:
            main([verb, str(tmp_path / "job.yaml")])
        said = capsys.readouterr()
        assert ended.value.code in codes and said.err == "" and said.out


def test_fields_that_nothing_acts_on_are_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        GOOD.replace("mountPath: /data", "mountPath: /data\n                  readOnly: true")
    )
    assert read_job(tmp_path / "job.yaml").ignored[-1] == "readOnly of the mount data"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("---\n# nothing\n---\n", "empty"),
        ("just a text", "single value"),
        ("- kind: PyTorchJob", "list"),
        (GOOD.replace("  runPolicy:", "\trunPolicy:"), "line 6: a tab cannot indent"),
        (GOOD.replace("replicas: 2", "replicas: 2\n      replicas: 3"), "Worker.replicas: is there twice"),
        (GOOD.replace("[python, train.py]", "[python, train.py"), "this is not YAML"),
        (GOOD.replace("emptyDir: {}", "emptyDir: *gone"), "undefined alias"),
        (GOOD.replace("emptyDir: {}", "emptyDir: !!python/object:os.x {}"), "of no use"),
    ],
)
def test_bad_yaml_gets_one_line(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refused(text, tmp_path, capsys)
    assert words in line and "job.yaml" in line


@pytest.mark.parametrize(("name", "words"), [("none.yaml", "No such file"), (".", "directory"), ("bytes", "UTF-8")])
def test_a_file_that_cannot_be_read(name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(tmp_path / name)])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and words.lower() in line.lower()


def test_all_mistakes_are_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        GOOD.replace("replicas: 2", "replicas: 0").replace("image: none", "image: 3").replace("emptyDir", "emptyDirs")
    )
    lines = refused(text, tmp_path, capsys)
    assert len(lines) >= 4 and all(line.startswith("error: spec.pytorchReplicaSpecs.") for line in lines)


def test_a_shells_own_commands_are_no_references(tmp_path: Path) -> None:
    script = '[sh, -c, "echo $(hostname) $(seq 3) $$(RANG)"]'
    (tmp_path / "job.yaml").write_text(GOOD.replace("[python, train.py]", script))
    assert read_job(tmp_path / "job.yaml").replicas[0].container.words[2].startswith("echo $(hostname)")
    for inner in ("$(RANG)", "$(getent hosts $(RANK))"):
        (tmp_path / "job.yaml").write_text(GOOD.replace("[python, train.py]", f'[sh, -c, "echo {inner}"]'))
        with pytest.raises(ManifestError, match=r"command\[2\]: \$\(RAN[GK]\)"):
            read_job(tmp_path / "job.yaml")


def test_other_documents_are_named_and_another_job_can_be_chosen(tmp_path: Path) -> None:
    claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: data\n"
    second = GOOD.replace("name: demo", "name: second")
    (tmp_path / "job.yaml").write_text("\n---\n".join([claim, GOOD, second]))
    first = read_job(tmp_path / "job.yaml")
    assert first.name == "demo"
    assert first.ignored[0] == "other documents: PersistentVolumeClaim data, PyTorchJob second"
    assert read_job(tmp_path / "job.yaml", "second").name == "second"
    with pytest.raises(ManifestError, match="there is demo, second"):
        read_job(tmp_path / "job.yaml", "third")


def test_values_are_those_of_kubernetes_yaml(tmp_path: Path) -> None:
    """Not PyYAML's: there `1:3` is 63, and 2026-01-01 is a date."""
    for value in ("1:3", "2026-01-01", "1e", "0x", "'yes'"):
        (tmp_path / "job.yaml").write_text(GOOD.replace('value: "1"', f"value: {value}"))
        assert read_job(tmp_path / "job.yaml").replicas[1].container.env == (("LEVEL", value.strip("'")),)
