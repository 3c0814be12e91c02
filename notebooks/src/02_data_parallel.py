# %% [markdown]
# # 02 · Data parallel: one process, many devices
#
# You have four GPUs in one machine and a script for one. PyTorch offers to settle the matter in a single line,
# `model = nn.DataParallel(model)`, and its own manual advises against it. Both are worth understanding. The line is
# short because it hides a simple machine of four parts; take it apart, and you know what *every* kind of data
# parallelism has to do, and why this one loses to the next notebook's.
#
# **Predict.** Write down two answers before you go on. Four devices are each to take a quarter of a batch:
#
# 1. What has to travel between them in *every* step, and what only once?
# 2. Can four threads of one Python process keep four devices busy?
#
# *For teachers: 60 minutes. To discuss: your team has one machine with two GPUs, a script that works, and a deadline
# tomorrow. Would you put in the one line? What would you look at first?*

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
from course_lib.lab.notebook import fresh, setup

setup()

# %% [markdown]
# ## 1. The one line, on this machine
#
# A hook tells us each time that the network's `forward` is called: on which device, and with how many samples. We wrap
# the network, and send a batch of 64 through it. **How many calls do you expect, and of what size?**

# %% pass-through
import torch
from torch import nn

from course_lib.workloads.vision import build_model

device = "cuda" if torch.cuda.is_available() else "cpu"
network = build_model("tiny", "group", in_channels=1, num_classes=10, seed=0).to(device)
calls = []
network.register_forward_pre_hook(lambda module, inputs: calls.append((inputs[0].device.type, len(inputs[0]))))

wrapped = nn.DataParallel(network)
wrapped(torch.zeros(64, 1, 32, 32, device=device))
print("devices it works on:", wrapped.device_ids)
print("calls of forward:   ", calls)

# %% [markdown]
# One call, with all 64 samples, and no device to share them with. **Nothing is parallel here**, and nobody said so:
# without a GPU, `nn.DataParallel` hands its input straight to the network, without a warning. (So it does with one
# GPU. If you have several, say `setup(device="cuda")` above and you'll see a call for each. The outputs that you find
# in this notebook were made without a GPU.)
#
# It did change one thing. **What do you expect these to print?**

# %% keys
plain = build_model("tiny", "group", in_channels=1, num_classes=10, seed=1)
print("plain:  ", next(iter(plain.state_dict())))
print("wrapped:", next(iter(wrapped.state_dict())))

before = plain.head.weight.clone()
report = plain.load_state_dict(wrapped.state_dict(), strict=False)
print(f"of {len(plain.state_dict())} entries, {len(report.missing_keys)} are missing; not one error")
print("did loading change the weights?", not torch.equal(plain.head.weight, before))

# %% [markdown]
# Each name has a `module.` in front, since the wrapper holds your network as its child of that name. A checkpoint
# saved from the wrapper doesn't fit the plain network. With `strict=True` (the default) you get a long error. With
# `strict=False`, which many a forum recommends against that error, you get *no weights at all* and a network that
# starts from scratch. **The cure is to save `wrapped.module.state_dict()`**; the same is true of DDP.
#
# ## 2. Four primitives
#
# With devices to work on, `DataParallel` does four things in every forward pass:
#
# | | does | here, on a CPU |
# | --- | --- | --- |
# | **scatter** | cuts the batch into a part for each device | a part for each *lane* |
# | **replicate** | copies the network to each device | a copy for each lane |
# | **parallel_apply** | runs each copy on its part, in a thread for each device | the same, in threads |
# | **gather** | puts the outputs together on the first device | the same |
#
# A *lane* is a thread that stands for a device: the mechanics are all there, and nothing gets faster. The lanes live
# in [course_lib/workloads/lanes.py](../course_lib/workloads/lanes.py), a short file. **Don't open it yet: you will
# write two of the four.**
#
# ### Scatter
#
# How would you deal out 10 samples to 4 lanes? And 5? Decide, then look.

# %% scatter
from course_lib.workloads.lanes import gather, parallel_apply, replicate, scatter

for samples in (8, 10, 5):
    print(f"{samples:>2} samples for 4 lanes:", [part.tolist() for part in scatter(torch.arange(samples), 4)])

# %% [markdown] tags=["exercise"]
# Not 3, 3, 2, 2! And 5 samples don't even reach the fourth lane.
#
# **Exercise 1 (write).** Write `scatter` with slices alone. The rule is in the three lines above.
#
# **Exercise 2 (predict).** The last batch of an epoch has 9 samples, and your machine 8 GPUs. How many GPUs have
# nothing to do?

# %% exercise-scatter tags=["exercise"]
from course_lib.lab.exercises import n02 as check


def my_scatter(batch, lanes):
    """A list of parts of the (N, ...) batch, in order, of which none is empty."""
    # SOLUTION
    size = -(-len(batch) // lanes)  # rounded up
    return [batch[low : low + size] for low in range(0, len(batch), size)]
    # STUDENT: ...
    # END


check.scatter(my_scatter)

# %% exercise-idle tags=["exercise"]
# SOLUTION
idle_gpus = 3
# STUDENT: idle_gpus = ...
# END
check.idle(idle_gpus)

# %% [markdown]
# ### Replicate
#
# The copies come next. This is the course's own function, shown from its file:

# %% replicate-source
from inspect import getsource

from IPython.display import Markdown, display

display(Markdown(f"```python\n{getsource(replicate)}```"))
first, second = replicate(plain, 2), replicate(plain, 2)
print("lane 0 works on the network itself:  ", first[0] is plain and second[0] is plain)
print("lane 1 has the same copy as last time:", first[1] is second[1])

# %% [markdown]
# *Made anew in every step* is no oversight. The optimizer changes only the one real network, on the first device; a
# copy is out of date as soon as it has been used. So all weights travel again, in each forward pass. Keep that in
# mind.
#
# ### Parallel apply
#
# Each copy runs on its part. Here it is without threads:

# %% one-by-one tags=["exercise"]
import torch
from torch.func import functional_call


def one_by_one(replicas, parts, module):
    """The outputs of the parts; every replica computes with the weights of `module`."""
    weights = dict(module.named_parameters())
    return [functional_call(replica, weights, (part,)) for replica, part in zip(replicas, parts, strict=True)]


# %% [markdown] tags=["exercise"]
# `functional_call` runs a replica with weights that it is lent. Real devices can't share memory like this:
# `DataParallel` sends the weights out with an operation that autograd knows, so that the gradients of all copies flow
# back and add up in the one real network. Lending has the same effect here: all lanes' gradients meet in the same
# weights.
#
# **Exercise 3 (write).** Make the lanes run at the same time, in a thread each. What comes out must be as before: in
# the order of the parts; with all gradients in `module`; and without a graph when the caller is inside
# `torch.no_grad()`. (That last one has bitten people: the mode belongs to a thread.)

# %% exercise-parallel-apply tags=["exercise"]
from concurrent.futures import ThreadPoolExecutor


def my_parallel_apply(replicas, parts, module):
    """The outputs of the parts, computed in a thread each."""
    weights = dict(module.named_parameters())
    # SOLUTION
    grad = torch.is_grad_enabled()

    def lane(replica, part):
        with torch.set_grad_enabled(grad):  # a new thread begins with gradients on
            return functional_call(replica, weights, (part,))

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lane, replicas, parts))
    # STUDENT: ...
    # END


check.parallel_apply(my_parallel_apply)

# %% tags=["solution"]
# For comparison: the one that the course uses.
from inspect import getsource

from IPython.display import Markdown

from course_lib.workloads import lanes as course

Markdown(f"```python\n{getsource(course.parallel_apply)}```")

# %% [markdown]
# ### Gather, and all of it together
#
# `gather` is one call, `torch.cat`. With it, this is the whole of `DataParallel.forward`:

# %% five-lines
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from course_lib.workloads.data import DataSpec, load


def through_lanes(module, images, lanes):
    """The module's scores for the (N, ...) images, computed in parts."""
    parts = scatter(images, lanes)
    replicas = replicate(module, len(parts))
    outputs = parallel_apply(replicas, parts, module)
    return gather(outputs)


digits = load(DataSpec("digits", root=None, dtype=torch.float64))
images, labels = default_collate([digits.train[index] for index in range(64)])
print("scores:", tuple(through_lanes(plain.double(), images, lanes=4).shape))

# %% [markdown]
# ## 3. The same gradients?
#
# The loss comes after `gather`: one mean over all 64 samples, computed on the first device. **Predict:** with 4 lanes,
# is the gradient equal to the plain network's? With 7 lanes, whose parts are 10, 10, 10, 10, 10, 10 and 4?


# %% gradients
def gradient(lanes, norm="group"):
    """All gradients of the tiny network in one vector, in float64; 0 lanes: the plain network."""
    module = build_model("tiny", norm, in_channels=1, num_classes=10, seed=0, dtype=torch.float64)
    scores = through_lanes(module, images, lanes) if lanes else module(images)
    cross_entropy(scores, labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


expected = gradient(lanes=0)
for lanes in (1, 2, 4, 7):
    distance = (gradient(lanes) - expected).abs().max().item()
    print(f"{lanes} lane{'s' * (lanes > 1)}: {len(expected):,} gradients, all within 1e-10: {distance < 1e-10}")

# %% [markdown]
# **Equal**, but for the last bits of rounding, whatever the parts. The loss is a mean over samples, and its gradient
# is a sum over samples: cut the sum where you like, and add up the pieces. That is the promise on which all data
# parallelism rests, and uneven parts can't break it *here*, because the mean is taken after `gather`. (Who takes a
# mean in each lane, and then the mean of those, breaks it. You'll meet the culprit at the end of this notebook, and
# again in the next one.)
#
# ### One step, with a clock
#
# Where does the time go? We run some steps with a clock in each phase, and draw the fastest one, which other programs
# disturbed least.

# %% step-figure
from course_lib.lab.fig02 import step_figure
from course_lib.lab.phases import fastest, share, timed_step

network = build_model("tiny", "group", in_channels=1, num_classes=10, seed=0)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)


def some_steps(lanes, count=9):
    """Recorded steps with so many lanes, without the first two, which are slow."""
    return [timed_step(network, lanes, images.float(), labels, optimizer) for _ in range(count + 2)][2:]


step_figure(fastest(some_steps(lanes=2)))

# %% [markdown]
# From left to right: the process cuts the batch and copies the network; then it waits while the lanes run; then it is
# alone again with the gathered scores, the loss, and the optimizer. **Everything in the upper row that stands before
# or after the lanes is time in which all devices but the first wait,** with one exception: on GPUs `backward` runs on
# all of them, as `forward` does. (On a CPU autograd takes the lanes one after another.)
#
# ## 4. Break it: batch norm
#
# So far the network had *group* norm, which treats each sample by itself. *Batch* norm centres a sample by the mean of
# the batch it is in, and keeps a running mean for evaluation. Now: which batch, and who keeps it? **Predict** for 2
# lanes: are the gradients still equal? Of whose samples does the running mean tell afterwards?

# %% batch-norm
from course_lib.lab.fig02 import statistics_figure


def running_mean(batch, lanes):
    """Of the first norm layer, after one forward pass in training."""
    module = build_model("tiny", "batch", in_channels=1, num_classes=10, seed=0, dtype=torch.float64)
    through_lanes(module, batch, lanes)
    return module.norm.running_mean


in_lanes, half, whole = running_mean(images, 2), running_mean(images[:32], 1), running_mean(images, 1)
distance = (gradient(2, norm="batch") - gradient(0, norm="batch")).abs().max().item()
print("gradients within 1e-10:                     ", distance < 1e-10)
print("running mean as from the whole batch:       ", torch.allclose(in_lanes, whole, rtol=0, atol=1e-10))
print("running mean as from lane 0's 32 samples:   ", torch.allclose(in_lanes, half, rtol=0, atol=1e-10))
statistics_figure(in_lanes.tolist(), half.tolist(), whole.tolist())

# %% [markdown]
# Each lane took its own 32 samples for the whole world. So the network that you train depends on the number of
# devices: 64 samples on 2 lanes are batch norm over 32, on 16 lanes over 4. And every orange dot sits in a blue ring:
# what lane 1 has seen is **thrown away with its copy**. Only lane 0 writes into the buffers that stay.
#
# That is why this course compares its scripts with `--norm group`. DDP has the same trouble; there `nn.SyncBatchNorm`
# is the cure. `DataParallel` has none.
#
# ## 5. From notebook 01's script to this one
#
# The whole difference, made from the two files:

# %% diff
from course_lib.lab.diff import show_diff

show_diff("single_gpu", "data_parallel")

# %% [markdown]
# Not a line of the loop changes. *That* is the charm of `DataParallel`, and it is real. Without a GPU the script takes
# `CpuLanes`, the four functions above in a wrapper, and says so in a line. Find that line below.
#
# **Predict.** The same seed, the same order of samples, one epoch. How far apart are the losses at the first step? At
# the last? The second pair runs in double precision, which has nine more decimal digits.

# %% launches tags=["nbval-ignore-output"]
one, lanes = fresh("02-one"), fresh("02-lanes")
# !python scripts/single_gpu.py --norm group --epochs 1 --run-dir {one}
# !python scripts/data_parallel.py --lanes 2 --norm group --epochs 1 --run-dir {lanes}

one64, lanes64 = fresh("02-one64"), fresh("02-lanes64")
# !python scripts/single_gpu.py --norm group --epochs 1 --dtype float64 --run-dir {one64}
# !python scripts/data_parallel.py --lanes 2 --norm group --epochs 1 --dtype float64 --run-dir {lanes64}

# %% claims
from course_lib.lab.claims import every_sample_once, first_difference, max_difference
from course_lib.lab.fig02 import rounding_figure

print("first two losses within 1e-5:         ", first_difference(one, lanes, steps=2) < 1e-5)
print("float64, the whole epoch within 1e-8: ", max_difference(one64, lanes64) < 1e-8)
print("every sample once:                    ", all(map(every_sample_once, (one, lanes, one64, lanes64))))
rounding_figure({"float32": (one, lanes), "float64": (one64, lanes64)})

# %% [markdown]
# Sums in another order round in another way. A last digit that differs moves the weights a little, those move the next
# loss, and in float32 that soon shows. In float64 the same story begins about a billion times lower, and stays there.
# **So it is rounding and no mistake**: a mistake would be as large in both. Remember this test, since it tells a wrong
# gradient from a harmless one in a minute.
#
# ## 6. Why it loses
#
# Right gradients, unchanged loop. So why does everybody use DDP? There are four reasons; we measure two, compute one,
# and explain one.
#
# ### Reason 1: one process, one interpreter
#
# Python lets only one thread at a time run Python (the *global interpreter lock*, GIL). Below, two workers just add up
# numbers in Python: first two threads, then two processes, with the same code. **Predict:** how many cores' worth of
# work does each pair get?

# %% race tags=["nbval-ignore-output"]
import multiprocessing
from queue import SimpleQueue
from threading import Barrier, Thread

from course_lib.lab.busy import cores_used, race
from course_lib.lab.fig02 import turns_figure

spawn = multiprocessing.get_context("spawn")
threads = race(Thread, Barrier(2), SimpleQueue())
processes = race(spawn.Process, spawn.Barrier(2), spawn.SimpleQueue())
window = 0.04  # seconds: we look at the 40 ms of each race in which other programs disturbed it least
print(f"cores used: threads {cores_used(threads, window):.2f}, processes {cores_used(processes, window):.2f}")
turns_figure(threads, processes, window)

# %% race-claim
print("two threads never use more than one core's worth:", cores_used(threads) < 1.1)

# %% [markdown]
# That was the second thing to predict, and the answer is no. The threads take turns, some milliseconds each; the
# processes run side by side (where two cores are free: on a busy machine both numbers fall, since other programs want
# their share). Adding up numbers is an unkind test, for PyTorch lets go of the lock inside its larger operations, so
# lanes do overlap there. What doesn't overlap is the Python *between* the operations: `forward` methods, hooks, and
# handing each operation to its GPU. Eight GPUs are fed by one interpreter in turn. DDP starts a process for each
# device, and has eight. (A free-threaded build of Python has no such lock; the claim above doesn't hold there.)
#
# ### Reason 2: new replicas in each step
#
# You saw the `replicate` bar. What part of the step is it, with 2, 4, 8 lanes and the same 64 samples? **Predict the
# trend.**

# %% replicate-share tags=["nbval-ignore-output"]
from course_lib.lab.fig02 import share_figure

share_figure({lanes: share(some_steps(lanes, count=6), "replicate") for lanes in (2, 4, 8)})

# %% traffic
resnet = build_model("resnet18", "group", in_channels=3, num_classes=10, seed=0)
weights = sum(parameter.numel() for parameter in resnet.parameters())
for gpus in (2, 4, 8):
    arrive = weights * 4 * (gpus - 1) / 1e6
    print(f"{gpus} GPUs: {arrive:>5.0f} MB of weights arrive in each step; with DDP 0, since every rank keeps its own")

# %% [markdown]
# Each lane adds a copy, and the work to be shared stays the same: the part grows. The percentages are those of *this*
# network and machine, where a copy is made in memory; on GPUs it goes over a wire instead, and a large batch hides
# more of it. What is the same everywhere is the count, here for a ResNet-18. (DDP sends *gradients*, as `DataParallel`
# does too, and overlaps that with `backward`. Its ranks then make the same optimizer step each for itself, so the
# weights never travel. The next notebook shows how.)
#
# That was the first thing to predict: in every step parts, weights, outputs and gradients travel. Nothing travels only
# once.
#
# ### Reason 3: the first GPU is the fullest
#
# The optimizer's state lives on GPU 0 alone; the scores are gathered there; the loss is computed there. For ten
# classes that is little. Take a language model instead, GPT-2's smallest: it gives a score for each of 50,257 tokens
# *at each position*.

# %% [markdown] tags=["exercise"]
# **Exercise 4 (predict).** 32 sequences of 1,024 tokens, 4 GPUs, float32. GPT-2 gives a score for each of 50,257
# tokens at each position. How many GB (1e9 bytes) of scores does `gather` put on GPU 0? Answer before you run the cell
# after the next.

# %% exercise-gathered tags=["exercise"]
# SOLUTION
gigabytes = 32 * 1024 * 50257 * 4 / 1e9
# STUDENT: gigabytes = ...
# END
check.gathered(gigabytes)

# %% memory
from course_lib.lab.fig02 import memory_figure

width, layers, vocabulary, tokens = 768, 12, 50257, 1024
count = (vocabulary + tokens) * width + layers * (12 * width**2 + 13 * width) + 2 * width
weights, scores = count * 4 / 1e9, 32 * tokens * vocabulary * 4 / 1e9
print(f"{count:,} parameters: {weights:.2f} GB of weights, and {scores:.2f} GB of scores")

each = {"weights": weights, "gradients": weights}
own = {"own scores": scores / 4, "their gradient": scores / 4}
first = {"Adam's two averages": 2 * weights, "all scores": scores, "gradient of all scores": scores}
memory_figure(
    [each | own | first, *[each | own] * 3], "GPT-2 small on 4 GPUs: computed from the mechanics, not measured"
)

# %% [markdown]
# This is a drawing: sizes computed from how `DataParallel` works, activations (the same everywhere) left out, nothing
# measured. But its shape is what people meet: **GPU 0 runs out of memory while the others have room**, and its memory
# sets the batch for all.
#
# ### Reason 4: the wires
#
# Weights go out from GPU 0 and gradients come back to it in every step, so all depends on how GPUs reach one another.
# With **NVLink** they have fast wires of their own. With **P2P** (peer to peer) over PCIe one GPU reads the other's
# memory directly, over the bus that all share. Without P2P each copy makes a detour through the host's memory. **None
# of this is measured here, for there is no GPU**; `nvidia-smi topo -m` shows what you have. And no wire helps beyond
# the one machine: a single process can't drive the GPUs of two. DDP's ring spreads its traffic evenly over the ranks,
# on one machine or on many.
#

# %% [markdown] tags=["exercise"]
# ## 7. Who is to blame?
#
# **Exercise 5 (diagnose).** Four colleagues each wrote a `DataParallel` with two lanes. One is right. One network has
# **batch norm**. One takes a loss in each lane, and then the **mean of means**. One **lost copies**: its lanes compute
# with copies of the weights and don't lend them. For each, three distances: of its gradient from the plain network's,
# for 64 samples and for 63; and from what lane 0's half of the samples gives alone. Who is who?

# %% suspects tags=["exercise"]
import torch
from torch.utils.data import default_collate

from course_lib.lab.fig02 import suspects_figure
from course_lib.workloads.data import DataSpec, load

digits = load(DataSpec("digits", root=None, dtype=torch.float64))
samples, targets = default_collate([digits.train[index] for index in range(64)])
suspects_figure(check.suspects(samples, targets))

# %% exercise-culprits tags=["exercise"]
# Give each number one of: "batch norm", "mean of means", "lost copies", "nothing wrong".
# SOLUTION
culprits = {"1": "batch norm", "2": "mean of means", "3": "nothing wrong", "4": "lost copies"}
# STUDENT: culprits = {"1": ..., "2": ..., "3": ..., "4": ...}
# END
check.culprits(culprits)

# %% [markdown]
# ## Ten questions
#
# Answer first, then unfold.
#
# 1. `data_parallel.py --lanes 4 --norm group` instead of `--lanes 2`. What becomes of "first two losses within 1e-5"?
#    <details><summary>answer</summary>It stays true. The gradient is a sum over samples, wherever you cut
#    it.</details>
# 2. Both scripts with `--norm batch`. At which step do the losses part, and is it rounding?
#    <details><summary>answer</summary>At the first one, visibly, in float64 as well: each lane centres by its own
#    samples, so the scores differ before any weight has changed. It isn't rounding.</details>
# 3. `--lanes 1`. How far apart are the two scripts' losses then?
#    <details><summary>answer</summary>Exactly 0.0: one part, the network itself, nothing added up in another
#    order.</details>
# 4. `scatter(torch.arange(12), 8)`: how many parts, and of which sizes?
#    <details><summary>answer</summary>Six parts of 2. The size is 12/8 rounded up; two lanes stand idle.</details>
# 5. In section 1 you load `wrapped.module.state_dict()` into `plain`, again with `strict=False`. How many keys are
#    missing?
#    <details><summary>answer</summary>None. The inner network has the names without <code>module.</code>.</details>
# 6. In section 4 you make the samples of lane 1, `images[32:]`, all zeros. What becomes of the orange dots?
#    <details><summary>answer</summary>Nothing. They are lane 0's, and stay in their rings; the grey ones
#    move.</details>
# 7. You race four threads in place of two. How many cores do they use?
#    <details><summary>answer</summary>Still one core's worth at most; each gets a quarter of it.</details>
# 8. You measure the replicate share with 4 lanes again, with 512 samples a step. Does it grow or shrink?
#    <details><summary>answer</summary>It shrinks: copies cost the same, and the rest of the step takes eight times
#    the work.</details>
# 9. A colleague's two curves, lanes and one device, are 1e-3 apart after an epoch, in float32 *and* in float64.
#    Rounding?
#    <details><summary>answer</summary>No. In float64 rounding would be some billion times smaller. The gradients
#    really differ.</details>
# 10. In the memory drawing, the model is trained on 8 GPUs with the same 32 sequences. What happens to GPU 0's "all
#     scores"?
#     <details><summary>answer</summary>It stays as it is: they are all gathered there, however many GPUs made them.
#     Only "own scores" halve.</details>
#
# ## In five lines
#
# - `DataParallel` is scatter, replicate, parallel_apply and gather, in one process; on a CPU it silently passes
#   through.
# - Gradients are sums over samples, so lanes give the plain network's gradient: equal in float64 to 1e-10.
# - Batch norm sees only its lane's samples, and only lane 0's running statistics survive.
# - It loses: one interpreter for all devices, new replicas in each step, a full GPU 0, and weights on the wires.
# - Save `wrapped.module.state_dict()`, or every name begins with `module.`.
#
# What if each device had a process of its own, which keeps its weights and sends only gradients? **[03 ·
# DDP](03_ddp.ipynb)**
