# %% [markdown]
# # 03 · One process for each device
#
# DataParallel had one process drive all devices, and notebook 02 showed what that costs. DistributedDataParallel, DDP
# for short, starts one process for *each* device. Nobody is in charge any more: every process has its own
# interpreter, its own copy of the model and its own optimizer, and they talk once a step.
#
# **The question.** If nobody is in charge, why do all copies stay equal, and equal to what one process would have
# computed? DDP keeps half of that promise by itself. The other half is your code's, and when it breaks, nothing
# crashes: the curve is merely a little wrong. At the end you will tell five such curves apart by eye.
#
# *For teachers: 60 to 75 minutes. To discuss: a colleague trains on 8 GPUs, gets 0.3 % less accuracy than on one, and
# says "that's the noise of distributed training". Which three numbers do you ask for before you believe it?*
#
# ## 1 · From one process to two
#
# This is everything that changes from notebook 02's script to the one with DDP. Look for three things: what wraps the
# model, what each process is told, and who starts the processes.

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
from course_lib.lab.notebook import fresh, setup

setup()

# %% diff
from course_lib.lab.diff import show_diff

show_diff("data_parallel", "ddp_spawn", context=1)

# %% [markdown]
# - The training loop did not change at all. `DistributedDataParallel(model)` hooks into `backward()`; the loop does
#   not see it.
# - Each process is told its **rank** (who am I, from 0), the **world size** (how many are we) and where to meet: a
#   small key-value store that the parent serves on whatever port is free.
# - `mp.spawn(worker, …)` starts the processes and calls `worker(rank, …)` in each. `worker` stands at the top level
#   of a file. Must it? Let's try to get away without a file.
#
# **Predict.** `hello` is a function of this notebook. What happens when a new process shall call it: a greeting,
# an error here, or an error over there?

# %% spawn-here tags=["nbval-ignore-output"]
import torch.multiprocessing as mp


def hello(rank):
    print("hello from rank", rank)


try:
    mp.spawn(hello, nprocs=1)
    outcome = "it said hello"
except mp.ProcessExitedException as error:
    outcome = f"{type(error).__name__}: {error}"

# %% why-spawn-fails
import pickle

message = pickle.dumps(hello)
print(outcome)
print(f"the message holds: module {b'__main__' in message} · name {b'hello' in message} · code {b'print' in message}")

# %% [markdown]
# The error is over there. *Spawn* starts a fresh Python, and sends it the function by its address only: "`hello`, in
# module `__main__`". In the new process `__main__` is somebody else, and there is no `hello` in it. (Why not fork,
# which copies the whole process? A fork copies neither threads nor a CUDA context; with both at work the child is
# broken.)
#
# So **a worker must be importable**: it lives in a file, as in `scripts/ddp_spawn.py`, and a script keeps what starts
# it under `if __name__ == "__main__"`, or each child would start children. Now with the file, beside the script of
# notebook 01:

# %% train tags=["nbval-ignore-output"]
single, spawned = fresh("03-single"), fresh("03-spawned")
alike = "--norm group --dtype float64 --epochs 1"
# !python scripts/single_gpu.py --run-dir {single} {alike}
# !python scripts/ddp_spawn.py --run-dir {spawned} {alike} --processes 2

# %% alike
from course_lib.lab.claims import every_sample_once, max_difference

print(f"largest difference of the losses below 1e-8: {max_difference(single, spawned) < 1e-8}")
print(f"every sample once: {every_sample_once(single) and every_sample_once(spawned)}")

# %% [markdown] tags=["exercise"]
# Two processes, and the curve of one: not similar, but the same up to the rounding of float64. Keep that as a
# yardstick: *a correct data-parallel job has the loss curve of the one-process job*. (Group norm, because batch norm
# takes its statistics from each rank's share: a real difference, and no bug.)
#
# For the rest of this notebook we watch two ranks closely. One short job plays eleven scenes on them and writes down
# what each rank saw. The scenes' models are as small as `y = w·x`, so that you can check the numbers by head.
#
# ### Exercise 1: predict
#
# In the first scene each rank seeds its random numbers with its rank, draws a weight (so the two differ), and wraps
# the model in DDP. Whose weight do both have afterwards: rank 0's (answer `0`), rank 1's (`1`), or the mean (`0.5`)?

# %% exercise-first-weight tags=["exercise"]
from course_lib.lab.exercises import n03 as check

# SOLUTION
whose = 0
# STUDENT: whose = ...
# END
check.first_weight(whose)

# %% evidence tags=["nbval-ignore-output"]
evidence = fresh("03-evidence")
# !python -m course_lib.lab.ddp_evidence --run-dir {evidence}

# %% scene-start
from inspect import getsource

from IPython.display import Markdown, display

from course_lib.lab import ddp_evidence as scenes
from course_lib.lab.claims import observed


def show(scene):
    return Markdown(f"```python\n{getsource(scene)}```")


zero, one = observed(evidence, "start")
print(f"processes differ {zero['pid'] != one['pid']} · weights before differ {zero['before'] != one['before']}")
print(f"after: equal {zero['after'] == one['after']} · rank 0's {one['after'] == zero['before']}")

# %% [markdown]
# That is the first half of DDP's promise: **equal start** (rank 0's weights, sent once), then **equal gradients** in
# every step. Equal start, equal gradients and equal optimizers give equal weights for ever, and no weight needs to
# travel again. Remember the word *once*: DDP never checks later whether the copies are still equal.
#
# ## 2 · All-reduce: the sum that nobody collects
#
# Every rank has a gradient; every rank needs the mean of all. The obvious way, to send all to rank 0 and back, makes
# rank 0's wire the bottleneck: with W ranks it receives W - 1 whole gradients. A **ring** does better. Cut the
# gradient into W chunks, and let each rank talk to the next one only:
#
# - **reduce-scatter**, W - 1 rounds: pass a chunk on; *add* what arrives to your own. Then each rank has one complete
#   sum.
# - **all-gather**, W - 1 rounds: pass a complete sum on; *keep* what arrives.

# %% ring
from course_lib.lab.fig03 import ring_figure
from course_lib.lab.ring import ring_all_reduce, run_ring

ring_figure(run_ring(ring_all_reduce, [[10**rank] * 4 for rank in range(4)]))

# %% [markdown] tags=["exercise"]
# ### Exercise 2: write the ring
#
# `chunks[rank][c]` is chunk `c` of `rank`'s gradient, a number. `ring.pass_on(messages)` is one round:
# `messages[rank]`, a pair `(c, chunks[rank][c])`, goes to rank + 1 (the last one's to rank 0), and it returns what
# each rank received, in rank order. Change `chunks` in place, so that every row ends as the sums.
#
# A hint in the figure: in round 1, rank r sends chunk r; in each later round it sends on the chunk that it has just
# received.
# `ring_figure(run_ring(my_all_reduce, [[10**rank] * 4 for rank in range(4)]))` draws yours, finished or not.
#
# ### Exercise 3: predict
#
# Eight ranks all-reduce a gradient of 800 MB in a ring. How many MB does each rank send in all?

# %% exercise-ring tags=["exercise"]
from course_lib.lab.exercises import n03 as check


def my_all_reduce(chunks, ring):
    ranks = len(chunks)
    # SOLUTION
    for phase in ("reduce-scatter", "all-gather"):
        for step in range(ranks - 1):
            first = 0 if phase == "reduce-scatter" else 1
            places = [(rank + first - step) % ranks for rank in range(ranks)]
            arrived = ring.pass_on([(c, chunks[rank][c]) for rank, c in enumerate(places)])
            for rank, (c, value) in enumerate(arrived):
                chunks[rank][c] = value + (chunks[rank][c] if phase == "reduce-scatter" else 0)
    # STUDENT: for step in range(ranks - 1):  # reduce-scatter
    # STUDENT:     messages = ...
    # STUDENT: for step in range(ranks - 1):  # all-gather
    # STUDENT:     messages = ...
    # END


check.ring(my_all_reduce)

# %% exercise-megabytes tags=["exercise"]
# SOLUTION
sent_mb = 1400
# STUDENT: sent_mb = ...
# END
check.megabytes(sent_mb)

# %% [markdown]
# ## 3 · Buckets: talking while computing
#
# The last layer's gradient is ready first, long before `backward()` ends. DDP fills **buckets** (25 MiB by default,
# the first one less) with gradients as they become ready, and starts the all-reduce of a full bucket at once, while
# the layers below still compute.
#
# **Predict.** The recorded network has six equal layers. With a bucket for each layer, how many of the six
# all-reduces begin before the last gradient is there? And how many, if one bucket holds everything?

# %% timeline
from course_lib.lab.fig03 import hidden, overlap_figure

names = {"layers": "a bucket for each layer", "everything": "one bucket for everything"}
passes = {name: observed(evidence, scene) for scene, name in names.items()}
for name, ranks in passes.items():
    counts = [f"{hidden(times)} of {len(times['buckets'])}" for times in ranks]
    print(f"{name}: began before the last gradient on rank 0 {counts[0]}, on rank 1 {counts[1]}")
overlap_figure(passes)

# %% [markdown] tags=["exercise"]
# Blue is real backward time on this machine, one block for each layer; orange is a bucket on its way. With small
# buckets only the *last* all-reduce has nothing to hide behind; with one big bucket the whole of it comes after the
# computing. (An orange bar is long when the other rank is late: an all-reduce ends for all at about the same moment,
# so **the slowest rank sets the pace**.) Then why not a bucket for each tensor? Every all-reduce has a fixed cost:
# too many small ones are slow again.
#
# ## 4 · Which samples?
#
# DDP averages gradients. *Which* samples they come from is your code's business: the other half of the promise.
# torch's `DistributedSampler` is the usual answer, and it has a habit: it wants equal shares.
#
# ### Exercise 4: predict
#
# Five test samples, two ranks, `DistributedSampler(shuffle=False)`: it deals them like cards (rank 0 gets 0, 2, 4),
# and begins again at sample 0 when a share is short. The model is right on samples 0 and 2 only. Each rank computes
# the accuracy of its share, and the mean of the two is reported. Which number is it?

# %% exercise-padded tags=["exercise"]
# SOLUTION
reported = 0.5
# STUDENT: reported = ...
# END
check.padded(reported)

# %% samplers
from torch.utils.data import DistributedSampler

from course_lib.engine.order import share
from course_lib.lab.fig03 import shares_figure

dealt = [list(DistributedSampler(range(5), 2, rank, shuffle=False)) for rank in range(2)]
exact = [list(range(*share(0, 5, rank, 2))) for rank in range(2)]
padded, true = observed(evidence, "evaluation")[0].values()
print(dealt, exact)
print(f"two real ranks report {padded:.2f} with the sampler, and {true:.2f} with exact sums; 2 of 5 is {2 / 5:.2f}")
shares_figure({"DistributedSampler (green: answered rightly)": dealt, "share()": exact}, right=[0, 2])

# %% [markdown]
# A padded evaluation answers a question that nobody asked: how good is the model on these samples *and sample 0 once
# more*? `drop_last=True` is no cure; it leaves sample 4 out. The course's `share` gives shares that differ by at most
# one: no padding, no dropped tail.
#
# But then shares are unequal, and a **mean of means** lies. Rank 0 was right in 3 of 3, rank 1 in 0 of 1:

# %% means
right, asked = [3, 0], [3, 1]
print("mean of the ranks' means:", sum(r / n for r, n in zip(right, asked, strict=True)) / 2)
print("true with these four:    ", sum(right) / sum(asked))
right, asked = [3, 0], [3, 3]
print("equal shares, both ways: ", sum(r / n for r, n in zip(right, asked, strict=True)) / 2, sum(right) / sum(asked))

# %% [markdown]
# **Sum first, divide once**: all-reduce the count of right answers *and* the count of samples (`evaluate` in the
# engine does). Only with equal shares do the two ways agree, which is why the bug hides until somebody changes the
# world size.
#
# ## 5 · The gradient has the same disease
#
# DDP divides the summed gradients by the number of ranks: a mean of means. Our 1,437 training images in steps of 64
# leave a tail of 29: 15 for rank 0, 14 for rank 1. Here is the scene with a tail of three samples. `y = w·x`, so the
# gradient of the mean of y is the mean of x.
#
# **Predict** both numbers: `plain` (each rank backpropagates its own mean) and `weighted`. The truth is (1 + 2 + 9) /
# 3 = 4.

# %% scene-tail
display(show(scenes.tail))
for rank, seen in enumerate(observed(evidence, "tail")):
    print(f"rank {rank}: plain {seen['plain']:.2f} · weighted {seen['weighted']:.2f}")
for rank, seen in enumerate(observed(evidence, "empty")):
    print(f"one sample for two ranks; rank {rank} has {seen['samples']}, gradient {seen['gradient']:.2f}")

# %% [markdown] tags=["exercise"]
# ### Exercise 5: write the weight
#
# Rank 1's single 9 counted as much as rank 0's two samples together: (1.5 + 9) / 2 = 5.25. Write the factor with
# which a rank multiplies its mean loss, so that after DDP's division by `ranks` each of the step's `size` samples
# counts the same. `count` is how many of them the rank has.


# %% exercise-weight tags=["exercise"]
def my_weight(count, size, ranks):
    # SOLUTION
    return count * ranks / size
    # STUDENT: return ...
    # END


check.weight(my_weight)

# %% [markdown]
# In the loop of the scripts this factor hides in `batch.backward(loss)`. And a rank *without* a sample still takes
# part, with a stand-in of weight 0: forward, backward and all. (Part 7 shows what becomes of the others when it does
# not.)
#
# ## 6 · Big steps in small pieces
#
# When a share doesn't fit into memory, cut it into micro-batches and let the gradients accumulate. **Predict:** with
# four micro-batches, how many all-reduces does a step take as it stands, and how many under `no_sync()` in all but
# the last? Does the gradient change? Rank 0 has the samples 1, 2, 3, 4 and rank 1 has 5, 6, 7, 8, so the truth is
# 4.5.

# %% scene-accumulate
display(show(scenes.accumulate))
for name, seen in observed(evidence, "accumulate")[0].items():
    count = seen["all-reduces"]
    print(f"{name:>10}: {count} all-reduce{'s' * (count > 1)}, gradient {seen['gradient']}")

# %% [markdown]
# Four times the traffic for nothing, or once. The third line forgot to divide each loss by the number of
# micro-batches: four times the gradient, which is four times the learning rate, and no error. (`no_sync` must enclose
# the forward, too: DDP decides there.)
#
# **Whose batch is it?** "Batch size 64" in a DDP script often means 64 *for each rank*: on eight GPUs the same
# command then takes steps of 512. Let's see what that does. **Predict** where the curve of 512 lies, with the same
# learning rate, and with eight times that.

# %% batch-size
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from course_lib.engine import Plan
from course_lib.lab.fig03 import curves_figure

pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
pixels = pixels.float() / 16


def train(batch, lr, epochs=6):
    weights, plan = torch.zeros(64, 10, requires_grad=True), Plan(len(digits), batch)
    points = [(0, cross_entropy(pixels @ weights, digits).item())]
    for epoch in range(epochs):
        for rows in torch.tensor(plan.permutation(epoch)).split(batch):
            gradient = torch.autograd.grad(cross_entropy(pixels[rows] @ weights, digits[rows]), weights)[0]
            weights.data -= lr * gradient
        points.append((epoch + 1, cross_entropy(pixels @ weights, digits).item()))
    return points


# %% batch-curves
curves = {f"{batch}, lr {lr}": train(batch, lr) for batch, lr in ((64, 0.1), (512, 0.1), (512, 0.8))}
last = {name: points[-1][1] for name, points in curves.items()}
print(f"512 with the same rate is behind by more than half: {last['512, lr 0.1'] > 1.5 * last['64, lr 0.1']}")
print(f"512 with eight times the rate is within 10 %: {abs(last['512, lr 0.8'] / last['64, lr 0.1'] - 1) < 0.1}")
small, large = train(64, 0.5), train(512, 4.0)
print(f"but from 0.5 to 4.0: after two epochs more than twice the loss {large[2][1] > 2 * small[2][1]}")
curves_figure(curves, "epoch", "loss", "The same data, in steps of 64 and of 512")

# %% [markdown]
# Eight times fewer steps need about eight times longer ones: the *linear scaling rule* (P. Goyal et al., 2017). It
# holds while steps are small, and breaks when they are not: hence warm-up, and hence no rule without a curve. The
# safest is not to need it: **the global batch belongs to the experiment, not to the machine**. The course's scripts
# take `--global-batch-size` and divide it among however many ranks there are. That is why a job may lose a rank in
# notebook 06 and go on with the same mathematics.
#
# ## 7 · Break it: bugs that do not crash
#
# **An unused parameter.** A network has a body, a head, and a spare head that `forward` does not use. Rank 0 feeds x
# = 1, rank 1 feeds x = 3, so the body's mean gradient is 2. **Predict:** does step 1 complain? Does step 2?

# %% scene-unused
ranks = observed(evidence, "unused")
for name in ("default", "find_unused_parameters"):
    for rank, seen in enumerate(ranks):
        result, steps = seen[name], seen[name]["steps"]
        ended = "then an error" if result["error"] else "no error"
        gradient = f"body's gradient {result['gradient']:.0f}"
        print(f"{name}, rank {rank}: {steps} step{'s' * (steps > 1)}, {ended}; {gradient}")

error = ranks[1]["default"]["error"]
print(error.split(". ")[0], next(line for line in error.splitlines() if "indices" in line), sep="\n")

# %% [markdown] tags=["exercise"]
# Look at step 1 again: it ended without a word, with **1 on one rank and 3 on the other**. The bucket waited for a
# gradient that never came, so its all-reduce never began. Only step 2's forward noticed: "expected to have finished
# reduction in the *prior* iteration". So the error is one step late; a script that takes a single step never sees it.
# The line to read is "Parameter indices which did not receive grad": they count through `model.parameters()`,
# trainable ones only. The cures: remove the parameter, let it take part (`+ 0 * spare.sum()`), or
# `find_unused_parameters=True`, which searches the graph in each step.
#
# ### Exercise 6: diagnose
#
# Another network, another message. Which layer is idle? **a** stem, **b** norm, **c** aux, **d** head. (Don't look at
# its `forward`: in a real job that is 600 lines.)

# %% exercise-unused tags=["exercise"]
from course_lib.lab.ddp_evidence import Detector, second_step_error

print(*(name for name, _ in Detector().named_parameters()))
print(second_step_error())
# SOLUTION
idle = "c"
# STUDENT: idle = ...
# END
check.unused(idle)

# %% [markdown]
# **Buffers.** A batch norm keeps a running mean, which is no parameter and has no gradient, so no all-reduce touches
# it. Rank 0 sees the values 0 and 2, rank 1 sees 10 and 12; the momentum is 0.1.
#
# **A detour.** Somebody writes `model.module(x)` instead of `model(x)`, say to reach a method of their own. Rank 0
# has x = 1, rank 1 has x = 3, and the learning rate is 1: three steps go to -6.
#
# **A rank that stays away.** Rank 1 has no sample left and leaves out its backward. The timeout is 1.5 s.
#
# **Predict** the running means on both ranks, where three steps along `model.module` lead, and which rank reports the
# error.

# %% scene-buffers
for rank, seen in enumerate(observed(evidence, "buffers")):
    print(f"running mean on rank {rank}: " + ", ".join(f"{name} {mean:.1f}" for name, mean in seen.items()))
zero, one = observed(evidence, "bypass")
for way in ("model(x)", "model.module(x)"):
    print(f"weights through {way}: rank 0 {zero[way]}, rank 1 {one[way]}")

for rank, seen in enumerate(observed(evidence, "hang")):
    print(f"rank {rank}: {seen['said'].split('] ')[-1].split(' for ')[0]}")

# %% [markdown] tags=["exercise"]
# The running means differ after a step: 0.1 and 1.1. DDP sends rank 0's buffers along before the *next* forward; who
# evaluates or saves *between* steps must do that first (the engine does, before each evaluation and snapshot).
# `SyncBatchNorm` would use all ranks' values.
#
# The detour is worse. DDP prepares the all-reduce in *its* forward; without it each rank trains alone: -3 here, -9
# there. No error, and rank 0's curve looks healthy. The engine compares the ranks' digests before each snapshot for
# this reason.
#
# And the rank that stayed away says nothing; its *victim* has the error. torch's timeout is 30 minutes for gloo and
# 10 for NCCL by default. **Every rank calls the same collectives in the same order**: an `if rank == 0:` around one,
# or a loop that ends a step earlier on one rank, is this scene.
#
# ### What each bug looks like
#
# | bug | what you see | shown |
# | --- | --- | --- |
# | function not importable | child: `Can't get attribute`; parent: exit code 1 | part 1 |
# | evaluation padded, or a mean of means | metric changes with the world size | part 4 |
# | tail not weighted | leaves the one-process curve in an epoch's *last* step | part 5, exercise 7 |
# | a rank leaves out a collective | all wait, then "timed out" on the ranks that did *nothing wrong* | part 7 |
# | loss not divided by micro-batches | wrong from step 1; like a larger learning rate | part 6 |
# | batch size per rank | fewer steps an epoch when ranks are added; slower curve | part 6 |
# | unused parameter | error in step 2; step 1's gradients differ per rank | part 7 |
# | buffers not broadcast | test metrics differ per rank, weights don't | part 7 |
# | `model.module(x)` | ranks' weights drift apart from step 1 | part 7 |
# | `set_epoch` forgotten | right for one epoch; then each has the order of the first | exercise 7 |
#
# ### Exercise 7: diagnose
#
# Five jobs of two ranks: linear regression on 19 samples in steps of 8, so each epoch is 8, 8 and a tail of 3. At
# most one bug in each, and none crashed. Match A to E with: `nothing wrong`, `called model.module`, `tail not
# weighted`, `set_epoch forgotten`, `loss not divided`.

# %% mystery tags=["exercise"]
from course_lib.lab.fig03 import bugs_figure
from course_lib.lab.two_ranks import trace

bugs_figure({letter: trace(bug) for letter, bug in check.curves.items()}, steps_per_epoch=3)

# %% exercise-bugs tags=["exercise"]
# SOLUTION
found = {
    "A": "tail not weighted",
    "B": "loss not divided",
    "C": "nothing wrong",
    "D": "set_epoch forgotten",
    "E": "called model.module",
}
# STUDENT: found = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}
# END
check.bugs(found)

# %% [markdown]
# ## Ten questions
#
# Answer before you unfold. Most of them change something above, so you can try it.
#
# 1. You run `scripts/ddp_spawn.py` with `--processes 3` instead of 2 (group norm, float64, one epoch). How far is its
#    curve from the one-process curve?
#    <details><summary>answer</summary>Below 1e-8, as with two: the global batch is 64 at every world size, and each
#    sample weighs 1/64. Only the order of the sums differs.</details>
# 2. In the `tail` scene the samples are 1, 2 and 3 instead of 1, 2 and 9. What does `plain` give?
#    <details><summary>answer</summary>(1.5 + 3) / 2 = 2.25; the truth is 2.</details>
# 3. The ring figure with 8 ranks: how many rounds, and after how many does some rank first hold a complete sum?
#    <details><summary>answer</summary>14 rounds; after 7, at the end of the reduce-scatter, each rank holds exactly
#    one.</details>
# 4. The recorded network has 12 layers, a bucket for each. How many all-reduces begin before the last gradient?
#    <details><summary>answer</summary>Eleven: only the last bucket waits for the last gradient.</details>
# 5. `DistributedSampler` on 5 samples and 4 ranks: which samples are asked twice?
#    <details><summary>answer</summary>0, 1 and 2: it pads to 8, the next multiple of 4.</details>
# 6. In the `accumulate` scene, `no_sync` also covers the last micro-batch. How many all-reduces, and which gradient
#    on rank 0?
#    <details><summary>answer</summary>None, and 2.5: the mean of rank 0's own 1, 2, 3 and 4. Rank 1 has 6.5, and the
#    ranks part.</details>
# 7. The `unused` scene's loop runs once instead of twice. What does the log show?
#    <details><summary>answer</summary>No error at all, and gradients of 1 and 3 that were never averaged.</details>
# 8. In the `buffers` scene rank 1 sees 20 and 22 instead of 10 and 12. The running means after a step, and after the
#    broadcast?
#    <details><summary>answer</summary>0.1 and 2.1; then 0.1 on both. Rank 1's view is thrown away, not
#    averaged.</details>
# 9. Curve A of exercise 7, but with 16 samples instead of 19. What does it look like?
#    <details><summary>answer</summary>Flat zero: two full steps an epoch, equal shares, so the missing weight is 1
#    anyway. The bug waits for other data.</details>
# 10. In the `bypass` scene both ranks feed x = 1. Do the weights through `model.module(x)` still drift apart?
#     <details><summary>answer</summary>No: equal start, equal gradients. Bugs of this kind hide whenever all ranks
#     see the same data.</details>
#
# ## In five lines
#
# 1. One process for each device; a worker is a function that can be imported, and is told rank, world size and where
#    to meet.
# 2. DDP gives an equal start and equal gradients: a ring all-reduce, bucket by bucket, while backward still computes.
# 3. The true mean is yours: exact shares, losses weighted by the local count, sums before divisions; a rank without
#    samples takes part.
# 4. The global batch is the experiment's. Change it, and you change the steps, the learning rate and the result.
# 5. The yardstick for all of it: the one-process curve. Bugs here don't crash; they leave that curve, and *where*
#    tells which one it is.
#
# One thing we had to do by hand: start the processes. And when one dies, nobody starts it again. That is torchrun's
# job: [04 · torchrun](04_torchrun.ipynb). (Solutions: [solutions/03_ddp.ipynb](solutions/03_ddp.ipynb).)
