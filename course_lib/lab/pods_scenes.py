"""Record what notebook 07 has no time for: `python -m course_lib.lab.pods_scenes FILE.json`, some ten minutes.

Four jobs whose manifests have a flaw, as their pods and events tell of it, and the whole training of the nano preset:
eight epochs, with samples of what the model writes. All of it is real: pods on this machine, torchrun, the training.
"""

import argparse
import json
import math
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from course_lib.engine import UsageError, read_events, run
from course_lib.lab.pods_claims import course_text, held_out_losses
from course_lib.lab.pods_job import LIMIT_S, places
from course_lib.lab.pods_manifest import Change, changed
from course_lib.lab.pytorchjob import LocalJob, read_job
from course_lib.workloads.text import bigram_loss

_AGENT = "command: [python, -m, course_lib.engine.launch]"
_LAST = "- --run-dir=/snapshots/gpt"
_CLAIM = "persistentVolumeClaim: {claimName: snapshots}"
ONE_EPOCH: Change = ("--epochs=#", "--epochs=1")
FLAWS: dict[str, tuple[Change, ...]] = {
    "A": ((_CLAIM, "emptyDir: {}"),),
    "B": (('nprocPerNode: "1"', 'nprocPerNode: "2"'), ("--rdzv-id=gpt", "--nnodes=$(WORLD_SIZE)"),
          ("join_timeout=900", "join_timeout=20"), ("backoffLimit: #", "backoffLimit: 2")),
    "C": ((_AGENT, """command: [sh, -c, 'python -m course_lib.engine.launch "$@"; echo done', sh]"""),
          ("PeriodSeconds: #", "PeriodSeconds: 8"), ("--epochs=1", "--epochs=3")),
    "D": ((_AGENT, "command: [torchrun]"), ("restartPolicy: OnFailure", "restartPolicy: ExitCode"),
          ("max-restarts=#", "max-restarts=0"), (_LAST, f"{_LAST}\n{' ' * 16}- --fault=kill:rank=1,step=30")),
}  # fmt: skip
# Of what the pods say; the rest is frames of traces, or the same in every job.
_TELLS = re.compile(
    r"^(running on|resumed from|epoch |finished|stopped as asked|error: |rank \d+,)|failed \(exitcode"
    r"|Received 15|^(\w+\.)+(Rendezvous\w+|ChildFailed)Error"
)
WIDTH = 95  # of a line of a log, beside its time
DELETED = {"A": "gpt-master-0", "C": "gpt-worker-1"}  # after step 45, as when its node is drained


def scene(letter: str, folder: Path) -> dict[str, Any]:
    """Run the job with the flaw; the lines of its pods and events, each with its seconds."""
    manifest = changed(folder / "job.yaml", ONE_EPOCH, *FLAWS[letter])
    lines: list[tuple[float, str]] = []
    began = time.monotonic()
    store = folder / "work" / "volumes" / "snapshots"
    maps = {"/workspace": "."} | ({} if letter == "A" else places(store, "gpt"))

    def say(line: str) -> None:
        lines.append((round(time.monotonic() - began, 1), line))

    with LocalJob(read_job(manifest), folder / "work", maps=maps, backoff_base_s=2.0, say=say) as job:
        job.start()
        pod = DELETED.get(letter)
        if pod is not None:
            runs = folder / "work" / "pods" / pod / "snapshots" / "gpt" if letter == "A" else store
            _until_step(job, runs, 45)
            say(f"kubectl  | delete pod {pod}")
            job.delete(pod)
        job.wait(3 * LIMIT_S)
        ended = str(job.phase)
    return {"flaw": letter, "ended": ended, "lines": _shortened(lines)}


def _until_step(job: LocalJob, folder: Path, step: int) -> None:
    while not any(e["event"] == "step" and e["step"] >= step for e in read_events(folder).events):
        job.wait(0.1)
        if job.done:
            raise UsageError(f"the job ended before step {step}")


def _shortened(lines: Sequence[tuple[float, str]]) -> list[list[Any]]:
    """What tells something: all events, and of the pods what is no frame of a trace and not said of every job."""
    kept: list[list[Any]] = []
    for t, line in lines:
        head, _, text = line.partition(" | ")
        if head.strip() in ("operator", "kubelet", "kubectl") or _TELLS.search(text):
            text = re.sub(r"^([EW])\d{4} \S+ \d+ \S+\]", r"\1", text)  # torch's clock and its source
            text = re.sub(r": /\S+/(\S+)$", r": \1", text).split(" [traceback")[0]
            text = re.sub(r"^(\w+\.)+(?=\w+Error)|(?<=\d\)) local_rank.*| \| train accuracy.*", "", text)
            shown = f"{head} | {text.removesuffix(': ')}"
            kept.append([t, shown if len(shown) <= WIDTH else shown[: WIDTH - 1] + "…"])
    return kept


def training(folder: Path, epochs: int = 8) -> dict[str, Any]:
    """The whole training: the losses, the baseline, and what the model writes at its end."""
    manifest = changed(folder / "job.yaml", ("--epochs=#", f"--epochs={epochs}"))
    store = folder / "run"
    maps = {"/workspace": "."} | places(store, "gpt")
    with LocalJob(read_job(manifest), folder / "work", maps=maps) as job:
        job.start()
        if job.wait(30 * LIMIT_S) != "Succeeded":
            raise UsageError("the training did not succeed")
    return record_of(store)


def record_of(store: Path) -> dict[str, Any]:
    """What the notebook shows of a finished run."""
    text = course_text()
    steps = [e for e in read_events(store).named("step") if e["rank"] == 0]
    return {
        "steps": len(steps),
        "ranks": steps[0]["world_size"],
        "held_out": held_out_losses(store),
        "bigram": bigram_loss(text),
        "uniform": math.log(len(text.vocabulary)),
        "sample": (store / "sample.txt").read_text(encoding="utf-8"),
    }


def read_record(path: Path) -> dict[str, Any]:
    """A record; UsageError when the file is none."""
    try:
        record = dict(json.loads(path.read_text(encoding="utf-8")))
        _ = record["scenes"], record["training"]["held_out"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is no record of notebook 07 ({type(error).__name__}): record it anew") from None
    return record


def evidence(record: Mapping[str, Any], letter: str) -> str:
    """What a pod-by-pod reading of a recorded job sees."""
    found = record["scenes"][letter]
    return f"job {letter}\n" + "\n".join(f"{t:6.1f} s  {line}" for t, line in found["lines"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE.json")
    parser.add_argument("--only", choices=[*FLAWS, "training"], help="record this anew, and keep the rest of the file")
    options = parser.parse_args()
    record = json.loads(options.file.read_text()) if options.only else {"scenes": {}}
    record |= {
        "what": "jobs from manifests, for notebook 07; seconds and nats a character",
        "recorded": f"{time.strftime('%Y-%m-%d')}, on a machine with two CPU cores that other programs used at the "
        "same time; not made by this notebook; the kubelet's back-off begins at 2 s instead of 10",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": "python -m course_lib.lab.pods_scenes notebooks/recorded/pods.json",
    }
    for letter in [options.only] if options.only else [*FLAWS, "training"]:
        with TemporaryDirectory() as folder:
            print(f"recording {letter}", file=sys.stderr)
            if letter == "training":
                record["training"] = training(Path(folder))
            else:
                record["scenes"][letter] = scene(letter, Path(folder))
        options.file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
