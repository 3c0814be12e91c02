"""Sharpen a map of mountains: from the mean of each block of 4 x 4 heights back to its sixteen heights."""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import avg_pool2d, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Terrain(Dataset):
    """Squares of the elevation map that matplotlib carries, in units of 100 m around their mean."""

    def __init__(self):
        path = Path(matplotlib.get_data_path(), "sample_data", "jacksboro_fault_dem.npz")
        self.heights = torch.tensor(np.load(path)["elevation"]) / 100
        self.corners = [(y, x) for y in range(0, 312, 16) for x in range(0, 371, 16)]

    def __len__(self):
        return len(self.corners)

    def __getitem__(self, i):
        y, x = self.corners[i]
        fine = self.heights[None, y : y + 32, x : x + 32]
        fine = fine.flip(2) if torch.rand(()) < 0.5 else fine  # now and then the mirror image
        fine = fine - fine.mean()
        return {"coarse": avg_pool2d(fine, 4), "fine": fine}


def main(epochs, run_dir):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Terrain()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Conv2d(32, 16, 3, padding=1), nn.PixelShuffle(4)))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = mse_loss(model(batch["coarse"]), batch["fine"])
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model.module)
        print(f"rank {dist.get_rank()}: epoch {epoch}, loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        torch.save(average.module.state_dict(), run_dir / "terrain.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/terrain"))
    options = parser.parse_args()
    main(options.epochs, options.run_dir)
