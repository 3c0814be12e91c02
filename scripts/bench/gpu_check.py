"""What can only be seen on a GPU: the tests that need one, and what a snapshot, a restart and exactness cost there.

It takes a few minutes and prints a table: exact resumes in each kind of arithmetic, the step time of ResNet-34 with and
without deterministic kernels, short floats and channels-last, how long a snapshot holds training up against a bare
copy into pinned memory, and the time from a kill to the next step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _stall_jobs import Job
from torch.nn.functional import cross_entropy

from course_lib.engine import UsageError, open_world, read_events, run
from course_lib.engine.tree import leaves, map_tensors
from course_lib.lab.launch import start
from course_lib.workloads.precision import autocast, be_deterministic
from course_lib.workloads.vision import build_model

ROOT = Path(__file__).resolve().parents[2]
BATCH = 256
KINDS = {  # amp, deterministic, channels-last
    "float32, any kernels": ("off", False, False),
    "float32": ("off", True, False),
    "float32, channels-last": ("off", True, True),
    "bf16, any kernels": ("bf16", False, True),
    "bf16": ("bf16", True, True),
    "bf16, channels first": ("bf16", True, False),
    "fp16": ("fp16", True, True),
}


def tests() -> dict[str, Any]:
    """Run the tests that need a GPU, and count how they ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(ROOT / "tests/test_gpu.py")]
    done = subprocess.run([*command, "-n", "4"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    lines = done.stdout.splitlines()
    ends = {end: [line for line in lines if line.startswith(end)] for end in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    if done.returncode != 0:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    return {"exit_code": done.returncode} | {end.lower(): len(found) for end, found in ends.items()}


def stepper(kind: str) -> Callable[[], None]:
    """One training step of ResNet-34 on random images, in this kind of arithmetic."""
    amp, deterministic, channels_last = KINDS[kind]
    model = build_model("resnet34", "batch", 3, 10, seed=0).cuda()
    autocast(model, amp, "cuda")
    model.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=amp == "fp16")
    images, labels = torch.randn(BATCH, 3, 32, 32, device="cuda"), torch.arange(BATCH, device="cuda") % 10

    def step() -> None:
        torch.use_deterministic_algorithms(deterministic)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(images), labels)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def step_times(rounds: int = 15, steps: int = 10) -> dict[str, float]:
    """Median milliseconds a step of each kind; all kinds take turns."""
    steppers = {kind: stepper(kind) for kind in KINDS}
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, step in steppers.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            if number > 0:  # the first round chooses kernels
                taken[kind].append(1000 * (time.perf_counter() - started) / steps)
    return {kind: round(statistics.median(times), 2) for kind, times in taken.items()}


def stalls(folder: Path, saves: int = 15) -> dict[str, float]:
    """Median milliseconds for which one snapshot of ResNet-34 with momentum holds training up, in four ways."""
    ways = ("bare copy to pinned", "the course's engine", "to(cpu)", "torch.save")
    taken: dict[str, list[float]] = {way: [] for way in ways}
    with open_world("cuda", say=lambda text: None) as world:
        job = Job("resnet34", world, folder / "run", 200_000, batch=BATCH)
        tensors = [value for _, value in leaves(job.state.state_dict()) if isinstance(value, torch.Tensor)]
        pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]

        def bare() -> None:
            for target, source in zip(pinned, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        def timed(way: str, action: Callable[[], object]) -> None:
            torch.cuda.synchronize()
            started = time.perf_counter()
            action()
            taken[way].append(1000 * (time.perf_counter() - started))

        for number in range(saves + 1):
            _save(job)
            taken["the course's engine"].append(1000 * job.saved[-1]["stall_s"])
            timed("bare copy to pinned", bare)
            timed("to(cpu)", lambda: map_tensors(job.state.state_dict(), lambda tensor: tensor.to("cpu")))
            timed("torch.save", lambda: torch.save(job.state.state_dict(), folder / "saved.pt"))
            if number == 0:
                taken = {way: [] for way in taken}
        job.close()
    megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
    return {way: round(statistics.median(times), 2) for way, times in taken.items()} | {"megabytes": round(megabytes)}


def _save(job: Job) -> None:
    """Three steps, one snapshot, and steps until it is written."""
    count = len(job.saved)
    for _ in range(3):
        job.step()
    job.step(save=True)
    while len(job.saved) == count:
        job.step()


def recoveries(folder: Path, kills: int = 3) -> dict[str, Any]:
    """Seconds from a kill to the next new step, for a job on one GPU under torchrun; and the parts of one restart."""
    seconds: list[float] = []
    for number in range(kills):
        run_dir = folder / f"killed-{number}"
        command = "torchrun --standalone --max-restarts 1 scripts/ddp_torchrun.py --device cuda --epochs 2"
        with start(f"{command} --run-dir {run_dir} --fault kill:step=20", limit_s=300) as job:
            job.wait()
        seconds += json.loads((run_dir / "report.json").read_text())["recovery_seconds"]
    events = [event for event in read_events(run_dir).events if event["generation"] in (None, 2)]
    last = [event for event in events if event["event"] in ("process_start", "imported", "group_ready", "step")]
    started = max(event["t"] for event in last if event["event"] == "process_start")
    marks = {e["event"]: round(e["t"] - started, 2) for e in reversed(last) if e["t"] >= started}
    return {"seconds": [round(value, 2) for value in seconds], "after_process_start": marks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UsageError("there is no GPU that torch can use: run this where there is one")
    be_deterministic()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "batch": BATCH}
    print(f"{results['gpu']}, torch {results['torch']}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
        parts: dict[str, Callable[[], Any]] = {
            "tests": tests,
            "recovery": lambda: recoveries(Path(directory)),
            "step_ms": step_times,
            "stall_ms": lambda: stalls(Path(directory)),
        }
        for name, part in parts.items():
            results[name] = part()
            print(f"{name}:", flush=True)
            for key, value in results[name].items():
                print(f"  {key:26} {value}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    if results["tests"]["exit_code"] != 0:
        sys.exit("not all tests that need a GPU passed, see above")


if __name__ == "__main__":
    run(main)
