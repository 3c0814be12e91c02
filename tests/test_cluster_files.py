"""The manifests of scripts/cluster: what a cluster's API takes, what torchrun makes of them, and a job that is run."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from helpers import REPO
from jobs import losses, report
from kubeflow.training import ApiClient
from kubeflow_trainer_api import models as trainer
from pytorchjob_tools import at_free_port
from torch.distributed.run import parse_args

from course_lib.engine import read_events
from course_lib.lab.pytorchjob import LocalJob, PyTorchJob, environment, lint, read_job
from course_lib.lab.pytorchjob.injected import resolve

CLUSTER = REPO / "scripts" / "cluster"
FIXED, ELASTIC, TRAINJOB = (CLUSTER / f"{name}.yaml" for name in ("pytorchjob", "pytorchjob-elastic", "trainjob"))
LIMIT_S = 280.0  # a bound on hanging


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """kind -> document."""
    return {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}


# --- what the API takes: the models drop what they do not know --------------------------------------------------------


def through_v1(document: Mapping[str, Any], model: str) -> Any:
    """The document as the client of the training operator (1.9), or of Kubernetes, reads and sends it."""
    client = ApiClient()
    found = client.deserialize(SimpleNamespace(data=json.dumps(document)), model)
    return client.sanitize_for_serialization(found)


def through_v2(document: Mapping[str, Any]) -> Any:
    model = getattr(trainer, f"TrainerV1alpha1{document['kind']}")
    return model.from_dict(document).to_dict()


@pytest.mark.parametrize("path", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_the_training_operator_knows_all_fields(path: Path) -> None:
    document = documents(path)["PyTorchJob"]
    assert through_v1(document, "KubeflowOrgV1PyTorchJob") == document
    spec = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    spec["terminationGracePeriod"] = spec.pop("terminationGracePeriodSeconds")
    assert through_v1(document, "KubeflowOrgV1PyTorchJob") != document  # so the comparison can fail


def test_trainer_knows_all_fields() -> None:
    found = documents(TRAINJOB)
    assert set(found) == {"TrainingRuntime", "TrainJob"}
    for document in found.values():
        assert through_v2(document) == document
    found["TrainJob"]["spec"]["podTemplateOverrides"] = []  # the name that it had in 2.1
    assert through_v2(found["TrainJob"]) != found["TrainJob"]


def test_the_claim_is_one_and_all_pods_mount_it() -> None:
    claim = documents(CLUSTER / "snapshots.yaml")["PersistentVolumeClaim"]
    assert through_v1(claim, "V1PersistentVolumeClaim") == claim and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for _, spec in pods():
        [volume] = [v for v in spec["volumes"] if "persistentVolumeClaim" in v]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


# --- what torchrun makes of it ----------------------------------------------------------------------------------------


def parsed(words: list[str], variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torchrun's own parser makes of a container's words, in the environment of its pod."""
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PET_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        resolved = [resolve(word, variables) for word in words]
        assert resolved[:3] == ["python", "-m", "course_lib.engine.launch"]
        return parse_args(resolved[3:])  # type: ignore[no-untyped-call]


def agents(job: PyTorchJob, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """pod -> torchrun's arguments."""
    words = {r.kind: list(r.container.words) for r in job.replicas}
    found = environment(job)
    return {pod.name: parsed(words[pod.kind], found[pod.name], monkeypatch) for pod in job.pods}


def rdzv(args: Any) -> tuple[str, str, str]:
    return args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id


@pytest.mark.parametrize("processes", ["1", "2", "4"])
def test_a_fixed_job_has_three_nodes_however_many_processes(
    processes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: WORLD_SIZE is 3, 6 or 12; the number of nodes is 3."""
    (tmp_path / "job.yaml").write_text(FIXED.read_text().replace('nprocPerNode: "1"', f'nprocPerNode: "{processes}"'))
    job = read_job(tmp_path / "job.yaml")
    assert {env["WORLD_SIZE"] for env in environment(job).values()} == {str(3 * int(processes))}
    found = agents(job, monkeypatch)
    assert list(found) == ["gpt-master-0", "gpt-worker-0", "gpt-worker-1"]
    for number, args in enumerate(found.values()):
        assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("3", processes, number)
        assert rdzv(args) == ("c10d", "gpt-master-0:23456", "gpt") and not args.standalone
        assert args.max_restarts == 3


def test_an_elastic_job_has_two_or_three_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = agents(read_job(ELASTIC), monkeypatch)
    assert list(found) == ["gpt-elastic-worker-0", "gpt-elastic-worker-1", "gpt-elastic-worker-2"]
    for args in found.values():
        assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2:3", "1", 3)
        assert rdzv(args) == ("c10d", "gpt-elastic-worker-0:23456", "gpt-elastic")


def trainjob_environment(job: Mapping[str, Any], node: int) -> dict[str, str]:
    """What Trainer v2 gives a node: kubeflow/trainer, release-2.3, `pkg/runtime/framework/plugins/torch/torch.go`.

    The names and the port, 29500, are in `pkg/constants/constants.go`.
    """
    name, given = job["metadata"]["name"], job["spec"]["trainer"]
    own = {entry["name"]: entry["value"] for entry in given["env"]}
    return own | {
        "PET_NNODES": str(given["numNodes"]),
        "PET_NPROC_PER_NODE": str(given["numProcPerNode"]),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_a_trainjob_has_three_nodes(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = documents(TRAINJOB)["TrainJob"]
    job["spec"]["trainer"]["numProcPerNode"] = processes
    for node in range(3):
        words = job["spec"]["trainer"]["command"] + job["spec"]["trainer"]["args"]
        args = parsed(words, trainjob_environment(job, node), monkeypatch)
        assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("3", str(processes), 3)
        assert rdzv(args) == ("c10d", "gpt-v2-node-0-0.gpt-v2:29500", "gpt-v2")


def test_all_wait_equally_long_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """G5: with other timeouts on one pod, it gives up while the others still wait."""
    found = {args.rdzv_conf for path in (FIXED, ELASTIC) for args in agents(read_job(path), monkeypatch).values()}
    job = documents(TRAINJOB)["TrainJob"]
    found |= {word.removeprefix("--rdzv-conf=") for word in job["spec"]["trainer"]["args"] if "--rdzv-conf" in word}
    found |= set(re.findall(r"--rdzv-conf=(\S+)", (CLUSTER / "train.sbatch").read_text()))
    assert found == {"join_timeout=900,last_call_timeout=10,read_timeout=300"}


# --- what the pods are ------------------------------------------------------------------------------------------------


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """(which, pod) of all manifests; the TrainJob's words and variables are put into its runtime's pod."""
    for path in (FIXED, ELASTIC):
        for kind, replica in documents(path)["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].items():
            yield f"{path.stem} {kind}", replica["template"]["spec"]
    found = documents(TRAINJOB)
    [replicated] = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]["template"]["spec"]
    spec["containers"][0] |= {name: found["TrainJob"]["spec"]["trainer"][name] for name in ("command", "args", "env")}
    yield "trainjob", spec


@pytest.mark.parametrize("path", [FIXED, ELASTIC], ids=["fixed", "elastic"])
def test_the_linter_finds_no_trap(path: Path) -> None:
    assert lint(read_job(path)) == []


@pytest.mark.parametrize(("which", "spec"), list(pods()), ids=[which for which, _ in pods()])
def test_a_pod_stops_in_order_and_has_memory(which: str, spec: dict[str, Any]) -> None:
    """G7, for the TrainJob too, which the linter does not read."""
    [container] = spec["containers"]
    assert container["name"] == ("node" if which == "trainjob" else "pytorch")
    assert container["command"] == ["python", "-m", "course_lib.engine.launch"]  # and no shell
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert spec["terminationGracePeriodSeconds"] >= 60
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    [run_dir] = [word.partition("=")[2] for word in container["args"] if word.startswith("--run-dir=")]
    assert run_dir.startswith("/snapshots/") and "persistentVolumeClaim" in volumes[mounts["/snapshots"]]
    user = re.search(r"^USER (\d+)$", (CLUSTER / "Dockerfile").read_text(), re.M)
    assert user is not None and spec["securityContext"]["runAsUser"] == int(user[1])


def test_a_trainjob_takes_bad_input_for_final_and_a_preemption_for_none() -> None:
    found = documents(TRAINJOB)
    runtime, job = found["TrainingRuntime"], found["TrainJob"]
    assert job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"  # and not the cluster's
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["name"] == "node" and replicated["template"]["metadata"]["labels"] == label
    spec = replicated["template"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # the API refuses a podFailurePolicy without it
    codes = {r["action"]: r["onExitCodes"]["values"] for r in spec["podFailurePolicy"]["rules"] if "onExitCodes" in r}
    assert codes == {"FailJob": [2], "Ignore": [143]} and spec["backoffLimit"] > 0


# --- training ---------------------------------------------------------------------------------------------------------


def train(folder: Path, kill_at: int | None = None) -> tuple[Path, list[str], dict[str, int]]:
    """(run directory, lines, restarts) of the fixed job as it stands, but for its length; one pod is killed."""
    text = FIXED.read_text()
    assert "--epochs=4" in text
    folder.mkdir()
    (folder / "job.yaml").write_text(text.replace("--epochs=4", "--epochs=1"))
    lines: list[str] = []
    run = folder / "work" / "volumes" / "snapshots" / "gpt"
    made = at_free_port(read_job(folder / "job.yaml"))
    with LocalJob(made, folder / "work", say=lines.append) as job:
        job.start()
        while kill_at is not None and not any(e["step"] >= kill_at for e in read_events(run).named("step")):
            job.wait(0.1)
            assert not job.done, "\n".join(lines)
        if kill_at is not None:
            job.kill("gpt-worker-1")
        assert job.wait(LIMIT_S) == "Succeeded", "\n".join(lines)
        assert job.conditions.history == ["Created", "Running", "Succeeded"]
        restarts = {pod.name: job.restarts(pod.name) for pod in made.pods}
    return run, lines, restarts


@pytest.mark.timeout(600)
def test_three_pods_train_and_a_killed_one_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)  # where the image has its working directory
    undisturbed, lines, _ = train(tmp_path / "a")
    expected = report(undisturbed)
    assert (expected["world_sizes"], expected["generations"]) == ([3], 1) and expected["steps"] > 100
    assert any(line.endswith("sample.txt") for line in lines) and list((undisturbed / "snapshots").glob("*.pt"))

    run, _, restarts = train(tmp_path / "b", kill_at=30)
    mine = report(run)
    assert restarts == {"gpt-master-0": 0, "gpt-worker-0": 0, "gpt-worker-1": 1}
    for name in ("steps", "weights_sha256", "optimizer_sha256", "test_accuracy"):
        assert mine[name] == expected[name], name
    assert losses(run) == losses(undisturbed) and mine["generations"] == 2
    assert (run / "sample.txt").read_bytes() == (undisturbed / "sample.txt").read_bytes()
