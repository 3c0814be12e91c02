"""A small training script for nodes: 200 steps, slow ones until a file `go` stands in the folder of the run directory.

It gives the same bits on any number of ranks (virtual shards), and imports nothing that a start would wait for. A file
`slow` makes the writer of the next snapshot sleep for `--slow` seconds: `writing` stands there instead, then `written`.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from torch.nn.functional import mse_loss
from toys import Points, momentum, net

from course_lib.engine import RunLog, SnapshotStore, Trainer, TrainState, open_world, run
from course_lib.lab.faults import Injector, parse

SAMPLES, BATCH, EPOCHS, EVERY = 1000, 10, 2, 4
STEPS = EPOCHS * SAMPLES // BATCH


def slow_writer(folder: Path, seconds: float) -> None:
    """Let the writer of a snapshot sleep before it writes, once for each file `slow`."""
    draft, publish, slept = SnapshotStore.draft, SnapshotStore.publish, []

    def later(self: SnapshotStore, *args: Any, **facts: Any) -> Any:
        if (folder / "slow").exists():
            (folder / "slow").rename(folder / "writing")
            slept.append(facts["step"])
            time.sleep(seconds)
        return draft(self, *args, **facts)

    def mark(self: SnapshotStore, made: Any) -> None:
        publish(self, made)
        if made.manifest.step in slept:
            (folder / "writing").rename(folder / "written")

    SnapshotStore.draft, SnapshotStore.publish = later, mark  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--pace", type=float, default=0.3, help="seconds that a step takes, until there is a `go`")
    parser.add_argument("--slow", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collective-timeout", type=float, default=30)
    parser.add_argument("--fault")
    given = parser.parse_args()
    with open_world("cpu", collective_timeout_s=given.collective_timeout, say=lambda text: None) as world:
        log = RunLog(given.run_dir)
        hook = Injector(parse(given.fault), given.run_dir, world.rank, world.world_size, log)
        model = net()
        state = TrainState(model, momentum(model))
        hook.attach(model, state.optimizer)
        slow_writer(given.run_dir.parent, given.slow)
        trainer = Trainer(
            world,
            state,
            Points(SAMPLES),
            given.run_dir,
            epochs=EPOCHS,
            global_batch_size=BATCH,
            snapshot_every=EVERY,
            seed=given.seed,
            virtual_shards=4,
            hook=hook,
            log=log,
        )
        for step in trainer.steps():
            state.optimizer.zero_grad()
            for batch in step:
                x, y = batch.data
                batch.backward(mse_loss(model(x), y))
            state.optimizer.step()
            if not (given.run_dir.parent / "go").exists():
                time.sleep(given.pace)


if __name__ == "__main__":
    run(main)
