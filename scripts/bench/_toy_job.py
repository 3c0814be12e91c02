"""The toy of the torchrun tutorial, written anew: as it is published, in variants, and on this engine.

`total_epochs` and `save_every` are the published command's two numbers. Without options it does what the tutorial's
script does (PyTorch, "Fault-tolerant Distributed Training with torchrun", 2022,
https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html; its code is multigpu_torchrun.py in
pytorch/examples, distributed/ddp-tutorial-series), but on gloo. Beside that there are only the lines that keep a
record, the kill, and a barrier before the end.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _classic_job import Numbers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from course_lib.engine import RunLog, Trainer, TrainState, open_world, run
from course_lib.engine.report import write_report
from course_lib.engine.tree import digest
from course_lib.lab.faults import Injector, parse

SAMPLES, BATCH = 2048, 32  # the batch is one rank's
LOSSES = {"cross_entropy": functional.cross_entropy, "mse": functional.mse_loss}


def toy(options: argparse.Namespace, log: RunLog) -> tuple[Numbers, nn.Module, torch.optim.Optimizer]:
    """Data, model and optimizer. Without a seed each process draws its own, and others after a restart."""
    if options.seed is not None:
        torch.manual_seed(options.seed)
    data = Numbers(SAMPLES)
    model = nn.Linear(20, 1)
    log("drawn", data=digest(data.data), weights=digest(model.state_dict()))
    return data, model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=options.momentum)


class Classic:
    """The tutorial's Trainer: weights and a number of epochs in one file that is written over."""

    def __init__(self, options: argparse.Namespace, log: RunLog, data: Numbers, model: nn.Module) -> None:
        self.options, self.log, self.rank = options, log, int(os.environ["RANK"])
        self.loader = DataLoader(data, BATCH, shuffle=False, sampler=DistributedSampler(data))
        self.path: Path = options.run_dir / "snapshot.pt"
        self.epochs_run = 0
        if self.path.exists():
            snapshot = torch.load(self.path, map_location="cpu", weights_only=True)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DistributedDataParallel(model)
        log("snapshot_loaded", step=self.epochs_run * len(self.loader))

    def train(self, optimizer: torch.optim.Optimizer, injector: Injector) -> None:
        for epoch in range(self.epochs_run, self.options.total_epochs):
            self.loader.sampler.set_epoch(epoch)
            for step, (source, targets) in enumerate(self.loader, start=epoch * len(self.loader)):
                injector("data", step)
                optimizer.zero_grad()
                loss = LOSSES[self.options.loss](self.model(source), targets)
                loss.backward()
                optimizer.step()
                self.log("step", step=step, epoch=epoch, loss=loss.item())
            if self.rank == 0 and epoch % self.options.save_every == 0:
                self.save(epoch)

    def save(self, epoch: int) -> None:
        """The published script saves the number of the epoch that is done, and so it is done again."""
        epochs_run = epoch + self.options.count_finished
        torch.save({"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epochs_run}, self.path)
        self.log("snapshot_saved", step=(epoch + 1) * len(self.loader))


def classic(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    log = RunLog(options.run_dir)
    log.generation = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    log.open()
    data, model, optimizer = toy(options, log)
    trainer = Classic(options, log, data, model)
    injector = Injector(parse(options.fault), options.run_dir, log.rank, log.world_size, log)
    injector.attach(trainer.model, optimizer)
    trainer.train(optimizer, injector)
    log("finish", step=options.total_epochs * len(trainer.loader))
    dist.barrier()  # all ranks' events are there; and without it, one such end in ten aborts
    if log.rank == 0:
        state = TrainState(model, optimizer)  # for its digests
        digests = {"weights_sha256": state.weights_digest(), "optimizer_sha256": state.optimizer_digest()}
        write_report(options.run_dir, {"epochs": options.total_epochs, **digests})
    dist.destroy_process_group()


def on_engine(options: argparse.Namespace) -> None:
    """The same data, model, optimizer, batch and epochs; a snapshot after as many steps as `save_every` epochs have."""
    log = RunLog(options.run_dir)
    with open_world("cpu") as world:
        data, bare, optimizer = toy(options, log)
        model = DistributedDataParallel(bare)
        injector = Injector(parse(options.fault), options.run_dir, world.rank, world.world_size, log)
        injector.attach(model, optimizer)

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            return LOSSES[options.loss](model(batch[0]), batch[1])

        size = BATCH * world.world_size
        every = options.save_every * -(-SAMPLES // size)
        trainer = Trainer(
            world,
            TrainState(model, optimizer),
            data,
            options.run_dir,
            epochs=options.total_epochs,
            global_batch_size=size,
            snapshot_every=every,
            hook=injector,
            log=log,
        )
        trainer.fit(loss)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("total_epochs", type=int, help="epochs to train")
    parser.add_argument("save_every", type=int, help="epochs from one snapshot to the next")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="folder of snapshot and record")
    parser.add_argument("--seed", type=int, help="of data and model (none: each process draws its own)")
    parser.add_argument("--loss", choices=tuple(LOSSES), default="cross_entropy", help="(cross_entropy)")
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD (0)")
    parser.add_argument("--count-finished", action="store_true", help="save how many epochs are done: the number + 1")
    parser.add_argument("--engine", action="store_true", help="train with this course's Trainer instead")
    parser.add_argument("--fault", metavar="SPEC", help="such as kill:step=456")
    return parser.parse_args()


if __name__ == "__main__":
    given = parse_options()
    if given.engine:
        run(partial(on_engine, given))
    else:
        classic(given)
