"""The jobs whose snapshots are measured: real training under the engine's Trainer, a step at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from course_lib.engine import RunLog, Trainer, TrainState, World
from course_lib.engine.runlog import Event
from course_lib.engine.step import Step
from course_lib.workloads.data import DataSpec, load
from course_lib.workloads.vision import MOMENTUM, build_model

# Samples a step where nothing else is asked for: a step takes 0.05 to 0.3 s on one thread.
BATCH = {"tiny": 32, "resnet34": 8, "gpt": 2}
WIDTH, LAYERS, VOCABULARY, CONTEXT = 512, 8, 2000, 64  # 27.3 million parameters
NEVER = 10**9


class Gpt(nn.Module):
    """The state of a small GPT: torch's own encoder layers behind a causal mask, from tokens (N, T) to scores."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.tokens(tokens) + self.places[:length], mask=mask, is_causal=True)
        scores: Tensor = self.head(hidden)
        return scores


class Endless(Dataset[Any]):
    """`data` over and over, `length` samples in all, so that one epoch holds every step."""

    def __init__(self, data: Dataset[Any], length: int) -> None:
        self._data = data
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._data[index % len(self._data)]  # type: ignore[arg-type]  # map-style: it has a length


class _Log(RunLog):
    """An event log that also keeps what it was told about snapshots."""

    def __init__(self, run_dir: Path) -> None:
        self.saved: list[Event] = []
        super().__init__(run_dir)

    def __call__(self, event: str, **fields: Any) -> None:
        if event == "snapshot_saved":
            self.saved.append(fields)
        super().__call__(event, **fields)


class Job:
    """A training job of `steps` steps. Only a step that is told so begins with a snapshot of what is there."""

    def __init__(self, name: str, world: World, run_dir: Path, steps: int, batch: int | None = None) -> None:
        size = batch or BATCH[name]
        torch.manual_seed(0)
        model, data, self._loss = _gpt() if name == "gpt" else _images(name)
        model.to(world.device)
        if world.world_size > 1:
            model = DistributedDataParallel(model)
        if name == "gpt":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=MOMENTUM)
        self.state = TrainState(model, optimizer)
        self._log = _Log(run_dir)
        self._trainer = Trainer(
            world,
            self.state,
            Endless(data, steps * size),
            run_dir,
            epochs=1,
            global_batch_size=size,
            snapshot_every=NEVER,
            strict=True,  # what could not be saved must not look fast
            log=self._log,
            say=lambda text: None,
        )
        self._steps = self._trainer.steps()
        self._do(next(self._steps))  # the warm-up, which the Trainer undoes

    @property
    def saved(self) -> list[Event]:
        """What the log says of each snapshot that was published; on rank 0."""
        return self._log.saved

    def step(self, save: bool = False) -> None:
        """End the step before, with a snapshot if `save`, and do one more."""
        self._trainer.snapshot_every = 1 if save else NEVER
        self._do(next(self._steps))

    def finish(self) -> None:
        """Do the steps that are left, and publish the last snapshot."""
        self._trainer.snapshot_every = NEVER
        for step in self._steps:
            self._do(step)

    def close(self) -> None:
        """Leave in the middle."""
        self._steps.close()

    def _do(self, step: Step) -> None:
        self.state.optimizer.zero_grad()
        for batch in step:
            batch.backward(self._loss(self.state.model, batch.data))
        self.state.update()


Loss = Callable[[nn.Module, Any], Tensor]


def _images(name: str) -> tuple[nn.Module, Dataset[Any], Loss]:
    """A residual network of the course on the digits."""
    data = load(DataSpec("digits", None))
    model = build_model(name, "batch", data.shape[0], len(data.classes), seed=0)
    return model, data.train, lambda model, batch: cross_entropy(model(batch[0]), batch[1])


def _gpt() -> tuple[nn.Module, Dataset[Any], Loss]:
    """Random tokens do: what a network reads does not change how its state is saved."""
    tokens = torch.randint(0, VOCABULARY, (256, CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

    return Gpt(), TensorDataset(tokens), loss
