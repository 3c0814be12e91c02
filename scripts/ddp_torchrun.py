"""Train with DistributedDataParallel under torchrun, and survive: snapshots, restarts, any number of ranks."""

from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import RunLog, Trainer, TrainState, open_world, run
from course_lib.lab.faults import Injector, parse
from course_lib.workloads.data import load, prepare
from course_lib.workloads.image_job import correct, image_model, progress, say, sgd, test_metrics
from course_lib.workloads.options import Options, parse_options
from course_lib.workloads.precision import grad_scaler


def train(options: Options, log: RunLog) -> None:
    with open_world(
        options.device,
        collective_timeout_s=options.collective_timeout,
        prepare=lambda: prepare(options.data_spec),
        say=say,
    ) as world:
        injector = Injector(parse(options.fault), options.run_dir, world.rank, world.world_size, log)
        injector("start", 0)

        data = world.agree(lambda: load(options.data_spec))
        model = image_model(options, data, world.device)
        if options.virtual_shards is None:  # else the trainer sums the gradients
            model = DistributedDataParallel(model)
        optimizer, scheduler = sgd(options, data, model)
        injector.attach(model, optimizer)

        state = TrainState(model, optimizer, scheduler, grad_scaler(options.amp, world.device.type))
        trainer = Trainer(
            world,
            state,
            data.train,
            options.run_dir,
            **options.for_trainer(data.identity),
            evaluate=lambda: test_metrics(model, data, world),
            hook=injector,
            log=log,
            say=say,
        )
        for step in progress(trainer.steps(), options.epochs * trainer.plan.steps_per_epoch, world):
            optimizer.zero_grad()
            for batch in step:
                images, labels = batch.data
                scores = model(images)
                batch.backward(cross_entropy(scores, labels), accuracy=correct(scores, labels))
            state.update()  # optimizer.step() and scheduler.step(), and what fp16 needs around them


def main() -> None:
    options = parse_options(__doc__, "group", "snapshots")
    train(options, RunLog(options.run_dir))


if __name__ == "__main__":
    run(main)
