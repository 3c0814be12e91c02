"""The tutorials' fault-tolerant script, for comparison: torch alone, a snapshot after each epoch, no more.

It does what they do: load the snapshot if there is one, wrap the model, train epoch after epoch, save from
rank 0. What they have no need of is one line a step with the time, the attempt and the rank.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    """Random inputs and targets, as many as the tutorials have."""

    def __init__(self, size: int) -> None:
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data[index]


class Trainer:
    def __init__(self, model: torch.nn.Module, data: DataLoader, optimizer: torch.optim.Optimizer, path: Path) -> None:
        self.data, self.optimizer, self.path = data, optimizer, path
        self.epochs_run = 0
        if path.exists():
            snapshot = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DistributedDataParallel(model)

    def train(self, epochs: int, log: Path) -> None:
        attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
        with log.open("a", buffering=1) as lines:
            for epoch in range(self.epochs_run, epochs):
                self.data.sampler.set_epoch(epoch)
                for source, targets in self.data:
                    self.optimizer.zero_grad()
                    F.cross_entropy(self.model(source), targets).backward()
                    self.optimizer.step()
                    lines.write(f"{time.time()} {attempt} {rank}\n")
                    time.sleep(0.02)  # or it would be over before it can be killed
                if rank == "0":
                    # The number of the epoch that is done, as published: it will be done again.
                    state = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}
                    torch.save(state, self.path)


def main(epochs: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    data = Numbers(2048)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, shuffle=False, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, folder / "snapshot.pt").train(epochs, folder / f"steps-{os.getpid()}.txt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
