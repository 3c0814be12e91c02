"""Tables for notebook 07: what the operator injects, and the same job in three files."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from course_lib.engine import UsageError
from course_lib.lab.pytorchjob import PyTorchJob, environment

CLUSTER = Path("scripts/cluster")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest word, two blanks apart."""
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def environments(job: PyTorchJob) -> str:
    """A row for each variable, a column for each pod."""
    pods = environment(job)
    names = sorted({name for variables in pods.values() for name in variables})
    rows = [[name, *(variables.get(name, "") for variables in pods.values())] for name in names]
    return table(["", *pods], rows)


def three_ways(folder: Path = CLUSTER) -> str:
    """What replaces what, in Markdown, from the three files in `folder`. Raises UsageError for one that lacks it."""
    try:
        columns = [_pytorchjob(folder), _trainjob(folder), _slurm(folder)]
    except (KeyError, TypeError, IndexError, StopIteration) as error:
        raise UsageError(f"the files in {folder} are not those that this table is of: {error!r}") from None
    rows = [" | ".join([what, *(_as_code(column[what]) for column in columns)]) for what in columns[0]]
    return "\n".join(["| | PyTorchJob | TrainJob | Slurm |", "|:--|:--|:--|:--|", *(f"| {row} |" for row in rows)])


def _as_code(words: str) -> str:
    """What stands so in a file as code; Markdown would take two dollars for a formula."""
    return f"`{words}`" if set(words) & set("$:=") else words


def _documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def _option(args: Sequence[str], name: str) -> str:
    return next(word for word in args if word.startswith(name)).partition("=")[2]


def _pytorchjob(folder: Path) -> Mapping[str, str]:
    spec = _documents(folder / "pytorchjob.yaml")[0]["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    pod = replicas["Master"]["template"]["spec"]
    args = pod["containers"][0]["args"]
    return {
        "nodes": f"replicas: {replicas['Master']['replicas']} + {replicas['Worker']['replicas']}",
        "processes a node": f"nprocPerNode: {spec['nprocPerNode']!r}",
        "rendezvous": _option(args, "--rdzv-endpoint"),
        "the store is with": "the Master's agent",
        "restarts of workers": f"--max-restarts={_option(args, '--max-restarts')}",
        "of pods or jobs": f"restartPolicy: {replicas['Master']['restartPolicy']}",
        "how often": f"backoffLimit: {spec['runPolicy']['backoffLimit']}",
        "notice of the end": f"SIGTERM, {pod['terminationGracePeriodSeconds']} s",
        "snapshots": f"claim {pod['volumes'][0]['persistentVolumeClaim']['claimName']}",
    }


def _trainjob(folder: Path) -> Mapping[str, str]:
    found = {document["kind"]: document["spec"] for document in _documents(folder / "trainjob.yaml")}
    trainer = found["TrainJob"]["trainer"]
    job = found["TrainingRuntime"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    return {
        "nodes": f"numNodes: {trainer['numNodes']}",
        "processes a node": f"numProcPerNode: {trainer['numProcPerNode']}",
        "rendezvous": _option(trainer["args"], "--rdzv-endpoint"),
        "the store is with": "node 0's agent",
        "restarts of workers": f"--max-restarts={_option(trainer['args'], '--max-restarts')}",
        "of pods or jobs": f"{len(job['podFailurePolicy']['rules'])} rules by exit code",
        "how often": f"backoffLimit: {job['backoffLimit']}",
        "notice of the end": f"SIGTERM, {pod['terminationGracePeriodSeconds']} s",
        "snapshots": f"claim {pod['volumes'][0]['persistentVolumeClaim']['claimName']}",
    }


def _slurm(folder: Path) -> Mapping[str, str]:
    text = (folder / "train.sbatch").read_text(encoding="utf-8")

    def asked(name: str) -> str:
        found = re.search(rf"^#SBATCH --{name}=?(\S*)$", text, re.MULTILINE)
        if found is None:
            raise KeyError(f"#SBATCH --{name} in train.sbatch")
        return found[1]

    launch = re.search(r"--max-restarts=(\d+)", text)
    if launch is None or "scontrol requeue" not in text or "$first:$port" not in text:
        raise KeyError("--max-restarts, $first:$port or scontrol requeue in train.sbatch")
    asked("requeue")
    return {
        "nodes": f"--nodes={asked('nodes')}",
        "processes a node": "$SLURM_GPUS_ON_NODE, or 1",
        "rendezvous": "$first:$port",
        "the store is with": "the first node's agent",
        "restarts of workers": f"--max-restarts={launch[1]}",
        "of pods or jobs": "scontrol requeue, after 143",
        "how often": "as long as it ends with 143",
        "notice of the end": f"--signal={asked('signal')}",
        "snapshots": "runs/, on a shared disk",
    }
