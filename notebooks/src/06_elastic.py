# %% [markdown]
# # 06 · Elastic: nodes that leave and join
#
# Until now a rank died, and all ranks came back: as many as before, on the same machine. On a cluster the *machine*
# goes away, and does not come back soon. Waiting for it costs a thousand others their time; going on without it
# changes the number of ranks in the middle of the training.
#
# **The question of this notebook:** can a job go on with whoever is there, and still be the same job?
#
# You will start three nodes, cut the power of one while another one freezes, take it back, stop them all in order, go
# on with a single rank, and end with four. Then you will see whether the job still knows its result, and what has to
# be set, and to stand where, for all this to work.
#
# *For teachers: 90 minutes. To discuss: "We lose a node a week, so we ask for two spare ones, and are safe." What is
# it that a spare node doesn't help against? Name three things.*
#
# **Bet first.** Which of these are true? Put `True` or `False`; at the end you come back to your bets.
#
# - **A** · A job that goes 3 → 2 → 3 → 1 → 4 ranks can end with the very bits of one that ran on one rank,
#   undisturbed.
# - **B** · With fewer ranks, a step uses fewer samples.
# - **C** · torchrun notices when one of its workers hangs.
# - **D** · With plain torchrun, a job that may shrink to two nodes survives the loss of any one of its three.
# - **E** · When a node joins, some steps must be done again.

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
from course_lib.lab.notebook import fresh, setup

setup()

# SOLUTION
bets = {"A": True, "B": False, "C": False, "D": False, "E": False}
# STUDENT: bets = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}
# END

# %% [markdown]
# ## 1 · The batch belongs to the experiment
#
# A **node** is a machine with an agent on it (torchrun), and the agent's workers. `--nnodes 2:3` says: train with
# three nodes, and with two if need be. A step used 64 samples on three ranks. One leaves. Now what is a step?
#
# If each rank had its own batch of 21 samples, two of them would make 42: larger noise, with a learning rate that was
# meant for 64, and another number of steps in an epoch. It would be another experiment, begun in the middle of the
# first. So the **global batch** is fixed, and the ranks share it, however many they are.
#
# **Exercise (write).** A step uses the samples from `start` up to, and without, `stop`. Which of them are rank
# `rank`'s, if there are `ranks`? Return `(low, high)`. The shares join without a gap, in the order of the ranks; they
# differ by one at most, and lower ranks have the larger ones. A share may be empty.

# %% share tags=["exercise"]
from course_lib.lab import fig06_ideas
from course_lib.lab.exercises import n06 as check


def share(start, stop, rank, ranks):
    # SOLUTION
    size, left_over = divmod(stop - start, ranks)
    low = start + rank * size + min(rank, left_over)
    return low, low + size + (rank < left_over)
    # STUDENT: ...
    # END


check.share(share)
fig06_ideas.shares(share)

# %% [markdown]
# ## 2 · The same bits?
#
# So each sample is used once, by whomever. Is the result the same, then? The mean over the batch is, on paper: the
# gradients of 64 samples, added up. But each rank first adds up its own, then the ranks' sums are added, and a
# float32 has 24 bits: every addition rounds. **Predict:** here are the gradients of 12 parts of a batch. How many
# different sums do 1, 2, 3, 4 and 6 ranks come to?

# %% order-of-sums
import torch

gradients = torch.randn(12, 1000, generator=torch.Generator().manual_seed(0))


def add(parts):
    """One after the other, as a rank adds up what it has."""
    total = torch.zeros(1000)
    for part in parts:
        total = total + part
    return total


sums = [add([add(mine) for mine in gradients.chunk(ranks)]) for ranks in (1, 2, 3, 4, 6)]
different = {tuple(total.tolist()) for total in sums}
exact = gradients.double().sum(0)
print(f"numbers of ranks {len(sums)} · different sums {len(different)}")
print(f"all of them right to five digits {all((total - exact).abs().max() < 1e-5 for total in sums)}")

# %% [markdown]
# Each is right, and no two are equal. In the next step the weights differ in their last bits, and training makes that
# grow. After a dozen steps the losses differ by up to a hundredth. Then nobody can tell whether the recovery had a
# bug. In notebook 04 a difference of 0.0 was the proof, and on another number of ranks we have lost it.
#
# The way out: let the sum not depend on who computes it. `--virtual-shards 4` cuts each step's batch into four parts,
# whoever is there, and adds up their gradients in a fixed tree. Each rank has some neighbouring shards; a sum over
# shards of its own it forms alone, and only the roots travel:

# %% tree tags=["nbval-ignore-output"]
fig06_ideas.tree(shards=4, sizes=(1, 2, 3, 4))

# %% [markdown]
# Colours are ranks, and a red line is a sum that travels. The *tree* is the same in all four pictures: the same
# additions, in the same order, of the same numbers. (The other things that could depend on a rank are gone as well:
# dropout draws by step and shard, and a norm with batch statistics is refused.)
#
# **Exercise (predict).** `--virtual-shards 10`, four ranks. How many shards has rank 0?

# %% shards-of-rank-0 tags=["exercise"]
# SOLUTION
shards = 3
# STUDENT: shards = ...
# END
check.shards_of_rank_0(shards)

# %% [markdown]
# It is not for nothing: a shard is a forward and a backward pass of its own, and small ones are inefficient. Measured
# with `scripts/bench/shards_cost.py` on two ranks and two cores, the time of a step as a multiple of plain DDP's:
#
# | shards V | 8 samples a shard | 16 | 32 | 64 | 128 | by uneven shares alone |
# |--:|--:|--:|--:|--:|--:|--:|
# | 2 | 1.28 | 1.16 | 1.10 | 1.12 | 1.04 | 1.00 |
# | 3 | 1.66 | 1.39 | 1.36 | 1.29 | 1.26 | 1.33 |
# | 4 | 1.28 | 1.37 | 1.29 | 0.94 | 0.75 | 1.00 |
# | 7 | 1.61 | 1.48 | 1.34 | 1.03 | 0.79 | 1.14 |
# | 8 | 1.55 | 1.38 | 1.20 | 0.78 | 0.70 | 1.00 |
#
# (Below 1, several small pieces ran faster than one large one.) Three shards for two ranks: one has two of them, and
# the other waits. And all this needs one type of processor: whether two GPUs of different make add alike, nobody
# promises.
#
# ## 3 · Three nodes
#
# Now for real. Each node here is an agent with an address of its own (127.0.0.2, .3, .4), and all are on your
# machine. (macOS hasn't got these addresses before you say `sudo ifconfig lo0 alias 127.0.0.2 up`, and so for the
# other two.) They find each other at the **rendezvous**: a small key-value store, in which each agent registers, and
# writes a heartbeat. When enough of them are there, the round is closed and each is told its number. Node *a* has the
# smallest address, so it has rank 0.
#
# In one go: three nodes train. Then *a* loses its power (SIGKILL to everything on it at once), and in the same moment
# the worker on *c* freezes: SIGSTOP, by which it keeps its memory and its connections, and does nothing. Two faults
# at once. The job goes on with two nodes; *a* comes back; and then all three are asked to stop, as a scheduler does
# it.
#
# (From step 10 on, rank 0 takes 0.4 s longer for each step, so that the job isn't over before you have done all that.
# And while the others wait, the same job runs once more, on one rank, and nobody disturbs it.)
#
# **Predict,** before you run it. Rank 0's node is gone: who is rank 0 then? And when *a* is back?

# %% the-job
from course_lib.lab.launch import start

train = "scripts/ddp_torchrun.py --norm group --virtual-shards 4 --epochs 3 --snapshot-every 8"
slow = "--fault slow:rank=0,step=10,seconds=0.4,times=500,at=optimizer"
run, undisturbed = fresh("06-elastic"), fresh("06-undisturbed")

# %% three-nodes tags=["nbval-ignore-output"]
import os
import signal

from course_lib.lab.story import ToldCluster, tell

with ToldCluster(run, f"{train} {slow} --collective-timeout 5", nodes="2:3") as c:
    c.start("a", "b", "c")
    c.wait_for(step=9, ranks=3)
    print(c.report(), "a is lost, c freezes", sep="\n\n")
    tell(run, "hang", "c")  # for the picture
    os.kill(c.workers("c")[2], signal.SIGSTOP)
    c.kill("a")
    calm = start(f"python {train} --run-dir {undisturbed}")
    two = c.wait_for(ranks=2)
    print(c.report(), "a is back", sep="\n\n")
    c.start("a")
    three = c.wait_for(ranks=3, after=two["generation"])
    print(c.report(), "all are asked to stop", sep="\n\n")
    for name in "abc":
        c.stop(name)
    c.wait(check=False, show=False)
calm.wait(show=False)

# %% how-they-ended tags=["nbval-ignore-output"]
print(c.report())
print(*[line for line in c.output("c").splitlines() if line.startswith("stopped")], sep="\n")

# %% [markdown]
# A death is noticed at once, by whoever was exchanging something with the dead: the connection breaks in the middle
# of the sum. *c* is the harder case. Its connections are open, and its agent sees a process that is alive. So a small
# process beside the worker, its **guard**, looks whether it moves; after 5 s, the `--collective-timeout`, it kills
# it. (More of that in part 6.)
#
# Then the agents of *b* and *c* want to meet again. But the rendezvous still has *a* on its list: it has to wait
# until *a*'s heartbeat is too old, and then a last call for whoever else may come.
#
# Then *b* is rank 0, for the numbers are dealt anew each time; and when *a* is back, *a* is. A rank is a number, and
# no machine. **Whatever a rank remembers of itself must survive that it is somebody else next time:** "rank 0 writes
# the snapshot to its own disk" is how jobs lose them.
#
# Now look at *how* they stopped. When *a* joined, the agents of *b* and *c* sent their workers a SIGTERM, and so they
# did at the end. The ranks then agree on a step, all finish it, save, and leave.
#
# ## 4 · One, then four, then the truth
#
# All three nodes are gone now, and you have got one machine, call it *d*, with one rank. The command is the same,
# with another launcher: `course_lib.engine.launch` is torchrun with an honest exit code. After a few steps a
# scheduler wants the machine back, and sends its SIGTERM. **Predict:** what is the exit code?

# %% one-rank tags=["nbval-ignore-output"]
agent = "python -m course_lib.engine.launch --standalone --nproc-per-node 1"
job = start(f"{agent} {train} {slow} --run-dir {run}")
job.wait_for(step=three["step"] + 3)
tell(run, "stop", "d")
job.terminate()
job.wait(check=False, show=False)
print(job.output(), "\n\nexit code", job.exit_code)

# %% claims-exit
print(f"the launcher's exit code {job.exit_code} · processes left {len(job.processes()) + len(c.running())}")

# %% [markdown]
# 143 is 128 + 15: ended by SIGTERM, in order, and the snapshot is published. torchrun answers 1 to this, as it did on
# the three nodes, and to everything else, too. A scheduler that puts jobs back into the queue needs to know the
# difference: 143 means *go on with the same command*, 2 means *don't try again*, the input is wrong. And where the
# end is known beforehand, as under Slurm, `--time-limit SECONDS` does the same a little before it.
#
# Now the last launch: four ranks, to the end.

# %% four-ranks tags=["nbval-ignore-output"]
# !torchrun --standalone --nproc-per-node 4 {train} --run-dir {run}

# %% timeline tags=["nbval-ignore-output"]
from course_lib.lab import fig06

fig06.timeline(run, undisturbed)

# %% [markdown]
# The whole story, from what was recorded. Colours are generations; pale is starting up, full is training. Follow node
# *a*: killed, back, stopped. And look at the gaps, where nobody trains. The longest comes after the kill, and most of
# it is *waiting for a heartbeat to be too old*.
#
# So: two faults, one join, two stops, four changes of the number of ranks. The digest of the weights of this job, and
# of the one that nobody disturbed, on one rank. Your bet A stands? Then unveil:

# %% unveil tags=["nbval-ignore-output"]
import json

for name, folder in {"3, 2, 3, 1, 4 ranks": run, "undisturbed": undisturbed}.items():
    print(f"{name:22}{json.loads((folder / 'report.json').read_text())['weights_sha256']}")

# %% claims-journey
from course_lib.lab.claims import every_sample_once, max_difference, same_weights
from course_lib.lab.elastic_claims import batch_sizes, done_again, journey

print(f"ranks {journey(run)} · undisturbed {journey(undisturbed)}")
print(f"the same weights {same_weights(run, undisturbed)} · loss difference {max_difference(run, undisturbed)}")
print("ranks: samples a step", batch_sizes(run))
again = done_again(run)
print(f"steps done again after planned stops and joins {again['planned']} · after deaths {again['death'] > 0}")

# %% [markdown]
# Not "about the same": not one bit of one weight differs. **The number of ranks is no part of the experiment any
# more.** It is an accident of the day, as it should be.
#
# And the price: the two faults cost some steps, from the last snapshot to the death. The join, the stop of the three
# nodes and the one of *d* cost none, since all ranks had saved at the very step at which they left.
#
# Was each sample used once? You needn't believe a function. Every step event says which samples of its epoch the step
# used, and the newest generation's record of a step counts. Put one after the other:

# %% exactly-once
from course_lib.engine import read_events
from course_lib.engine.report import surviving_steps

epochs = {}
for event in surviving_steps(read_events(run).events).values():
    epochs.setdefault(event["epoch"], []).append(event["samples"])
for epoch, parts in epochs.items():
    joined = all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))
    print(f"epoch {epoch}: {len(parts)} steps, from {parts[0][0]} to {parts[-1][1]}, without a gap {joined}")
print("and the record itself is whole:", every_sample_once(run))

# %% [markdown]
# ## 5 · What holds it together
#
# Three settings decided how long the gaps were. They are in `--rdzv-conf`:
#
# | setting | default | here | what it decides |
# |:--|--:|--:|:--|
# | `keep_alive_interval` | 5 s | 2 s | how often an agent writes its heartbeat |
# | `keep_alive_max_attempt` | 3 | 3 | so many missed ones, and it counts as lost |
# | `last_call_timeout` | 30 s | 2 s | a round that has MIN nodes, but not MAX, waits so long for more |
#
# *The following was recorded earlier.* Two nodes of `1:2` train, one loses its power, and the other goes on alone,
# under four settings. Two figures make up most of the wait: interval × attempts, and then the last call.

# %% losses
from pathlib import Path

from course_lib.lab.elastic_scenes import read_scenes

scenes = read_scenes(Path("notebooks/recorded/elastic.json"))
fig06_ideas.losses(scenes)

# %% [markdown]
# With the defaults each loss of a node costs three quarters of a minute, in which thousands of GPUs do nothing. Why
# not one second for all of it? Because each of the three has another side:
#
# - an **interval** of 1 s, or two **attempts**: an agent on a busy machine is late once, and a healthy node is thrown
#   out. With two attempts that has split a job in two, at once;
# - a short **last call**: after a change the nodes come back one after the other, since each stops its workers first,
#   and a worker that saves takes its time. Who comes after the last call waits for the next round, and *that* costs
#   all of them another restart.
#
# **Exercise (write).** Your job: a lost node is to be noticed within 15 s, and the last call may cost 10 s at most.
# To stop, a node writes a snapshot, which takes up to 5 s. Choose the three, in whole seconds.

# %% settings tags=["exercise"]
# SOLUTION
settings = {"last_call_timeout": 6, "keep_alive_interval": 5, "keep_alive_max_attempt": 3}
# STUDENT: settings = {"last_call_timeout": ..., "keep_alive_interval": ..., "keep_alive_max_attempt": ...}
# END
check.settings(settings)

# %% [markdown]
# **The hot spare.** `--nnodes 2` and *three* agents: the third finds the round full, and its agent waits at the door,
# without a worker. When one of the two is lost, it goes in.
#
# **Exercise (predict).** The lost node's heartbeat is too old now, and the spare is in. `last_call_timeout` is 2 s.
# For how many seconds does the round wait for more nodes?

# %% spare-waits tags=["exercise"]
# SOLUTION
seconds = 0
# STUDENT: seconds = ...
# END
check.spare_waits(seconds)

# %% spare
print("\n".join(scenes["spare"]["report"]), "\n… and then a is killed (recorded, too):")
fig06.recorded_story(scenes["spare"])

# %% [markdown]
# A spare is a whole machine that does nothing. What you buy is not the time in the picture, but that the job never
# runs on fewer nodes than planned.
#
# **The store's host.** One thing has not been lost yet: the rendezvous itself. By default it lives in the agent whose
# address stands in `--rdzv-endpoint`, so on one of your nodes. You have killed *a*, and nothing happened, since
# `Cluster` keeps the store in a process of its own: `python -m course_lib.lab.rendezvous`. On a cluster you start
# that on a login node, and tell all agents `--rdzv-conf is_host=false`. Here is the same kill without it:

# %% store
print("\n".join(scenes["store"]["report"]))
fig06.recorded_story(scenes["store"])

# %% [markdown]
# The X of *b* is no fault of its own: *b* is healthy, has its data, and may go on alone: `1:2`. It ends all the same,
# as its agent has lost the store. That was bet D: **the job survives the loss of any node but the one that holds it
# together.** So put that somewhere where nothing trains. (When the separate process is lost, all agents end, too. But
# it does nothing that could kill it; and when it does die, the same command goes on from the snapshot.)
#
# **Two halves.** The last danger: nothing dies, and the *network* is cut. Of four nodes, two see each other, and so
# do the two others. If MIN is 2, both halves could go on, as the same job, with the same name, and each is sure that
# the others are dead. On a shared disk the generations of notebook 05 sort that out: the older half changes nothing.
# If each node has its own disk, nobody can. So the engine looks whether the run directory is shared, and if it isn't:

# %% two-halves
from course_lib.engine import UsageError
from course_lib.engine.halves import refuse_halves

for nodes in ((2, 3), (2, 4), (3, 4)):
    try:
        refuse_halves(nodes)
        print(f"{nodes[0]}:{nodes[1]} is fine")
    except UsageError as error:
        print(str(error).replace("; ", ";\n  "))
fig06_ideas.halves()

# %% [markdown]
# More than half of MAX can be on one side of a cut only. (Our three nodes were `2:3`. The price is on the other side:
# of `3:4`, a job that is cut into two and two does not train at all, until somebody mends the network. That is the
# bargain.)
#
# ## 6 · A rank that hangs
#
# A dead rank is the easy case: the system closes its connections, and everybody knows. A rank that **hangs** keeps
# them open. It waits for a disk that doesn't answer, for a lock, for a GPU. Here rank 2 of 3 goes into an endless
# loop after step 11, and the others have a `--collective-timeout` of 4 s (by default torch's is 30 minutes):

# %% hang
print("\n".join(line.split(" (")[0] + line.split(")")[1] for line in scenes["jobs"]["hang"]["guard"]))
fig06.hang(scenes["jobs"]["hang"])

# %% [markdown]
# The two healthy ranks wait in the sum, run into the timeout, and end with an error. The culprit has no error, and is
# the only one that still "runs". (Remember notebook 04? The longest trace belongs to a survivor. Here too.) torchrun
# would now send it a SIGTERM, wait 30 s for a process that answers nothing, and only then kill it; an agent on
# *another* node wouldn't even know. So the engine forks a **guard** beside each worker. The first rank to run into
# the timeout says so in the group's store; each guard hears it, and who is then still there is killed by its own. A
# process that is *stopped* the guard sees by itself, as it did on *c*.
#
# **And a rank that is only slow?** Nothing times out. All ranks take equally long for a step, since each waits for
# the slowest, so a step's time names nobody. Therefore each rank measures what it does *by itself*, without the wait.
# You have had one all the time: rank 0, with its 0.4 s. From your run's events, while it had two ranks:

# %% slow
from course_lib.lab.elastic_claims import own_times, slowest

whole = [times[0] for times in own_times(run, ranks=2).values()]
print(f"a step takes both ranks as long {max(whole) < 1.2 * min(whole)} · by itself longest: rank {slowest(run, 2)}")
fig06_ideas.slow_rank(run, ranks=2)

# %% [markdown]
# When a rank's own time is over twice that of the others, and 50 ms more, for ten steps, the engine says so: in a
# `straggler` event with `slow_rank`, `own_seconds` and `others_seconds`. It kills nobody for that. What to do is your
# decision: a slow node for one day may be better than one node less.
#
# **Exercise (diagnose).** Four jobs of three ranks, and an epoch of 24 steps (0 to 23). The timeout was 4 s. Nothing
# of this was shown before. What happened in each? Answer with sentences such as `"rank 0 hangs"`, `"rank 2 is slow"`,
# `"rank 1 was killed"`.

# %% jobs tags=["exercise"]
from pathlib import Path

from course_lib.lab.elastic_scenes import evidence, read_scenes
from course_lib.lab.exercises import n06 as check

print(evidence(read_scenes(Path("notebooks/recorded/elastic.json")), letters="ABCD"))
# SOLUTION
answer = {"A": "rank 2 is slow", "B": "rank 1 hangs", "C": "rank 0 was killed", "D": "rank 0 hangs"}
# STUDENT: answer = {"A": ..., "B": ..., "C": ..., "D": ...}
# END
check.culprits(answer)

# %% [markdown]
# <details><summary>How to read them (after you have tried)</summary>
#
# First: did they end in order? In A all three did all 24 steps, so nobody hung or died; the whole step is the same
# for all, and one rank was busy for nearly all of it. In the others, look for the rank without an error: it didn't
# notice anything, so it is the cause. Then the time of the others' error: at once is a death, for the system closed
# the connection; after the 4 s of the timeout it is a hang. (A process that is stopped and one that is in an endless
# loop look alike from outside. Only its guard knows which.)
# </details>
#
# ## 7 · All that a cluster does
#
# You have broken five things. Here is the whole list; each row is a test, which compares the weights with those of an
# undisturbed run, bit for bit, and looks for processes that are left. `make test-all` goes through it five times.
#
# | what happens | who notices, and when | what is done again |
# |:--|:--|:--|
# | a worker is killed: rank 0, the last, two at once | its peers, at once | the steps since the last snapshot |
# | an agent is killed | its workers, at once: none outlives it by 5 s | the same |
# | a node is killed, rank 0's too, and comes back | heartbeats, or the peers | the same |
# | the store's host is lost, with a process of its own | nobody: it is not there | the same |
# | the store's host is lost, and an agent served it | all agents end, and say so | the same, by the same command |
# | a node joins, also while a snapshot is written | the agents | nothing |
# | the network is cut for longer than the keep-alive | the heartbeats | the same |
# | the network is cut, or a node paused, for a moment | nobody | nothing |
# | an agent or a writer is paused for longer | nobody has to: its generation is too old | the same |
# | a rank is stopped, loops, holds the GIL, or its loader hangs | its guard, after the timeout | the same |
# | SIGTERM in a collective, a snapshot, an evaluation | the ranks, after the step | nothing; it ends with 143 |
# | SIGTERM twice, to all processes, to one; SIGINT; time limit | the ranks, then | nothing; it ends with 143 |
# | a batch kills whoever takes it | the third generation in a row | it stops, and names the samples |
# | a worker dies while it writes its error | nobody | the same |
# | a second job comes with the same rendezvous id | the ranks, who compare their jobs | it is refused |
#
# Your bets:

# %% settle tags=["exercise"]
check.bets(bets)

# %% [markdown]
# Solved, or stuck? [The solutions](solutions/06_elastic.ipynb).
#
# ## Ten questions
#
# Answer before you unfold. Most of them change something above, so you can try it.
#
# 1. In part 3 you kill *c* instead of *a*. Who is rank 0 with two nodes, and with three again?
#    <details><summary>answer</summary>Node a, both times: it has the smallest address of those that are there, and it
#    was never gone.</details>
# 2. Part 3 with `nodes="3:3"`, and *a* is killed. What do *b* and *c* do until *a* is back?
#    <details><summary>answer</summary>Their agents wait at the rendezvous, without workers: two are fewer than MIN.
#    There is no generation with two ranks, so <code>c.wait_for(ranks=2)</code> waits in vain, and says so in the
#    end.</details>
# 3. Part 3 with `--snapshot-every 100`, and *a* killed after step 9. Where does the next generation begin, and is the
#    digest still the same?
#    <details><summary>answer</summary>At step 0: there was no snapshot yet. The digest is the same, for a fresh start
#    is a function of the seed; only time is lost.</details>
# 4. In part 3 *b* is stopped with `c.stop("b")` instead of *a* being killed. How many steps are done again?
#    <details><summary>answer</summary>None. A stop that is asked for is planned: the ranks agree on a step, save
#    there, and leave. The two others wait, all the same, until b's heartbeat is too old.</details>
# 5. All of it without `--virtual-shards`, so with plain DDP. Which lines of the claims cell in part 4 change?
#    <details><summary>answer</summary>Only the second: other weights, and a difference that isn't 0. The ranks, the
#    samples of a step and the steps done again stay as they are, and so does exactly-once.</details>
# 6. Part 4 with four ranks and `--virtual-shards 2`. What do ranks 2 and 3 do?
#    <details><summary>answer</summary>They hold no shard, and wait for the sum: two shards are work for two ranks.
#    The result is right. (On your run it would be refused: the number of shards is part of the experiment.)</details>
# 7. In part 3 you don't kill *a*, and send *c*'s worker a SIGCONT one second after the SIGSTOP. What is done again?
#    <details><summary>answer</summary>Nothing: the guard counts 5 s before it kills, the worker goes on, and the
#    others had only waited a little longer in the sum. A machine may swap for a moment without being shot.</details>
# 8. The bars of part 5, with heartbeats of 4 s × 4 and a last call of 10 s. How long is the red part, at most?
#    <details><summary>answer</summary>About 26 s: up to 16 until the heartbeat is too old, then 10. If the heartbeat
#    was written just before the loss, it is the whole 16.</details>
# 9. `--nnodes 3:5` with a disk for each node. The network is cut into three nodes and two. Who trains?
#    <details><summary>answer</summary>The three. The two are fewer than MIN and wait. It isn't refused, as 3 is more
#    than half of 5: two halves of three nodes there cannot be.</details>
# 10. The picture of the hang, with the timeout 60 s, as the scripts have it by default. What is different, and what
#     does that cost a job on 1,000 GPUs?
#     <details><summary>answer</summary>The grey bars are fifteen times as long: a minute, in which 1,000 GPUs wait,
#     which is nearly 17 GPU hours. But a timeout that is shorter than the slowest honest step kills healthy
#     ranks.</details>
#
# ## In five lines
#
# 1. The global batch belongs to the experiment, and the ranks share it. A rank is a number that is dealt anew each
#    time.
# 2. With a fixed tree of sums over virtual shards, 3 → 2 → 3 → 1 → 4 ranks end with the very bits of an undisturbed
#    run.
# 3. A loss costs interval × attempts, then the last call, then the start of a worker, and the steps since the last
#    snapshot. A planned stop, and a join, cost no step.
# 4. What holds the job together must not be on a node that can be lost; and without a shared disk, MIN is more than
#    half of MAX.
# 5. Death is noticed at once, a hang after a timeout and by a guard, slowness only by each rank's own time.
#
# Next: who starts all these agents? [07 · Kubernetes and minGPT](07_kubernetes_mingpt.ipynb)
