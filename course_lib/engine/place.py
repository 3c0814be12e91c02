"""Where a process runs: what torchrun, `mp.spawn` or nobody says about it, and the device that follows."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from course_lib.engine.errors import UsageError


@dataclass(frozen=True)
class Place:
    """A process's ranks, and the (host, port) of the store through which it meets its peers; None when alone."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master: tuple[str, int] | None
    serves: bool  # whether this process hosts that store
    under_torchrun: bool = False


def find_place(rank: int | None, world_size: int | None, master: tuple[str, int] | None) -> Place:
    """This process's place: as given, else as torchrun's environment says, else alone."""
    if rank is not None and world_size is not None and master is not None:
        return Place(rank, rank, world_size, world_size, master, serves=False)
    return _from_environment(os.environ)


def _from_environment(env: Mapping[str, str]) -> Place:
    if "LOCAL_RANK" not in env:
        # A pod of a PyTorchJob has WORLD_SIZE: whoever starts a script there by itself did not mean to train alone.
        if (env.get("WORLD_SIZE") or "1") != "1":
            raise UsageError(
                f"WORLD_SIZE={env['WORLD_SIZE']} is set but LOCAL_RANK is not: start the script with torchrun, "
                "or unset WORLD_SIZE and RANK to run it alone"
            )
        return Place(0, 0, 1, 1, None, serves=False)
    try:
        number = {name: int(env[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
        address = env["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise UsageError(f"the environment is not torchrun's ({error}): start the script with torchrun") from None
    agent_serves = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        number["RANK"],
        number["LOCAL_RANK"],
        number["WORLD_SIZE"],
        int(env.get("LOCAL_WORLD_SIZE", "1")),
        (address, number["MASTER_PORT"]),
        serves=not agent_serves and number["RANK"] == 0,
        under_torchrun=True,
    )


def choose_device(wish: str, local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """The device for this rank and the reason; UsageError when `cuda` is asked for and cannot be had."""
    if wish not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device must be auto, cpu or cuda, not {wish!r}")
    gpus = torch.cuda.device_count() if wish != "cpu" else 0
    reason = f"{gpus} GPU{'s' * (gpus != 1)} for {local_world_size} process{'es' * (local_world_size != 1)} here"
    if wish == "cpu" or (wish == "auto" and gpus < local_world_size):
        return torch.device("cpu"), reason
    if gpus < local_world_size:
        raise UsageError(f"--device cuda needs a GPU for each process, but there are {reason}: use --device cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)  # before the group is made, or NCCL puts every rank on GPU 0
    return device, reason


def limit_threads(local_world_size: int) -> None:
    """Share the cores among the processes of a machine, unless the user has decided (torchrun sets 1)."""
    if local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
