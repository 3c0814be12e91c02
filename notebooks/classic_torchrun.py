"""The fault-tolerant Trainer that most tutorials teach, with what they leave out left out here, too.

It runs under torchrun, saves a snapshot after each epoch, and loads it at every start. Notebook 04 breaks it.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from course_lib.engine import RunLog

EPOCHS, SAMPLES, BATCH = 4, 320, 16


class Trainer:
    def __init__(self, model, loader, optimizer, path, log):
        self.rank = int(os.environ["RANK"])
        self.loader, self.optimizer, self.path, self.log = loader, optimizer, path, log
        self.epochs_run = 0
        if path.exists():
            snapshot = torch.load(path)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"rank {self.rank}: resuming from the snapshot at epoch {self.epochs_run}", flush=True)
        self.model = DistributedDataParallel(model)
        print(f"rank {self.rank}: {len(loader)} batches an epoch", flush=True)
        log("snapshot_loaded", step=self.epochs_run * len(loader))

    def save(self, epoch):
        torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch}, self.path)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            losses = [self.step(epoch, i, *batch) for i, batch in enumerate(self.loader)]
            self.log("epoch", epoch=epoch, steps=len(losses), train_loss=sum(losses) / len(losses))
            if self.rank == 0:
                self.save(epoch)
                print(f"rank 0: epoch {epoch} is finished and saved", flush=True)

    def step(self, epoch, i, inputs, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        time.sleep(0.05)  # a larger model would take as long
        return record(self.log, epoch, epoch * len(self.loader) + i, i, loss)


def record(log, epoch, step, i, loss):
    """Not in the tutorials: log the step, with the mean of all ranks' losses, so that the notebook can see it."""
    mean = loss.detach().double()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    size = BATCH * dist.get_world_size()
    log("step", epoch=epoch, step=step, samples=[i * size, (i + 1) * size], loss=float(mean))
    return float(mean)


def main(run_dir):
    dist.init_process_group("gloo")
    log = RunLog(run_dir)
    log.generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log.open()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 20)
    data = TensorDataset(inputs, inputs @ torch.randn(20, 1) + 0.1 * torch.randn(SAMPLES, 1))
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, run_dir / "snapshot.pt", log).train(EPOCHS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
