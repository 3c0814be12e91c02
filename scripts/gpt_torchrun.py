"""Train a GPT on text under torchrun, and survive: the same engine, loop and options as ddp_torchrun.py."""

from torch.nn.parallel import DistributedDataParallel

from course_lib.engine import RunLog, Trainer, TrainState, open_world, run
from course_lib.lab.faults import Injector, parse
from course_lib.workloads.gpt import MAX_NORM, next_loss
from course_lib.workloads.gpt_job import (
    compare,
    gpt_model,
    guessed,
    held_out_metrics,
    load_everywhere,
    optimizer_of,
    write_sample,
)
from course_lib.workloads.gpt_options import GptOptions, parse_options
from course_lib.workloads.image_job import progress, say
from course_lib.workloads.precision import grad_scaler


def train(options: GptOptions, log: RunLog) -> None:
    with open_world(options.device, collective_timeout_s=options.collective_timeout, say=say) as world:
        injector = Injector(parse(options.fault), options.run_dir, world.rank, world.world_size, log)
        injector("start", 0)

        text = load_everywhere(options, world)
        model = gpt_model(options, text, world.device)
        if options.virtual_shards is None:  # else the trainer sums the gradients
            model = DistributedDataParallel(model)
        optimizer, scheduler = optimizer_of(options, text, model)
        injector.attach(model, optimizer)

        scaler = grad_scaler(options.amp, world.device.type)
        state = TrainState(model, optimizer, scheduler, scaler, extra={"vocabulary": text.vocabulary})
        trainer = Trainer(
            world,
            state,
            text.train,
            options.run_dir,
            **options.for_trainer(text.identity),
            evaluate=lambda: held_out_metrics(model, text, world),
            hook=injector,
            log=log,
            say=say,
        )
        for step in progress(trainer.steps(), options.epochs * trainer.plan.steps_per_epoch, world):
            optimizer.zero_grad()
            for batch in step:
                characters, following = batch.data
                scores = model(characters)
                batch.backward(next_loss(scores, following), accuracy=guessed(scores, following))
            state.update(MAX_NORM)
    if world.rank == 0:  # the others need not wait for it
        say(compare(trainer.progress.history[-1]["test_loss"], text))
        say(write_sample(model, text.vocabulary, options))


def main() -> None:
    options = parse_options(__doc__, "group", "snapshots")
    train(options, RunLog(options.run_dir))


if __name__ == "__main__":
    run(main)
