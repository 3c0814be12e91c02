"""Train with DistributedDataParallel: one process for each rank, started by `mp.spawn` from this script."""

import os
import sys

import torch.multiprocessing as mp
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import Plan, RunLog, open_world, run
from course_lib.lab.faults import Injector, parse
from course_lib.workloads.data import load, prepare
from course_lib.workloads.image_job import Recorder, correct, image_model, plain_steps, say, sgd, test_metrics
from course_lib.workloads.options import Options, parse_options


def train(rank: int, master: tuple[str, int], options: Options, log: RunLog) -> None:
    with open_world(
        options.device,
        rank=rank,
        world_size=options.processes,
        master=master,
        collective_timeout_s=options.collective_timeout,
        prepare=lambda: prepare(options.data_spec),
        say=say,
    ) as world:
        injector = Injector(parse(options.fault), options.run_dir, world.rank, world.world_size, log)
        injector("start", 0)

        data = world.agree(lambda: load(options.data_spec))
        model = DistributedDataParallel(image_model(options, data, world.device))
        optimizer, scheduler = sgd(options, data, model)
        injector.attach(model, optimizer)

        plan = Plan(len(data.train), options.global_batch_size, options.seed)
        recorder = Recorder(options, plan, world, log)
        for step in plain_steps(options, plan, data, world, model):
            injector("data", step.number)
            lr = scheduler.get_last_lr()[0]
            optimizer.zero_grad()
            for batch in step:
                images, labels = batch.data
                scores = model(images)
                batch.backward(cross_entropy(scores, labels), accuracy=correct(scores, labels))
            optimizer.step()
            scheduler.step()
            recorder.step(step, lr)
            if step.last_of_epoch:
                injector("eval", step.number + 1)
                recorder.epoch(step.epoch, lr, test_metrics(model, data, world))
        recorder.finish(model, optimizer)


def worker(rank: int, master: tuple[str, int], options: Options) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.processes)}
    run(lambda: train(rank, master, options, RunLog(options.run_dir)))


def main() -> None:
    options = parse_options(__doc__, "spawn", "group")
    # The parent serves the store at which the ranks meet, on whatever port is free.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.spawn(worker, args=(("127.0.0.1", store.port), options), nprocs=options.processes)
    except mp.ProcessExitedException as error:
        if error.exit_code < 0:
            say(f"{error}; nothing restarts it here: that is torchrun's part")
        sys.exit(error.exit_code if error.exit_code > 0 else 1)


if __name__ == "__main__":
    run(main)
