"""What the training operator injects into each pod.

The tables are release 1.9's (kubeflow/trainer, tag v1.9.4, commit 4445c12a): `pkg/controller.v1/pytorch/envvar.go`
(setPodEnv: which variables, and when), `master.go` (MASTER_*), `elastic.go` (PET_RDZV_*, PET_NNODES, …), with the
defaults of `pkg/apis/kubeflow.org/v1/pytorch_defaults.go` (nprocPerNode auto, port 23456, min and max replicas).
"""

from pathlib import Path
from typing import Any

import pytest
from pytorchjob_tools import MANIFESTS, job, manifest, replica, write
from torch.distributed.run import get_args_parser

from course_lib.lab.pytorchjob import environment, read_job
from course_lib.lab.pytorchjob.__main__ import main
from course_lib.lab.pytorchjob.injected import resolve

# envvar.go and master.go, for a job with a master: rank -> the whole environment of the text's manifest.
TEXT = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "mingpt-ddp-master-0",
    "PET_MASTER_ADDR": "mingpt-ddp-master-0",
    "WORLD_SIZE": "3",
    "RANK": "{rank}",
    "PET_NODE_RANK": "{rank}",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NNODES": "3",
}
PODS = ("mingpt-ddp-master-0", "mingpt-ddp-worker-0", "mingpt-ddp-worker-1")


def test_the_texts_manifest() -> None:
    found = environment(read_job(MANIFESTS / "mingpt.yaml"))
    assert found == {
        pod: {name: value.format(rank=rank) for name, value in TEXT.items()} for rank, pod in enumerate(PODS)
    }


def test_four_processes_a_node(tmp_path: Path) -> None:
    """WORLD_SIZE counts processes, PET_NNODES counts pods."""
    text = (MANIFESTS / "mingpt.yaml").read_text().replace("spec:\n  pyt", 'spec:\n  nprocPerNode: "4"\n  pyt', 1)
    (tmp_path / "four.yaml").write_text(text)
    found = environment(read_job(tmp_path / "four.yaml"))
    assert [
        {name: pod[name] for name in ("WORLD_SIZE", "RANK", "PET_NPROC_PER_NODE", "PET_NNODES")}
        for pod in found.values()
    ] == [{"WORLD_SIZE": "12", "RANK": str(n), "PET_NPROC_PER_NODE": "4", "PET_NNODES": "3"} for n in range(3)]


WORKERS: dict[str, str] = {  # elastic.go, with the defaults
    "PYTHONUNBUFFERED": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_RDZV_ENDPOINT": "demo-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2:2",
}
FULL = {
    "rdzvBackend": "etcd-v2",
    "rdzvHost": "etcd",
    "rdzvPort": 2379,
    "rdzvId": "text",
    "rdzvConf": [{"key": "join_timeout", "value": "600"}, {"key": "last_call_timeout", "value": "5"}],
    "minReplicas": 1,
    "maxReplicas": 4,
    "maxRestarts": 7,
    "nProcPerNode": 2,
    "standalone": True,
}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, WORKERS),
        ({"maxReplicas": 5}, WORKERS | {"PET_NNODES": "5:5"}),
        ({"minReplicas": 2}, WORKERS | {"PET_NNODES": "2:2"}),
        (
            FULL,
            {
                "PYTHONUNBUFFERED": "1",
                "PET_NPROC_PER_NODE": "2",
                "PET_RDZV_ENDPOINT": "etcd:2379",
                "PET_RDZV_BACKEND": "etcd-v2",
                "PET_NNODES": "1:4",
                "PET_MAX_RESTARTS": "7",
                "PET_RDZV_ID": "text",
                "PET_RDZV_CONF": "join_timeout=600,last_call_timeout=5",
                "PET_STANDALONE": "",
            },
        ),
    ],
)
def test_elastic_workers(policy: dict[str, Any], expected: dict[str, str], tmp_path: Path) -> None:
    """No RANK, no WORLD_SIZE and no MASTER_ADDR without a master."""
    made = job(tmp_path, worker=replica("true", 2, container={"ports": []}), elasticPolicy=policy)
    assert environment(made) == {"demo-worker-0": expected, "demo-worker-1": expected}


def test_an_elastic_job_with_a_master_has_both(tmp_path: Path) -> None:
    made = job(tmp_path, master=replica("true"), worker=replica("true", 2), elasticPolicy={"minReplicas": 1})
    found = environment(made)["demo-worker-1"]
    assert (found["PET_NNODES"], found["WORLD_SIZE"], found["RANK"]) == ("1:1", "3", "2")


def test_workers_alone(tmp_path: Path) -> None:
    made = job(tmp_path, worker=replica("true", 2), nprocPerNode="3")
    expected = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": "3", "PET_NNODES": "2"}
    assert environment(made) == {"demo-worker-0": expected, "demo-worker-1": expected}


def test_the_port_is_the_masters(tmp_path: Path) -> None:
    port = {"ports": [{"name": "other", "containerPort": 1}, {"name": "pytorchjob-port", "containerPort": 4000}]}
    made = job(tmp_path, master=replica("true", container=port), worker=replica("true"))
    assert {pod["MASTER_PORT"] for pod in environment(made).values()} == {"4000"}


def test_a_manifest_cannot_override_the_operator(tmp_path: Path) -> None:
    """The operator appends its variables, and of two with one name the last counts."""
    env = {
        "env": [
            {"name": "WORLD_SIZE", "value": "9"},
            {"name": "MINE", "value": "a"},
            {"name": "TWICE", "value": "$(MINE)$(MINE)"},
        ]
    }
    found = environment(job(tmp_path, master=replica("true", container=env)))["demo-master-0"]
    assert (found["WORLD_SIZE"], found["TWICE"]) == ("1", "aa")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)/$(B)", "1/2"),
        ("$$(A) $$$(A) $$", "$(A) $1 $"),
        ("$(C) $A ${A} $(A", "$(C) $A ${A} $(A"),
        ("$(seq 3)$()", "$(seq 3)$()"),
    ],
)
def test_references(text: str, expected: str) -> None:
    """As in kubernetes/kubernetes, third_party/forked/golang/expansion/expand_test.go."""
    assert resolve(text, {"A": "1", "B": "2"}) == expected


def test_the_command_prints_a_block_for_each_pod(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["env", str(MANIFESTS / "mingpt.yaml")])
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert ended.value.code == 0 and [block.splitlines()[0] for block in blocks] == [f"# {pod}" for pod in PODS]
    lines = blocks[2].splitlines()[1:]
    assert lines == sorted(lines) and "RANK=2" in lines and len(lines) == len(TEXT)


FROM: dict[str, Any] = {
    "env": [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "SPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "RUN", "value": "$(SPACE)-$(POD)-$(IP)"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "wandb"}}},
    ],
    "envFrom": [{"configMapRef": {"name": "settings"}}],
    "args": ["$(HIDDEN)"],
}


def test_what_only_a_cluster_knows_is_said_and_the_rest_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = manifest(master=replica("true", container=FROM), worker=replica("true"))
    made["metadata"] = {"generateName": "demo-", "namespace": "team"}
    file = write(tmp_path, made)
    with pytest.raises(SystemExit) as ended:
        main(["env", str(file)])
    head, master, worker = capsys.readouterr().out.strip().split("\n\n")
    assert ended.value.code == 0 and head == "# xxxxx stands for what the cluster puts behind demo-"
    assert "# only a cluster knows" not in worker
    lines = master.splitlines()
    told = "IP (fieldRef status.podIP), KEY (secretKeyRef wandb), whatever configMapRef settings holds"
    assert lines[:2] == ["# demo-xxxxx-master-0", f"# only a cluster knows {told}"]
    assert {"POD=demo-xxxxx-master-0", "SPACE=team", "RUN=team-demo-xxxxx-master-0-$(IP)"} < set(lines)
    assert not any(line.startswith(("IP=", "KEY=")) for line in lines)


def test_torchrun_reads_what_is_injected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G1: one master, two workers, two processes each are 3 nodes with 6 ranks."""
    made = job(tmp_path, master=replica("true", container={"ports": []}), worker=replica("true", 2), nprocPerNode="2")
    for name, value in environment(made)["demo-worker-1"].items():
        monkeypatch.setenv(name, value)
    options = get_args_parser().parse_args(["train.py"])
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("3", "2", 2)
    assert (options.master_addr, options.master_port, options.max_restarts) == ("demo-master-0", 23456, 0)
    assert environment(made)["demo-worker-1"]["WORLD_SIZE"] == "6"


def test_torchrun_ends_at_the_standalone_of_an_elastic_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """elastic.go gives PET_STANDALONE an empty value, and torch's check_env reads it as a number."""
    monkeypatch.setenv("PET_STANDALONE", "")
    with pytest.raises(ValueError, match="int"):
        get_args_parser()
