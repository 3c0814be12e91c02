# %% [markdown]
# # 04 · torchrun: die, come back, lose nothing
#
# Many ranks are many ways to die. One out of memory, one bad disk, one machine that reboots, and a job of a
# thousand processes is gone. `torchrun` can start your processes again. *What they then know of their past is your
# business.*
#
# **The question of this notebook:** what must a training job remember, so that being killed costs it nothing but
# time?
#
# You will kill the code that most tutorials teach and see what it costs, write a `save` and a `load` that survive a
# death at any line, pick bugs out of a line-up, press Ctrl-C, go on with another number of ranks, and at the end make
# a script survive that knew nothing of all this.
#
# *For teachers: 95 minutes. To discuss: "A colleague says: we save every epoch, so we lose at most one epoch. Name
# three more things that they lose."*

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
from course_lib.lab.notebook import fresh, setup

setup()

# %% [markdown]
# ## 1 · Thirty lines that everybody copies
#
# This is the pattern of the classic fault-tolerance tutorial. At the end of each epoch rank 0 writes a snapshot; at
# every start, each rank looks for one. Read it before you run it. If you find something that you'd do differently,
# keep it in mind.
#
# In a moment you'll start it on two ranks and kill rank 1 with SIGKILL, the signal that nobody can catch. The
# command has no `--max-restarts`. **How many times will torchrun start the job again?** Commit to a number below
# the code.

# %% the-classic
from pathlib import Path

from IPython.display import Markdown

lines = Path("notebooks/classic_torchrun.py").read_text().splitlines()
first = lines.index("class Trainer:")
Markdown("\n".join(["```python", *lines[first : first + 33], "```"]))

# %% restarts-by-default tags=["exercise"]
from course_lib.lab.exercises import n04 as check

# SOLUTION
prediction = 0
# STUDENT: prediction = ...
# END
check.restarts_by_default(prediction)

# %% start-classic tags=["nbval-ignore-output"]
import os
import signal

from course_lib.lab.launch import start

classic = "notebooks/classic_torchrun.py --run-dir"
dead = fresh("04-classic")
job = start(f"torchrun --standalone --nproc-per-node 2 {classic} {dead}")
print(job.tree())

print("\nThe environment of rank 1:")
worker = next(p for p in job.processes() if p.environment.get("RANK") == "1")
wanted = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
wanted += ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
for name in wanted:
    print(f"{name:28} {worker.environment[name]}")

# %% [markdown]
# Three processes. The one at the top, the **agent**, is torchrun itself: it does no training, it starts
# **workers**, one for each rank, and watches them. How does a worker know which one it is? Nobody passed it an
# argument: the environment *is* the interface. `RANK` of `WORLD_SIZE` says who I am in the whole job, `LOCAL_RANK`
# who I am on this machine (so, which GPU is mine), `GROUP_RANK` which machine this is. At `MASTER_ADDR:MASTER_PORT`
# a small key-value store waits, where the ranks find each other; that is all that `init_process_group` needs. And
# the last two lines say how often this agent has started its workers again, and how often it may.
#
# Now the kill. It is real, and it is yours.

# %% kill-classic tags=["nbval-ignore-output"]
job.wait_for(step=25)
os.kill(job.pid(rank=1), signal.SIGKILL)
job.wait(check=False, show=False)
print("torchrun's exit code:", job.exit_code)

# %% claims-classic
from torch.distributed.run import get_args_parser

from course_lib.lab.claims import restarts, times_finished

print(f"exit code {job.exit_code} · restarts {restarts(dead)} · processes left {len(job.processes())}")
print("max_restarts, if nothing is said:", get_args_parser().get_default("max_restarts"))

# %% [markdown]
# One worker died, so the agent ended the other one too, and then itself. Two things to take along:
#
# - **The default number of restarts is 0.** Fault tolerance that you didn't ask for, you don't have.
# - **torchrun answers 1 to every failure.** Killed, out of memory, a typo in an option: always 1. Whoever wants to
#   know why must read on.
#
# ## 2 · Who died first?
#
# So let us read on. Here is everything that the two workers had to say, each in its own file. One of them was
# killed; the other was perfectly healthy. **If you didn't know, whom would you suspect?**

# %% two-logs tags=["nbval-ignore-output"]
for rank in (0, 1):
    print(f"================ rank {rank}\n{job.output(rank=rank)}")

# %% [markdown]
# The healthy rank fills a screen: it waited in an all-reduce for its peer, and the connection broke. The dead rank
# has its greeting, and then nothing, for SIGKILL leaves no time for last words. **The longest trace belongs to the
# survivor.** Most people who debug a distributed job for the first time spend an hour on it.
#
# Where is the truth? In three places: the *shortest* log; the agent, which saw how each child ended; and, when a
# worker died of a Python exception and its script asks for it (torch's `@record`; our scripts' `run(main)`), an
# `error.json` beside its log. The agent's summary is at the end of what it said:

# %% root-cause tags=["nbval-ignore-output"]
print(job.output(lines=9))
print()
for path in sorted(job.logs.rglob("*")):
    if path.is_file():
        print(path.relative_to(job.logs).as_posix(), path.stat().st_size, "bytes")

# %% [markdown]
# "Root Cause (first observed failure)" is the line to look for: rank 1, exit code -9, which is signal 9. There is
# no `error.json`: the dying worker itself would have to write it, and SIGKILL leaves no time for that either.
#
# **Exercise (diagnose).** Another job, on three ranks, recorded on another day. Who died first? (a) rank 0 · (b)
# rank 1 · (c) rank 2 · (d) the agent ended them all

# %% who-died tags=["exercise"]
from pathlib import Path

from course_lib.lab.exercises import n04 as check

print(Path("notebooks/recorded/who_died.txt").read_text())
# SOLUTION
answer = "c"
# STUDENT: answer = ...
# END
check.who_died(answer)

# %% [markdown]
# ## 3 · With restarts: what the thirty lines cost
#
# The same script, the same kill, and this time `--max-restarts 3`. There are 4 epochs of 10 steps, numbered 0 to 3.
# You kill after step 22, in the middle of epoch 2; epochs 0 and 1 are finished and saved. **With which epoch will
# it begin again?** Say a number, aloud if nobody is near.

# %% restart-classic tags=["nbval-ignore-output"]
twice = fresh("04-restarted")
job = start(f"torchrun --standalone --nproc-per-node 2 --max-restarts 3 {classic} {twice}")
job.wait_for(step=22)
os.kill(job.pid(rank=1), signal.SIGKILL)
job.wait(show=False)
print(job.output(rank=0, lines=5))

# %% claims-twice
from course_lib.lab import fig04

counts = times_finished(twice)
print(f"restarts {restarts(twice)} · epochs {list(counts)}")
print("epochs that were trained to their end twice:", sum(count == 2 for count in counts.values()))
fig04.epochs_trained(twice)

# %% [markdown]
# It came back, and nobody complained: the exit code is 0. But a *finished* epoch was trained again. `EPOCHS_RUN`
# holds the **index** of the finished epoch and is read as the **number** of finished epochs, and the two differ by
# one. The model has now seen each sample of that epoch twice and those of the others once. No error, no warning, a
# slightly different model.
#
# Look once more at the code above. There is more:
#
# - the **optimizer** isn't in the snapshot: momentum (Adam's moments, too) starts from zero, and a schedule would
#   start over;
# - it saves **only at the end of an epoch**, and an epoch may be eight hours;
# - `torch.save` writes **over the only snapshot there is**. Die in the middle of that, and there is none.
#
# This is what the agent did meanwhile, from the recorded events. Each set of workers is a **generation**:

# %% life-figure tags=["nbval-ignore-output"]
fig04.life_of_a_job(twice)

# %% [markdown]
# Look at how long the light parts are. A restarted worker is a *new process*: it imports torch, meets its peers,
# builds the model. And though only rank 1 was killed, rank 0 was replaced as well. Nothing in memory survives, on
# any rank. **Whatever isn't in the snapshot is gone.**
#
# **Exercise (predict).** The classic script again, now with 8 epochs (0 to 7). It is killed three times: in the
# middle of epoch 3, then in the middle of epoch 5, then in the middle of epoch 6. How many times, over the whole
# job, is an epoch trained to its end?

# %% epochs-in-all tags=["exercise"]
# SOLUTION
epochs = 11
# STUDENT: epochs = ...
# END
check.epochs_in_all(epochs)

# %% [markdown]
# ## 4 · Write it yourself: a save that can't be killed
#
# **Exercise (write).** Write `save(state, path)` and `load(path)`. `state` is a dict (weights, optimizer, position
# …). The rule: *whenever the process dies, the next one must find a whole state, the old one or the new one.* At
# the very first start there is nothing to find: then `load` returns `None`.
#
# The check will kill your `save` before each of its lines, before each operation on a file, and in the middle of
# each write (that leaves half a file). After every single kill it calls your `load`, and then your `save` again.
#
# A hint, since you can't guess it: on one file system, `os.replace(a, b)` happens entirely or not at all.

# %% save-and-load tags=["exercise"]
import os

import torch

from course_lib.lab.exercises import n04 as check


# SOLUTION
def save(state, path):
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)  # noqa: PTH105


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


# STUDENT: def save(state, path):
# STUDENT:     ...
# STUDENT:
# STUDENT:
# STUDENT: def load(path):
# STUDENT:     ...
# END
check.save_and_load((save, load))

# %% [markdown]
# Once it says *solved*, spoil it on purpose: save straight to `path`, or delete the old file "to make room". The
# check names the line of death. (This protects against the death of a *process*. When the *machine* dies, files
# that were "written" may still have been in memory only: that is notebook [05](05_snapshots.ipynb).)
#
# ## 5 · Ours, killed
#
# `scripts/ddp_torchrun.py` keeps everything: weights, buffers, optimizer, schedule, and the exact position in the
# epoch. It saves every 20 steps here, and the option `--fault` kills rank 1 in the backward pass of step 37. Steps
# count from 0. **How many steps will be done twice?**

# %% steps-again tags=["exercise"]
# SOLUTION
steps = 17
# STUDENT: steps = ...
# END
check.steps_again(steps)

# %% ours tags=["nbval-ignore-output"]
ours = "scripts/ddp_torchrun.py --epochs 3 --snapshot-every 20 --run-dir"
run = fresh("04-ours")
job = start(f"torchrun --standalone --nproc-per-node 2 --max-restarts 3 {ours} {run} --fault kill:rank=1,step=37")
job.wait_for(step=38, restarts=1)

# %% [markdown]
# The job died, came back, and is running still. Now press Ctrl-C. (Not the notebook's stop button, which is a hard
# kill: `job.interrupt()` sends what your terminal sends, SIGINT to everybody.) A polite stop is not a crash: the
# ranks agree on a step, save there, and leave.

# %% ctrl-c tags=["nbval-ignore-output"]
job.interrupt()
job.wait(check=False, show=False)
print(job.output(rank=0, lines=3), "\n\nexit code", job.exit_code)

# %% overlay
from course_lib.lab.claims import every_sample_once, replay_difference, replayed, world_sizes

print(f"restarts {restarts(run)} · steps done again {replayed(run)} · difference {replay_difference(run)}")
fig04.overlay(run)

# %% [markdown]
# The generation that died had done steps 20 to 36, and the one after it did them again, from the snapshot: the same
# steps, twice, by different processes, so one can be laid over the other. Not "about the same": the second did
# *exactly* what the first had done, and then went on where it had stopped.
#
# ## 6 · Another number of ranks
#
# Now suppose that in the meantime you were given a third GPU. The same command, with 3 ranks; and after a few steps
# Ctrl-C again. Then all is taken from you but one process: no torchrun at all, plain `python`. *Predict: which
# samples of the epoch will be trained twice, and which not at all?*

# %% three-ranks tags=["nbval-ignore-output"]
with start(f"torchrun --standalone --nproc-per-node 3 {ours} {run}") as job:
    job.wait_for(step=48)
    job.interrupt()
    job.wait(check=False)
# !python {ours} {run}

# %% claims-sizes
print(f"ranks at each start {world_sizes(run)} · steps done again {replayed(run)}")
print(f"every sample of every epoch once {every_sample_once(run)}")
fig04.who_used_what(run)

# %% [markdown]
# No gap and no overlap. Two ideas do this. The **order** of an epoch's samples is a pure function of the seed and
# the epoch, so nobody has to remember it. And the **global batch** is the same at any number of ranks: step *k*
# takes the next 64 samples, whoever is there to share them. What remains to be remembered is where we are: an epoch
# and a number of samples. The seventeen red steps are the price of the kill; the two Ctrl-Cs cost none.
#
# ## 7 · The line-up
#
# A snapshot that lacks a piece loads without an error. The loss looks fine. How would you notice? Here are seven
# resumed runs of a small network, trained in this very kernel. Each was killed after 30 steps (in its third epoch),
# and its snapshot lacked **one piece**, or none. You see how far each is from the run that nobody disturbed: its
# training loss, and the loss on held-out data (in `eval` mode, after each step). Zero is exact.
#
# **Exercise (diagnose).** Which curve is which? The suspects, in the order of the alphabet:
#
# | suspect | what its snapshot lacked |
# | --- | --- |
# | buffers | batch norm's running mean and variance, used in `eval` mode only |
# | epoch off by one | nothing; the finished epoch's number stood for the next one's, as in section 3 |
# | nothing missing | nothing |
# | optimizer | the momentum of SGD |
# | position | how far the epoch had got: it begins the epoch again |
# | random state | which units dropout will drop |
# | scheduler | how far the learning rate had come down |
#
# A question that solves half of them: *can the very first step already be different, if weights and batch are the
# same?*

# %% line-up-figure tags=["nbval-ignore-output"]
from course_lib.lab import fig04

fig04.line_up()

# %% line-up tags=["exercise"]
# SOLUTION
answer = {"1": "random state", "2": "buffers", "3": "nothing missing", "4": "epoch off by one"}
answer |= {"5": "optimizer", "6": "position", "7": "scheduler"}
# STUDENT: answer = {"1": ..., "2": ..., "3": ..., "4": ..., "5": ..., "6": ..., "7": ...}
# END
check.line_up(answer)

# %% [markdown]
# <details><summary>How a detective reads them (after you have tried)</summary>
#
# Blue leaves zero at the *first* step when the first forward pass was another: other dropout (random state), or
# other samples (position, epoch). Those two also do too many steps, by a piece of an epoch or by a whole one. At
# the *second* step: the same forward, but another update (optimizer). At the *third*: the first update was right,
# since the optimizer's own state carries its current learning rate, and the lost schedule spoiled the rate for the
# next. Only red leaves: training never looks at the running statistics (buffers), and they heal as new batches come
# in, so a test a day later finds nothing.
# </details>
#
# In your own project this is a test of a few lines: train 2n steps; train n, save, load in a new process, train n
# more; demand a difference of 0.0, in training and in evaluation. Not "close": *nothing missing* is zero in both.
#
# ## 8 · The stale store
#
# One trap isn't in your code at all. Remember the key-value store at `MASTER_ADDR:MASTER_PORT`. It lives in the
# **agent**, and so it outlives the workers. Here is one, in this kernel, and a process group that uses it and goes
# away:

# %% stale-store
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)  # generation 0
dist.destroy_process_group()  # gone

left = store.list_keys()
address = bytes(store.get(left[0]))  # what a worker of generation 1 does, to find rank 0
print(f"keys left {len(left)} · generation 1 asks where rank 0 is, and gets an answer at once: {len(address) > 0}")
fresh_name = dist.PrefixStore("a name that only generation 1 has", store)
print(f"under a name of its own it sees the old keys: {fresh_name.check(left)}")

# %% [markdown]
# That answer is the address of a group that is **gone**. A restarted rank that reads it before the new rank 0 has
# overwritten it connects to nobody, and waits. It is a race, so it happens now and then, which is worse than always.
# The cure is on the last line: each generation meets under a name that no earlier one knew
# (`course_lib/engine/roster.py` agrees on it).
#
# *The following numbers were recorded earlier; this notebook doesn't measure them.* A random rank was killed with
# SIGKILL at random instants, also while starting up, under a plain torchrun:

# %% campaign
import json

campaign = json.loads(Path("notebooks/recorded/restart_campaign.json").read_text())
print(f"RECORDED {campaign['recorded']}, torch {campaign['versions']['torch']}")
print(campaign["command"])
for row in campaign["ours"]:
    print(f"ours, {row['ranks']} ranks: {row['restarts']} of {row['kills']} restarts succeeded")
recipe = campaign["tutorial_recipe"]
print(
    f"the tutorials' recipe, measured earlier: {recipe['clean']} of {recipe['restarts']} clean, {recipe['hung']} hung"
)

# %% [markdown]
# (`setup()` sets `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which gives each restart a store of its own. That is why
# the classic script came back so reliably in section 3. Our scripts survive without it.)
#
# ## 9 · Your script
#
# What survived so far was written for it. `notebooks/terrain.py` is what people have at work: one file, a model, a
# data set and a loop of its own, AdamW with a cosine schedule, and a moving average of the weights, which is what it
# saves at the end. It learns to sharpen an elevation map, on two ranks under torchrun, and it survives nothing.
#
# **Exercise (write).** Make it survive, with at most 15 new or changed lines. What you delete is free, and so are
# comments, blank lines, and lines that only move sideways. The next cell makes a copy that is yours, and shows what
# you have changed in it; its link opens the editor. All that you need is in `course_lib.engine`:
#
# | instead of | write |
# | --- | --- |
# | `init_process_group` and its end | `with open_world() as world:` around it all; `world.rank` |
# | nothing, that's the trouble | `state = TrainState(model, optimizer, scheduler, extra={"name": thing, …})` |
# | sampler, loader | `trainer = Trainer(world, state, data, run_dir, epochs=…, global_batch_size=…, snapshot_every=…)`|
# | the loops over epochs and loader | `for step in trainer.steps():`, and inside it `for batch in step:` |
# | what the loader gave | `batch.data` |
# | `loss.backward()` | `batch.backward(loss)` |
# | `main()` as the last line | `run(main)`, where `main` takes no arguments |
#
# The README has a whole example. Before you begin, read the loop once and ask of each line: *what does it remember,
# and who will tell the next process?*

# %% your-copy tags=["nbval-ignore-output"]
from course_lib.lab import your_script

# SOLUTION
mine = your_script.SOLVED
# STUDENT: mine = your_script.your_copy()
# END
your_script.changes(mine)

# %% [markdown] tags=["exercise"]
# The check starts two jobs with it: one that nobody disturbs, and one that it hands to your `kill` while it trains,
# and that may be restarted twice. Then it compares what the two have left, bit for bit. While your copy is still the
# original, it starts nothing.

# %% your-script tags=["exercise", "nbval-ignore-output"]
import os
import signal

from course_lib.lab.exercises import n04 as check
from course_lib.lab.launch import runs_directory


def kill(job):
    job.wait_for(step=18)
    os.kill(job.pid(rank=1), signal.SIGKILL)


runs = runs_directory() / "04-yours"
check.your_script(mine, runs, kill)
your_script.recovery(mine, runs)

# %% [markdown]
# Twelve lines are enough, and none of them is in the model or in the data set. Once it says *solved*, the kill is
# yours to change: rank 0, or a second kill after `job.wait_for(step=30, restarts=1)`. Then take one thing out of the
# `TrainState`, and see which of your results would have been wrong without a word.
#
# ## Ten questions
#
# Answer before you unfold. Most of them ask what *would* happen, so run it in your head.
#
# 1. Section 3 with the kill at step 5 instead of 22: which epochs are trained to their end twice?
#    <details><summary>answer</summary>None. No epoch was finished, so there was no snapshot: it begins again with
#    epoch 0, which had never been finished.</details>
# 2. Section 3 with `self.save(epoch + 1)`: how many epochs are finished in all?
#    <details><summary>answer</summary>4. The index becomes a count, and the restart begins with the epoch that was
#    cut. (The momentum is still lost.)</details>
# 3. Section 5 with `--snapshot-every 15`: how many steps are done again?
#    <details><summary>answer</summary>7: the snapshot stands at 30, and steps 30 to 36 were finished.</details>
# 4. Section 5 with `--snapshot-every 50`: where does the second generation begin, and is the difference still 0.0?
#    <details><summary>answer</summary>At step 0, for there was no snapshot yet: 37 steps again. Still 0.0: a fresh
#    start is a function of the seed.</details>
# 5. In section 1 you kill rank 0 instead of rank 1. Whose log is long, and whom does the agent name as the root
#    cause?
#    <details><summary>answer</summary>Rank 1's is long, for it is the survivor now. Root cause: rank 0, exit code
#    -9.</details>
# 6. In section 6 the 3-rank job is killed with SIGKILL two steps after a snapshot instead of Ctrl-C, and has no
#    <code>--max-restarts</code>. What does the 1-rank run do?
#    <details><summary>answer</summary>It resumes from that snapshot and does two or three steps again. Every sample
#    still counts once: those steps' first effect was lost with their process.</details>
# 7. The network of the line-up with a constant learning rate: which of the seven curves changes, and into what?
#    <details><summary>answer</summary>"Scheduler" becomes flat, like "nothing missing": a schedule that never
#    changes anything can be lost.</details>
# 8. The network of the line-up with dropout 0.0: which of the seven curves changes into another one, and which?
#    <details><summary>answer</summary>"Random state" becomes like "nothing missing": there is nothing random left
#    to lose.</details>
# 9. In your `save` you swap two lines: first `os.replace`, then `torch.save` to the temporary file. What is in
#    `path` after two calls?
#    <details><summary>answer</summary>Nothing. <code>os.replace</code> finds no temporary file and raises, in the
#    first call and in each later one: nothing is ever written.</details>
# 10. A colleague's version of section 9 lacks only the moving average in its `TrainState`. Killed once, it comes back
#     and ends without an error. Which of its results are those of the undisturbed run?
#     <details><summary>answer</summary>The weights are, bit for bit, since nothing in training reads the average. The
#     average isn't: the new process began it afresh. It is what the script saves, so the file is wrong.</details>
#
# ## In five lines
#
# 1. torchrun starts and watches workers and tells them who they are in their environment; it restarts nothing
#    unless you say `--max-restarts`.
# 2. When one worker dies, all are replaced by new processes: what isn't in the snapshot is gone.
# 3. The longest trace belongs to a survivor. Look for the shortest log, and for the agent's root cause.
# 4. A snapshot holds weights, buffers, optimizer, schedule, position and whatever else remembers, and is published
#    by one atomic step. The proof is a difference of 0.0.
# 5. With the order a function of seed and epoch, and a global batch that doesn't depend on the ranks, a job goes on
#    with any number of them.
#
# Next: the process died, and the file was whole. What if the *file* lies? [05 · Snapshots](05_snapshots.ipynb)
