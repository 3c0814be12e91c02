"""Train with DataParallel: one process drives all GPUs of a machine; on a CPU, lanes show how it works."""

import torch
from torch import nn
from torch.nn import DataParallel
from torch.nn.functional import cross_entropy

from course_lib.engine import Plan, RunLog, World, run
from course_lib.engine.place import choose_device
from course_lib.lab.faults import Injector, parse
from course_lib.workloads.data import load, prepare
from course_lib.workloads.image_job import Recorder, correct, image_model, plain_steps, say, sgd, test_metrics
from course_lib.workloads.lanes import CpuLanes
from course_lib.workloads.options import Options, parse_options


def parallel(module: nn.Module, device: torch.device, lanes: int) -> nn.Module:
    if device.type == "cuda":
        say(f"DataParallel splits each batch over {torch.cuda.device_count()} GPU(s)")
        return DataParallel(module)
    say(f"nothing is parallel here: no GPU is used, and {lanes} lanes on the CPU only show the mechanics")
    return CpuLanes(module, lanes)


def train(options: Options, log: RunLog) -> None:
    device, why = choose_device(options.device, local_rank=0, local_world_size=1)
    world = World(rank=0, local_rank=0, world_size=1, device=device)
    say(f"running on {device.type}: {why}")
    injector = Injector(parse(options.fault), options.run_dir, world.rank, world.world_size, log)
    injector("start", 0)

    prepare(options.data_spec)
    data = load(options.data_spec)
    model = parallel(image_model(options, data, world.device), device, options.lanes)
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


def main() -> None:
    options = parse_options(__doc__, "lanes")
    train(options, RunLog(options.run_dir))


if __name__ == "__main__":
    run(main)
