# %% [markdown]
# # 01 · One device: the loop that everything starts from
#
# Before many machines can train one model, and before one of them can die without harm, we must know exactly what it
# is that they do. **What is a training step? What belongs to it, what does it change, and where does its time go?**
#
# The answers fit into ten lines of code, which you will read, run, break and time here. Three findings carry the rest
# of the course:
#
# - the gradient of a batch is a *sum of parts*: that is why many devices can share it;
# - the order of samples can be a *pure function*: that is why a restart need not lose its place;
# - weights change in one move of a step *only*: between two steps there is a clean cut, and there we shall save.
#
# **The task:** 1,500 handwritten digits to learn from, 297 to be tested on, enlarged to 32 × 32 pixels. They come
# with scikit-learn, so nothing is downloaded. The model is a small residual network with 0.19 million parameters:
# large enough to be right more than 95 times of 100, small enough for your laptop.
#
# *For teachers: 45 minutes, with the exercises. A question to discuss: if the power fails between `loss.backward()`
# and `optimizer.step()`, what has been lost? And between `optimizer.step()` and the next `optimizer.zero_grad()`?*

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
from course_lib.lab.notebook import fresh, setup

setup()

# %% data
import torch
from torch.nn.functional import cross_entropy

from course_lib.lab import fig01
from course_lib.workloads.data import DataSpec, load
from course_lib.workloads.vision import build_model, schedule

data = load(DataSpec("digits", None))
print(f"{len(data.train)} to train on, {len(data.test)} to test with, each of shape {data.shape}")
fig01.digits(data)


# %% [markdown]
# ## 1 · A step, seen by one weight
#
# A step is four moves:
#
# | move | in code | asks |
# | --- | --- | --- |
# | forward | `scores = model(images)` | what does the model say now? |
# | loss | `loss = cross_entropy(scores, labels)` | how wrong is that, in one number? |
# | backward | `loss.backward()` | which way should each weight go to make it less? |
# | optimizer | `optimizer.step()` | go there, a little |
#
# (and a broom before them: `optimizer.zero_grad()` throws the previous step's gradients away.)
#
# **Predict.** Pick out one of the 190,000 weights and look at it, and at its gradient, after each move. After which
# of the moves has the *weight* changed? After which its *gradient*? Commit yourself, then run the next two cells.


# %% watch
def some(low, high, dtype=torch.float32):
    """Training samples low … high - 1 as one batch: images (N, 1, 32, 32) and labels (N,)."""
    pairs = [data.train[i] for i in range(low, high)]
    return torch.stack([image for image, _ in pairs]).to(dtype), torch.tensor([label for _, label in pairs])


model = build_model("tiny", norm="batch", in_channels=1, num_classes=10, seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
weight, trace = model.head.weight, []


def look(step, move):
    """Write down one weight, the first of the last layer, and its gradient if it has one."""
    trace.append((step, move, weight[0, 0].item(), None if weight.grad is None else weight.grad[0, 0].item()))


# %% four-moves
for step in range(3):
    images, labels = some(64 * step, 64 * step + 64)
    optimizer.zero_grad()
    look(step, "zero_grad")
    scores = model(images)
    look(step, "forward")
    loss = cross_entropy(scores, labels)
    look(step, "loss")
    loss.backward()
    look(step, "backward")
    optimizer.step()
    look(step, "optimizer")
fig01.one_weight(trace)

# %% the-weight-changes
moves = [move for _, move, *_ in trace]
values, gradients = [look[2] for look in trace], [look[3] for look in trace]
moved = {moves[i] for i in range(1, len(trace)) if values[i] != values[i - 1]}
turned = {moves[i] for i in range(1, len(trace)) if gradients[i] != gradients[i - 1]}
print(f"the weight changes after {sorted(moved)}, its gradient after {sorted(turned)}")
mean = model.norm.running_mean.clone()
model(images)
print("a forward pass alone moves batch norm's running mean:", not torch.equal(mean, model.norm.running_mean))

# %% [markdown] tags=["exercise"]
# The weight is a staircase. It stands still while the model looks, judges and thinks, and jumps in one move only:
# `optimizer.step()`. (The gradient comes with `backward()` and is swept away by `zero_grad()`; until the next
# `backward()` there is none.) So between two jumps there is a *clean cut*: what training has achieved is in the model
# and in the optimizer, and everything else (scores, loss, gradients) can be computed again. A snapshot is taken there
# and nowhere else.
#
# "The model" is a little more than its weights: batch norm keeps running averages of what it has seen, and these
# *buffers* move in the forward pass, as the last line shows. A snapshot must hold them, too.
#
# Why "and in the optimizer"? Ours has no memory yet. But SGD with momentum keeps a *velocity* for each weight, 0.9 of
# the old one plus the new gradient, and goes along the velocity instead of the gradient.
#
# **Predict.** A weight is 1.0, the learning rate 0.1, the momentum 0.9, and the gradient is 2.0 in the first step and
# 2.0 in the second. Where is the weight after both?

# %% predict-momentum tags=["exercise"]
from course_lib.lab.exercises import n01 as check

# SOLUTION
prediction = 1.0 - 0.1 * 2.0 - 0.1 * (0.9 * 2.0 + 2.0)
# STUDENT: prediction = ...
# END
check.momentum(prediction)

# %% run-momentum
w = torch.tensor([1.0], requires_grad=True)
sgd = torch.optim.SGD([w], lr=0.1, momentum=0.9)
for step in range(2):
    w.grad = torch.tensor([2.0])
    sgd.step()
    print(f"after step {step}: weight {w.item():.2f}, remembered velocity {sgd.state[w]['momentum_buffer'].item():.1f}")

# %% [markdown]
# The same gradient moved the weight nearly twice as far the second time. A program that restarts with the right
# weights and a *fresh* optimizer has forgotten the velocity, and will go another way without an error. Notebook 04
# shows you the curve that this leaves.
#
# **Break it.** Leave out `optimizer.zero_grad()`. What does a second `backward()` on the same batch do to the
# gradient?

# %% no-broom
optimizer.zero_grad()
cross_entropy(model(images), labels).backward()
once = weight.grad.clone()
cross_entropy(model(images), labels).backward()  # nobody swept in between
print("the gradient is exactly twice what it was:", torch.equal(weight.grad, 2 * once))


# %% [markdown]
# `backward()` *adds*. Forgotten, that is the most common bug of a first training loop; used on purpose, it is the key
# to everything that follows: a gradient can be put together from parts.
#
# ## 2 · The global batch is a sum of parts
#
# A step looks at `B` samples, the **global batch**, and its gradient is the mean over all of them. Say one device has
# no room for 64 images. It could take 16 at a time, four times. Or four devices could take 16 each.
#
# **Predict.** How far is the mean of the four parts' gradients from the gradient of all 64 at once? And if the parts
# are of 40 and of 24 samples?
#
# We take float64, so that rounding is out of the way, and a network with *group norm*, for a reason that you will
# see.


# %% gradient
def gradient(low, high, norm="group"):
    """The gradient of the mean loss of training samples low … high - 1, all weights in one vector."""
    net = build_model("tiny", norm, in_channels=1, num_classes=10, seed=0, dtype=torch.float64)
    images, labels = some(low, high, torch.float64)
    cross_entropy(net(images), labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def apart(a, b):
    """The largest difference between two gradients, in any weight."""
    return (a - b).abs().max().item()


# %% parts
whole = gradient(0, 64)
even = [gradient(low, low + 16) for low in (0, 16, 32, 48)]
uneven = [gradient(0, 40), gradient(40, 64)]

plain_even = sum(even) / 4
plain_uneven = sum(uneven) / 2
weighted = 40 / 64 * uneven[0] + 24 / 64 * uneven[1]
print("16 + 16 + 16 + 16, plain mean:    within 1e-10 of the batch's gradient:", apart(plain_even, whole) < 1e-10)
print("40 + 24,           plain mean:    within 1e-10 of the batch's gradient:", apart(plain_uneven, whole) < 1e-10)
print("40 + 24,           weighted mean: within 1e-10 of the batch's gradient:", apart(weighted, whole) < 1e-10)
fig01.parts(whole, even, uneven, counts=(40, 24))

# %% [markdown] tags=["exercise"]
# Each dot is the gradient of one part, seen from two of the weights. Four equal parts: their middle (the cross) *is*
# the batch's gradient (the diamond). Two unequal parts: the true gradient lies on the line between them, nearer to
# the larger one, and the plain mean, halfway, misses it. No error is raised. The model just trains on something
# else than you think, a little, in each step that does not divide evenly. With 64 samples on three devices, that is
# every step.
#
# So: *weight each part by its number of samples.* A run on one device, on four, or on three after one has died then
# follows the same gradient. In this course `B` is a property of the experiment, never of the machine.
#
# **Write it.** `true_mean(means, counts)` puts the parts' means together. A part may be empty: what is the mean of no
# samples, and what must it count for?


# %% exercise-true-mean tags=["exercise"]
def true_mean(means, counts):
    """The mean over all samples, from each part's mean and number of samples."""
    # SOLUTION
    return sum(mean * count for mean, count in zip(means, counts, strict=True) if count > 0) / sum(counts)
    # END


check.true_mean(true_mean)

# %% [markdown]
# **Break it.** Batch norm normalises each image with the mean and deviation of *its batch*: a sample's output depends
# on who stands beside it. Is the gradient still a sum of parts?

# %% batch-norm
whole_bn = gradient(0, 64, norm="batch")
parts_bn = sum(gradient(low, low + 16, norm="batch") for low in (0, 16, 32, 48)) / 4
print("with batch norm, four parts of 16: within 1e-10:", apart(parts_bn, whole_bn) < 1e-10)
print(
    "more than a million times as far apart as with group norm:",
    apart(parts_bn, whole_bn) > 1e6 * apart(plain_even, whole),
)

# %% [markdown] tags=["exercise"]
# It isn't. Batch norm trains well, and it is the default of our scripts, but cutting its batch makes it *another
# experiment*. Whenever this course claims "the same on any number of ranks", it uses group norm.
#
# ## 3 · The order is a function
#
# In each epoch the model sees all samples once, in a new random order. The usual way is a generator that is drawn
# from, once per epoch: the order then depends on all that was drawn before. Ours is `Plan.permutation(epoch)`, a pure
# function of the seed and the epoch.
#
# **Predict.** A job dies in epoch 1, after 768 of its 1,500 samples. It restarts, knows that it was in epoch 1 at
# sample 768, and goes on from there. But its generator began again at its seed, so that it shuffles epoch 1 as the
# first life shuffled epoch 0. About how many of the 1,500 samples does epoch 1 *never* see?

# %% predict-never-seen tags=["exercise"]
# SOLUTION
prediction = 1500 * (1 - 768 / 1500) * (768 / 1500)
# STUDENT: prediction = ...
# END
check.never_seen(prediction)

# %% two-lives
import numpy as np

from course_lib.engine import Plan


def shuffles(seed):
    """The usual way: one generator, a permutation drawn from it for each epoch."""
    generator = np.random.RandomState(seed)
    while True:
        yield generator.permutation(1500)


life = shuffles(seed=0)
next(life)  # epoch 0
usual = [next(life)[:768], next(shuffles(seed=0))[768:]]  # epoch 1: before the death, and after
ours = [Plan(1500, 64, seed=0).permutation(1)[:768], Plan(1500, 64, seed=0).permutation(1)[768:]]
counts = [np.bincount(np.concatenate(pair), minlength=1500) for pair in (usual, ours)]
fig01.times_seen({"a generator that began again": counts[0], "a function of (seed, epoch)": counts[1]})

# %% [markdown]
# Each little square is one digit. On the left about a quarter of the epoch was never used and as much was used twice,
# after *one* crash, and nothing raised an error. On the right nobody had to remember anything.
#
# And it really is a function: whatever else draws random numbers in between, and on whatever machine you are, epoch 3
# of seed 0 begins with the very numbers that you see on this page.

# %% pure
before = Plan(1500, 64, seed=0).permutation(3)
torch.rand(1000), np.random.rand(1000)  # somebody draws; an augmentation, say
after = Plan(1500, 64, seed=0).permutation(3)
print("epoch 3 begins with", after[:8], "· the same as before:", np.array_equal(before, after))
print("epoch 4 begins with", Plan(1500, 64, seed=0).permutation(4)[:8])
print("every sample exactly once:", np.array_equal(np.sort(after), np.arange(1500)))

# %% [markdown] tags=["exercise"]
# **Write it.** Then a single number says where training stands. Write `where(step, samples, batch)`: for a step
# counted from 0 since the very beginning, its epoch and the half-open interval of that epoch's order that it uses.
# Batches do not reach across epochs; the last one of an epoch may be smaller.


# %% exercise-where tags=["exercise"]
def where(step, samples, batch):
    """(epoch, low, high) of a step."""
    # SOLUTION
    steps_per_epoch = -(-samples // batch)  # rounded up
    epoch, number = divmod(step, steps_per_epoch)
    return epoch, number * batch, min((number + 1) * batch, samples)
    # END


check.where(where)

# %% [markdown]
# ## 4 · The loop
#
# Now all of it together: the order, the four moves, a learning rate that rises and falls, and a line in a log for
# each step. This is the whole of training, four epochs of it.

# %% my-loop
from course_lib.engine import RunLog

mine = fresh("01-mine")
log, plan, epochs = RunLog(mine), Plan(len(data.train), 64, seed=0), 4
log.open()
model = build_model("tiny", norm="batch", in_channels=1, num_classes=10, seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = schedule(optimizer, epochs * plan.steps_per_epoch)

for epoch in range(epochs):
    for number, chosen in enumerate(np.split(plan.permutation(epoch), range(64, 1500, 64))):  # 23 of 64, then 28
        images, labels = torch.utils.data.default_collate([data.train[i] for i in chosen])
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        lr, interval = scheduler.get_last_lr()[0], [64 * number, 64 * number + len(chosen)]
        log("step", step=epoch * 24 + number, epoch=epoch, loss=loss.item(), lr=lr, samples=interval)
        scheduler.step()

# %% [markdown]
# It said nothing; what happened is in the log, and we'll come to it. First the same loop as a program, which can be
# given options, be broken on purpose, and be compared: `scripts/single_gpu.py`. Find your lines in it. What is new
# around them:
#
# - `plain_steps` hands out the steps in the plan's order, and each step hands out its batches: here one; with
#   `--max-local-batch 16` four, each weighted by its share of the samples, as in part 2;
# - `batch.backward(loss)` is `loss.backward()` with that weight;
# - `injector` breaks the run where `--fault` says so; without it, it does nothing;
# - `recorder` writes a line of JSON for each step and each epoch, and a report at the end.
#
# **Predict.** 1,500 samples, 64 a step, 4 epochs: how many steps will it count? And will it be right more often than
# 95 times of 100? Then start it, two cells below.

# %% the-script
from pathlib import Path

from IPython.display import Markdown

script = Path("scripts/single_gpu.py").read_text()
Markdown(f"```python\n{script[script.index('def train') :]}```")

# %% train tags=["nbval-ignore-output"]
run = fresh("01-single")
# !python scripts/single_gpu.py --epochs 4 --run-dir {run}

# %% claims
from course_lib.engine import read_events
from course_lib.lab.claims import accuracy, every_sample_once, max_difference

print("more than 95 % right:", accuracy(run) > 0.95)
print("every sample once an epoch:", every_sample_once(mine) and every_sample_once(run))
print("my loop's 96 losses within 5e-7 of the script's:", max_difference(mine, run) < 5e-7)
fig01.learning(read_events(run).events)

# %% [markdown]
# (The script counts epochs from 1 for its reader, the log from 0.)
#
# Past 95 %, and the loop that you ran in this page and the program that ran beside it went down the *same curve*,
# step by step. That is no luck: the weights come from the seed, the order from the seed and the epoch, and nothing
# else is random. It is the ground that we build on. A run that can be repeated exactly can be *interrupted* and
# repeated exactly, and then "the crash did no harm" is no hope, but a difference that you can print.
#
# ## 5 · Where a step's time goes
#
# **Predict.** Before it gets to the moves, a step must fetch its images. Share out 100 per cent: data, forward,
# backward, optimizer. Put your guess into the next cell; the picture shows it under the truth.

# %% measure tags=["nbval-ignore-output"]
import time
from contextlib import contextmanager

from torch.utils.data import DataLoader

guess = {"data": 25, "forward": 25, "backward": 25, "optimizer": 25}  # yours, in per cent
intervals = []


@contextmanager
def phase(name):
    begin = time.perf_counter()
    yield
    intervals.append((name, begin, time.perf_counter()))


def batches(dataset, steps, workers=0):
    """An iterator over the first batches of epoch 0; `workers` is the number of processes that prepare them."""
    order = np.split(plan.permutation(0), range(64, 1500, 64))[:steps]
    return iter(DataLoader(dataset, batch_sampler=order, num_workers=workers))


# %% timed tags=["nbval-ignore-output"]
def timed_steps(loader, steps):
    """Do some steps; returns the intervals of their phases."""
    intervals.clear()
    for _ in range(steps):
        with phase("data"):
            images, labels = next(loader)
        with phase("forward"):
            loss = cross_entropy(model(images), labels)
        with phase("backward"):
            optimizer.zero_grad()
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
    return list(intervals)


measured = timed_steps(batches(data.train, 20), 20)
typical = fig01.medians(measured)
step_s = sum(typical.values())
guessed = {name: percent / sum(guess.values()) * step_s for name, percent in guess.items()}
print(" · ".join(f"{name} {seconds / step_s:.0%}" for name, seconds in typical.items()))
fig01.timeline({"median step": fig01.in_a_row(typical), "your guess": fig01.in_a_row(guessed)})

# %% [markdown]
# On most machines the backward pass is the longest block. It has two things to compute where forward has one: for
# each layer the gradient of its *weights*, and the gradient of its *inputs* to hand down. The optimizer touches each
# weight once, and is short. Data is short *here*: the images lie in memory.
#
# **Break it.** They rarely do. Let each image take half a millisecond, as a file on a disk would, and look at three
# steps in a row; then let two more processes prepare the batches. (`SlowDisk` stands in a file: another process must
# be able to import it. Notebook 03 shows why.)


# %% slow-disk tags=["nbval-ignore-output"]
from course_lib.lab.slow_disk import SlowDisk

slow = SlowDisk(data.train, seconds=0.0005)  # the same digits, as if each came from a file
alone = timed_steps(batches(slow, 6), 6)
helped = timed_steps(batches(slow, 12, workers=2), 12)
fig01.timeline({"one process": alone[-12:], "two loaders": helped[-12:]})

# %% [markdown]
# Three steps each. The work of fetching has not become less. It goes on *beside* the step, so that the next batch
# lies ready when it is asked for. That is the first law of speed in this course: **what cannot be made shorter is put
# beside something else.** You'll meet it again as the overlap of all-reduce with backward (03) and as asynchronous
# snapshots (05).
#
# ### The clock that lies
#
# On a GPU the same stopwatch tells fairy tales. `model(images)` does not compute there: it puts *orders* into the
# GPU's queue and comes back at once. We don't need a GPU to see it. One thread that works off a queue behaves just
# so, and it does real forwards and backwards. **Predict** what the stopwatch shows when we ask the thread for all
# four moves, and read the clock after each order.

# %% queue tags=["nbval-ignore-output"]
from concurrent.futures import ThreadPoolExecutor

device = ThreadPoolExecutor(max_workers=1)  # takes orders and works them off one by one: like a GPU's stream


def step_on_the_device(synchronise):
    # One step by orders; with `synchronise` the clock is read only once an order is done.
    made, (images, labels) = {}, some(0, 256)
    orders = {
        "forward": lambda: made.update(loss=cross_entropy(model(images), labels)),
        "backward": lambda: made["loss"].backward(),
        "optimizer": optimizer.step,
    }
    intervals.clear()
    for name, order in orders.items():
        with phase(name):
            done = device.submit(order)
            if synchronise:
                done.result()  # on a GPU: torch.cuda.synchronize()
    with phase("loss.item()"):
        done.result()  # a number is asked for: it cannot be had before all is done
    return list(intervals)


step_on_the_device(True)  # the thread's first step is slower; it isn't shown
fig01.timeline({"naive": step_on_the_device(False), "synchronised": step_on_the_device(True)})

# %% [markdown] tags=["exercise"]
# Both steps did the same work. But the upper clock swears that everything was free and that
# *printing the loss* cost the whole step. Many an hour has gone into speeding up such a line. So, on a GPU,
# call `torch.cuda.synchronize()` before you read a clock; and only then, since each call makes the CPU wait instead
# of queueing the next orders. (`loss.item()` is such a wait as well: print the loss every so many steps.)
#
# **Diagnose.** From somebody's GPU, per step, without synchronising: `forward 0.3 ms · backward 0.4 ms · optimizer
# 0.2 ms · log loss.item() 38.2 ms`. What are the 38 ms? **a** copying the loss to the CPU is slow; **b** backward is
# slow, forward is not; **c** it is the GPU's work of all the moves, waited for in this line; **d** the log is the
# bottleneck, so that without this line a step would take 1 ms.

# %% diagnose-clock tags=["exercise"]
# SOLUTION
answer = "c"
# STUDENT: answer = ...
# END
check.slow_line(answer)

# %% [markdown] tags=["exercise"]
# ## 6 · Exercise: five curves
#
# Five training runs of a small linear classifier, with lr 0.02, all weights zero at the start, 48 steps. One is
# sound; four have a bug in the loop. No error was raised. **Which is which?** The causes: `labels of other samples`
# (images and labels were shuffled apart), `zero_grad missing`, `zero_grad between backward and step`, `the same batch
# in each step`, `nothing wrong`.

# %% five-curves tags=["exercise"]
from course_lib.lab import fig01
from course_lib.lab.exercises import n01 as check

fig01.unlabelled(check.five_curves())

# %% diagnose-bugs tags=["exercise"]
answer = {
    # SOLUTION
    "1": "labels of other samples",
    "2": "zero_grad missing",
    "3": "the same batch in each step",
    "4": "zero_grad between backward and step",
    "5": "nothing wrong",
    # STUDENT: "1": ...,
    # STUDENT: "2": ...,
    # STUDENT: "3": ...,
    # STUDENT: "4": ...,
    # STUDENT: "5": ...,
    # END
}
check.bugs(answer)

# %% [markdown]
# Solved, or stuck? [The solutions](solutions/01_single_gpu.ipynb).
#
# ## Ten questions
#
# Say your answer aloud before you unfold it; most can be tried in a new cell.
#
# 1. `!python scripts/single_gpu.py --epochs 3 --global-batch-size 100 …`: how many steps does the report count, and
#    how large is an epoch's last batch?
#    <details><summary>answer</summary>45 steps, and 100: 1,500 is 15 × 100, so there is no tail.</details>
# 2. The same with `--global-batch-size 1500 --epochs 4`. Is `accuracy(run) > 0.95` still true?
#    <details><summary>answer</summary>No. The model sees as many images, but there are four optimizer steps in all:
#    the weights jump four times.</details>
# 3. In the picture of one weight: move `optimizer.zero_grad()` to right after `loss.backward()`. How does the lower
#    curve look?
#    <details><summary>answer</summary>Flat. When the optimizer comes, there is no gradient left to follow.</details>
# 4. You call `backward()` on three batches and then `optimizer.step()` once, with a `zero_grad()` before the first
#    only. What has the step followed, compared with the mean gradient of all three?
#    <details><summary>answer</summary>Their sum: three times the mean, as if the learning rate were three times as
#    high. Divide each loss by three.</details>
# 5. In `parts`, take 16 + 48 and their plain mean. To which dot has the cross moved, compared with the diamond?
#    <details><summary>answer</summary>Towards the part of 16: it counts for a half, where a quarter is due.</details>
# 6. `--norm group --dtype float64`, once with and once without `--max-local-batch 16`. Are the first losses nearly
#    equal? And with `--norm batch`?
#    <details><summary>answer</summary>With group norm they agree but for rounding. With batch norm even the first
#    loss differs: each image is normalised with 16 companions instead of 64.</details>
# 7. The job of part 3 dies exactly at the end of epoch 0, and its generator begins again. How many samples does epoch
#    1 never see? What is wrong nevertheless?
#    <details><summary>answer</summary>None: the counts look perfect. But epoch 1 has epoch 0's order; what an
#    uninterrupted run would have done is lost, and no count shows it.</details>
# 8. You run the script twice with `--seed 1`. What is `max_difference` of the two? And of one of them and our `run`
#    of seed 0?
#    <details><summary>answer</summary>0.0 on the same machine: nothing is random but what the seed decides. With the
#    other seed it is large: other weights, another order.</details>
# 9. Fetching a batch takes 40 ms in one process, computing 30 ms. How long does a step take with 0, 1 and 2 loader
#    processes, on a machine with cores to spare?
#    <details><summary>answer</summary>70, 40 and 30 ms. One loader works beside the step but is the slower one; two
#    deliver a batch every 20 ms, and computing sets the pace.</details>
# 10. In the cell with the queue, remove the two lines of `loss.item()`. What does the naive row show, and where has the
#     work gone?
#     <details><summary>answer</summary>Three slivers, as if the step were free. The work still has to be done:
#     whoever first asks for a result waits for it.</details>
#
# ## In five lines
#
# 1. A step is forward, loss, backward, optimizer; weights change in `optimizer.step()` and nowhere else, and there is
#    the clean cut.
# 2. The gradient of the global batch is the mean of its parts' gradients, weighted by their samples (not with batch
#    norm).
# 3. The order of samples is a pure function of seed and epoch: a step's number says where training stands.
# 4. The loop reaches more than 95 % and takes the same losses again whenever it is run: the ground for comparing
#    bits.
# 5. Backward costs most; loading belongs beside the step; and before you read a GPU's clock, synchronise.
#
# Next: the simplest way to use several devices, and why it loses. [02 · DataParallel](02_data_parallel.ipynb)
