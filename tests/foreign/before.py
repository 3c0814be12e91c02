"""Somebody's own training script: its Dataset, dict batches, two optimizers, gradient clipping, no way to resume."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    """Noisy sines: find the frequency."""

    def __len__(self):
        return 203

    def __getitem__(self, index):
        frequency = 1 + index % 5
        wave = torch.sin(torch.linspace(0, 6.28 * frequency, 32)) + 0.1 * torch.randn(32)
        return {"wave": wave, "frequency": torch.tensor(float(frequency))}


def main():
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.1), nn.ReLU()), nn.Linear(16, 1)
    model = nn.Sequential(body, head)
    fast = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9)
    slow = torch.optim.Adam(body.parameters(), lr=0.001)
    for _ in range(4):
        for batch in DataLoader(Waves(), batch_size=20, shuffle=True):
            fast.zero_grad()
            slow.zero_grad()
            guess = model(batch["wave"]).squeeze(1)
            nn.functional.mse_loss(guess, batch["frequency"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            fast.step()
            slow.step()


if __name__ == "__main__":
    main()
