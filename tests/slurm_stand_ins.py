"""Stand-ins for srun, scancel and scontrol: a job of Slurm on this machine, a node for each address 127.0.0.2, .3, …

They do what train.sbatch counts on, and what it must not do, as the sources of Slurm have it (SchedMD/slurm, August
2026). srun (`src/srun/signals.c`, `_forward_signal`) sends SIGKILL to its tasks when it gets a SIGTERM, and passes a
SIGUSR1 on; it ends with the highest exit code. scancel --signal (`doc/man/man1/scancel.1`) signals the steps, and of
them every process (`src/slurmd/slurmstepd/req.c`), but not the batch script. STAND_INS is a folder: `state` has the
job's state, `step` srun's pid, and `calls` gets a line for each scancel, and for each scontrol that changes something.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

FOLDER = Path(os.environ["STAND_INS"])


def processes() -> list[psutil.Process]:
    """All processes of the step."""
    return psutil.Process(int((FOLDER / "step").read_text())).children(recursive=True)


def signal_step(signum: int) -> None:
    for process in processes():
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def srun(words: list[str]) -> int:
    while words[0].startswith("--"):
        words = words[1:]
    (FOLDER / "step").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: signal_step(signal.SIGKILL))
    signal.signal(signal.SIGUSR1, lambda *_: signal_step(signal.SIGUSR1))
    tasks = []
    for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
        here = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "PET_LOCAL_ADDR": f"127.0.0.{2 + node}"}
        tasks.append(subprocess.Popen(words, env=os.environ | here, start_new_session=True))
    codes = [task.wait() for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(f"127.0.0.{2 + node}" for node in range(int(os.environ["SLURM_JOB_NUM_NODES"]))))
    elif words[:2] == ["show", "job"]:
        print(f"JobId={words[2]} JobName=gpt\n   JobState={(FOLDER / 'state').read_text()} Reason=None")
    else:
        note("scontrol", words)
    return 0


def scancel(words: list[str]) -> int:
    note("scancel", words)
    name = next(word.partition("=")[2] for word in words if word.startswith("--signal="))
    signal_step(signal.Signals[f"SIG{name}"])
    return 0


def note(program: str, words: list[str]) -> None:
    with (FOLDER / "calls").open("a") as file:
        file.write(" ".join([program, *words]) + "\n")


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol, "scancel": scancel}[sys.argv[1]](sys.argv[2:]))
