# %% [markdown]
# # 08 · Goodput: what failure costs
#
# Nothing that you have trained in this course was lost. But it did cost something: time in which machines were paid
# for, and did no step that counts. On two ranks that is a few seconds. When Meta trained Llama 3 on 16,384 GPUs, the
# job was interrupted about every three hours, for 54 days.
#
# **The question of this notebook:** a cluster fails every three hours. What does that cost, and how often should you
# save?
#
# You will take a recovery apart, make it short, measure what a step, a snapshot and a restart take on *your* machine,
# predict from these numbers alone how a job will fare that is shot at, shoot at it, and then put the same formulas to
# 131,072 GPUs that you don't have.
#
# *For teachers: 75 minutes. To discuss: "We bought faster disks, so snapshots now take a tenth of the time, and goodput
# went up by two points. Where is the rest?" Name three places to look.*
#
# **Bet first.** Which of these are true? Put `True` or `False`; at the end you come back to your bets.
#
# - **A** · On twice as many GPUs of the same kind one should save twice as often.
# - **B** · While a job waits for each snapshot: at the best interval about as much time goes into saving as into doing
#   work again.
# - **C** · When a recovery takes longer, one should save more often.
# - **D** · Where failures are rare, an interval that is three times too long costs about as much as one that is three
#   times too short.
# - **E** · 16,384 GPUs that fail every three hours, with half a day for a repair and no spare node: they still train
#   for a third of the time.

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
from course_lib.lab.notebook import fresh, setup

setup()

# SOLUTION
bets = {"A": False, "B": True, "C": False, "D": True, "E": False}
# STUDENT: bets = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}
# END

# %% [markdown]
# ## 1 · One recovery, taken apart
#
# Two ranks under torchrun, and one kill. You know this scene from notebook 04; now we look at the clock. Rank 0 takes
# 0.03 s longer for each step, so that there is a job to be killed in. `strike` also writes down *when* it struck, since
# a dead process can't.
#
# (At the same time part 5's job, of five epochs, runs on one rank and nobody disturbs it: with `--virtual-shards`, as
# in notebook 06, it ends with the bits of two ranks. Each cell that starts a job begins it afresh, so you can change a
# number and run the cell again.)
#
# **Predict:** from the death to the first new step, what takes longest? To notice it, to meet again, to start Python
# and import, to load the snapshot, or the step?

# %% the-job
import os
import signal

from course_lib.lab.launch import start
from course_lib.lab.story import tell

train = "scripts/ddp_torchrun.py --norm group --virtual-shards 2"
slow = "--fault slow:rank=0,step=0,seconds=0.03,times=10000,at=optimizer"


def strike(job, run, rank):
    """SIGKILL, written down."""
    pid = job.pid(rank=rank)
    tell(run, "kill", f"rank {rank}")
    os.kill(pid, signal.SIGKILL)


# %% one-kill tags=["nbval-ignore-output"]
torchrun = "torchrun --standalone --nproc-per-node 2 --max-restarts 5"
calm, cold = fresh("08-calm"), fresh("08-cold")
undisturbed = start(f"python {train} --epochs 5 --run-dir {calm}")
with start(f"{torchrun} {train} --epochs 2 --snapshot-every 16 {slow} --run-dir {cold}") as job:
    job.wait_for(step=27)
    strike(job, cold, rank=1)
    job.wait(show=False)
undisturbed.wait(show=False)
print(job.output(rank=0, lines=2))

# %% anatomy tags=["nbval-ignore-output"]
from course_lib.lab import fig08

fig08.recovery(cold)

# %% [markdown]
# The upper bar is the job: each phase ends when the slowest rank has come to its end. Below are the ranks: grey is the
# life that ended (rank 0's ended a little later, for its agent had to end it), and then the new one.
#
# Most of it is one thing: **two new processes start Python, import torch, and set up data and model**, to arrive where
# they had been before. (Much of `data` is imports, too: torch imports parts of itself when they are first used.) To
# notice the death takes a tenth of a second or two, and the snapshot of this small model is loaded at once. With a
# large one it isn't.
#
# ## 2 · The ledger
#
# **Goodput** is the share of the time in which a job does steps that it keeps. To see where the rest went, every
# microsecond from the first event to the last one is put into one of nine kinds, and none is left over:

# %% report tags=["nbval-ignore-output"]
# !python -m course_lib.lab.report {cold}

# %% [markdown]
# It also has written a page with pictures, `report.html`, into the run's directory; open it from the file browser on
# the left. It works for any run of this course, also for one that has crashed, or is still going on.
#
# *Replayed* looks like training, and is none. These steps were done, lost, and done again; a monitor that shows how
# busy the GPUs are can't tell. *Unattributed* is what nobody can explain. An honest ledger shows it.
# (*Starting* is so large because the job is so short. And the lower table goes on to the *end* of the first new step,
# where *recovering* stops at its beginning: the step itself counts.)
#
# **Exercise (write).** `seconds` is a dict from kinds to seconds. Write `goodput(seconds)`, a number from 0 to 1.

# %% goodput tags=["exercise"]
from course_lib.lab.exercises import n08 as check


def goodput(seconds):
    # SOLUTION
    return seconds["productive"] / sum(seconds.values())
    # STUDENT: ...
    # END


check.goodput(goodput)

# %% claims-ledger
from course_lib.lab import goodput_claims
from course_lib.lab.claims import restarts

joined = goodput_claims.phases_add_up(cold)
print(f"restarts {restarts(cold)} · phases of {len(joined)} recovery, without a gap {all(joined)}")
print(f"the ledger adds up to the wall time, to the microsecond {goodput_claims.adds_up(cold)}")
print(f"it counts the steps that the engine counts {goodput_claims.counts_the_same_steps(cold)}")

# %% [markdown]
# ## 3 · A warm start
#
# Why start Python and import torch again, if both were here a moment ago? `python -m course_lib.engine.launch` is
# torchrun (its agent, its options), with another way to make workers. A **fork server** imports what the script
# imports, once, and then does nothing; each worker is forked from it, with all of it in memory. What must not be there
# before the fork is a GPU's context, which doesn't survive one; so nothing in the course's modules touches CUDA when it
# is imported. (With `--cold` it starts workers as torchrun does.)
#
# The same job, the same kill:

# %% one-kill-warm tags=["nbval-ignore-output"]
launcher = "python -m course_lib.engine.launch --standalone --nproc-per-node 2 --max-restarts 5"
warm = fresh("08-warm")
with start(f"{launcher} {train} --epochs 2 --snapshot-every 16 {slow} --run-dir {warm}") as job:
    job.wait_for(step=27)
    strike(job, warm, rank=1)
    job.wait(show=False)
fig08.restarts({"torchrun": cold, "warm": warm})

# %% [markdown]
# What remains is to notice, to end the other worker and to meet again; and to join, to set up data and model, and to
# load the snapshot, which every worker does for itself. The steps that are done again are the same as before; a faster
# restart doesn't help against *them*. For that there is another knob.
#
# ## 4 · How often?
#
# First your own constants, from the events of the warm run. *Pace* is the time from one step to the next. *Stall* is
# how long training stands still for a snapshot, while the state is copied; *write* is how long it takes after that
# until the copy is on the disk and may be trusted. *Recovery* is from the kill to the first new step's beginning.

# %% constants tags=["nbval-ignore-output"]
found = goodput_claims.constants(warm)
for name in ("pace", "stall", "write", "recovery"):
    print(f"{name:9} {getattr(found, name + '_s'):8.4f} s")

# %% [markdown]
# Now think of a job that trains for an interval, saves, trains for an interval, and so on, and fails once in a while:
# on average once in the **MTBF**, the mean time between failures.
#
# - Each *interval* costs a stall.
# - Each *failure* costs a recovery, and the work since the last snapshot: on average half an interval.
#
# So of each second is lost, in the first order,
#
# *stall / interval + (interval / 2 + recovery) / MTBF*
#
# The first part falls with the interval and the second grows. Their sum is smallest where the one falls as fast as the
# other grows, and here that is where *stall / interval* and *interval / (2 MTBF)* themselves are equal. (The recovery
# is in it, but doesn't move the place: it costs the same at any interval.)
#
# **Exercise (write).** Write `young(stall, mtbf)`, the best interval; all in seconds.

# %% young tags=["exercise"]
import math

from course_lib.lab.exercises import n08 as check


def young(stall, mtbf):
    # SOLUTION
    return math.sqrt(2 * stall * mtbf)
    # STUDENT: ...
    # END


check.young(young)

# %% [markdown]
# John W. Young published this in 1974, on two pages. It neglects that there can be failures in a recovery, or two in an
# interval. John T. Daly did the sum without neglecting that in 2006: from his expression for the whole time follows
#
# ```
# goodput = interval/MTBF · exp(-(recovery + write)/MTBF) / (exp((interval + stall)/MTBF) - 1)
# ```
#
# and he gave a series for its best interval. Today nobody needs the series: the exact place is found by bisection.
#
# (The write is our addition: a snapshot that is written in the background can't be loaded until that is done, so each
# failure undoes as much training more. Like a recovery, this costs *write / MTBF* of the time at any interval.)
#
# How far apart are the three, is the exact one right, and what if you miss it? With the stall that your run had, and a
# failure every three hours:

# %% claims-optimum
import numpy as np

from course_lib.lab import economics

stall, mtbf = goodput_claims.constants(warm).stall_s, 3 * 3600
best = economics.best_interval(stall, mtbf)
tried = best * np.geomspace(1 / 20, 20, 1001)  # the one in the middle is `best`
goodputs = [economics.goodput(each, mtbf_s=mtbf, stall_s=stall, recovery_s=0) for each in tried]
print(f"of 1,001 intervals the best one is number {np.argmax(goodputs)}")
for name in ("young", "daly"):
    off = getattr(economics, name)(stall, mtbf) / best - 1
    print(f"{name.title()}'s is within 1 % of it {abs(off) < 0.01}")
four = economics.best_interval(4 * stall, mtbf)
print(f"with four times the stall it is twice as long {abs(four / best - 2) < 0.01}")
short, long = (1 - np.interp((best / 3, 3 * best), tried, goodputs) / max(goodputs)).tolist()
print(f"a third of it costs as much as three times as long, within 5 % {abs(short / long - 1) < 0.05}")

# %% [markdown]
# **Exercise (predict).** Another job: it saves every 20 minutes, the stall can be neglected, and a write takes 4
# minutes while training goes on. Failures come at any moment. How many minutes of training does a failure undo on
# average?

# %% minutes-lost tags=["exercise"]
# SOLUTION
minutes = 14
# STUDENT: minutes = ...
# END
check.minutes_lost(minutes)

# %% [markdown]
# ## 5 · Shoot at it
#
# Now the test of all this: a job of 120 steps that is killed three times, at random, two seconds of training apart on
# average. Random times that have no memory are *exponentially* distributed; that is what failures of many independent
# parts look like. **Predict:** which share of the time from the first step to the last one will be steps that count?
# Say a number, aloud if nobody is near.

# %% shoot tags=["nbval-ignore-output"]
import random
import time

every = 16  # steps between two snapshots
storm, draw = fresh("08-storm"), random.Random(892)  # with some seeds the job is done before it is struck three times
command = f"{launcher} {train} --epochs 5 --snapshot-every {every} {slow} --run-dir {storm}"
with start(command) as job:
    for count in range(3):
        job.wait_for(step=0, restarts=count)
        time.sleep(draw.expovariate(1 / 2))
        strike(job, storm, rank=draw.choice((0, 1)))
    job.wait(show=False)

# %% parts tags=["nbval-ignore-output"]
fig08.parts(storm, found, every)

# %% [markdown]
# The lower bar knows nothing of this run but *when* it was struck. All else was measured in the run before. One job is
# little to measure by. On a busy machine the constants change from minute to minute, and the prediction with them. The
# recovery that you measured was the first of its job, in which torch's agent waits for a random time of up to 0.3 s;
# later ones don't. And a kill that comes just as a snapshot is due finds it in one bar and not in the other, which is
# 16 steps. (To measure it properly, `scripts/bench/goodput.py` does this for minutes and many kills, and fails above
# five points.)
#
# And the weights? Three kills, and a job that nobody disturbed:

# %% claims-storm
from course_lib.lab.claims import every_sample_once, same_weights

print(f"restarts {restarts(storm)} · every sample once {every_sample_once(calm) and every_sample_once(storm)}")
print(f"the weights are those of the undisturbed run {same_weights(calm, storm)}")
print(f"the ledger adds up to the wall time, to the microsecond {goodput_claims.adds_up(storm)}")

# %% [markdown]
# So failures cost *nothing but* time. How much at another interval? With the constants and failures as often as yours:

# %% curve tags=["nbval-ignore-output"]
best = economics.best_interval(found.stall_s, goodput_claims.mtbf_of(storm), found.write_s)
print(f"the best interval is {best:.2f} s of training: {max(best / found.pace_s, 1):.0f} steps")
fig08.curve(storm, found, every)

# %% [markdown]
# Young's, Daly's and the best interval are so close together that they are drawn around one another. Three
# things to see:
#
# - **The top is flat.** You need not know your MTBF to the digit. (With failures as rare as in part 4, a third of the
#   best interval and three times as much cost the same; with so many as here, too long is worse.)
# - **Writing in the background moves the top**, up and to shorter intervals, since it makes the stall short. (A
#   snapshot that comes due while the last one is still being written is left out, so an interval below the write is no
#   use.)
# - **One run is no measurement.** The grey bar holds eight of ten such jobs: with three kills luck decides. A mean
#   takes hundreds of failures, which is why one simulates.
#
# Our 16 steps were too many. Put the best number into `every`, run the cells of this part again, and see whether the
# star comes up.
#
# ## 6 · 419 times in 54 days
#
# The best described failures of a large job are those of Llama 3 405B: 16,384 GPUs, and 419 unexpected interruptions in
# 54 days, each with its cause.

# %% llama
from course_lib.lab import fig08_scale, llama3

hours = llama3.MTBF_S / 3600
print(f"{llama3.UNEXPECTED} interruptions in {llama3.DAYS} days: one in {hours:.2f} hours, for the whole job")
print(f"for one node of {llama3.GPUS_PER_NODE} GPUs: one in {llama3.NODE_MTBF_S / 86400:.0f} days")
fig08_scale.causes()

# %% [markdown]
# (Source of the counts: A. Grattafiori et al., *The Llama 3 Herd of Models*, 2024,
# [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4 and table 5. Use the counts: the percentages
# beside them do not all follow from them. What each cause takes from the job, the colours, is our reading.)
#
# A single node is reliable: it fails once in nine months. **There are 2,048 of them.** The rates add up, so
# the job's MTBF is a node's divided by their number.
#
# The authors report "higher than 90 %" effective training time. They do not say how long a snapshot took, or a restart.
# But the formula can be turned around: if snapshots came every ten minutes, stalled for 5 s and were written in a
# minute (*our assumptions*), how long may a recovery take at most, from the failure to the first new step?

# %% longest
costs = {"mtbf_s": llama3.MTBF_S, "stall_s": 5, "write_s": 60}
longest = economics.longest_recovery(0.90, 10 * 60, **costs)
print(f"for 90 %, a recovery may take {longest / 60:.0f} minutes; for 95 %, ", end="")
print(f"{economics.longest_recovery(0.95, 10 * 60, **costs) / 60:.0f} minutes")

ways = {"training waits for a minute": (60, 0), "2 s of stall, a minute of write": (2, 60)}
fig08_scale.intervals(llama3.MTBF_S, recovery_s=660, stalls=ways)

# %% [markdown]
# That is the answer to the question of this notebook: with a stall of a minute save every 19 minutes, and lose 15 % of
# the cluster. With a stall of two seconds, save every three or four minutes, and lose 8 %.
#
# **Exercise (predict).** With a stall of a minute, this cluster saves every 20 minutes. One with sixteen times as many
# of these GPUs: after how many minutes (to the first order)?

# %% sixteen-times tags=["exercise"]
# SOLUTION
minutes = 5
# STUDENT: minutes = ...
# END
check.sixteen_times(minutes)

# %% [markdown]
# ## 7 · From 8 to 131,072
#
# The formula knows no repairs. A lost node comes back when somebody has mended it, and meanwhile a job that needs all
# of its nodes waits, unless a spare stands by. So here is a **simulated cluster**: every node fails by its own clock,
# racks fail as a whole, nodes are repaired, spares take their place. Where there are spares enough, it must agree with
# the formula:

# %% claims-simulator
from course_lib.lab import scale
from course_lib.lab.simulator import simulate

cluster = scale.ladder(16_384)["asynchronous snapshots"]
for minutes in (1, 4, 20, 60):
    simulated = simulate(cluster, 60 * minutes, days=54, runs=20)
    close = abs(simulated.mean / cluster.formula(60 * minutes) - 1) < 0.01
    print(f"a snapshot every {minutes:2} minutes: within 1 % of the formula {close}")

# %% [markdown]
# Now each size with nothing, and then with one measure after the other, each at its best interval. GPUs fail as often
# as Llama 3's did. **All the times are assumptions**, of a size that such a job may have:
#
# | | a snapshot's stall | its write | a restart | a dead process alone | a repair |
# |:--|--:|--:|--:|--:|--:|
# | nothing | 60 s | – | 60 s to notice, then 600 s | the same | 12 h |
# | + hot spares, enough for 99.9 % of the time: 1, 5, 16 and 60 nodes | | | | | a spare at once |
# | + asynchronous snapshots | 2 s | 60 s | | | |
# | + warm restart of processes | | | | 30 s | |
# | + warm spares, with the imports and the data there already | | | 120 s | | |

# %% sizes
from IPython.display import display

found_at = fig08_scale.simulated()
display(fig08_scale.sizes(found_at))
display(fig08_scale.where(found_at, 16_384), fig08_scale.where(found_at, 131_072))

# %% [markdown]
# - On **8 GPUs** all of this is worth nothing: a job on one node fails once in nine months.
# - On **1,024** the spares count, and little else.
# - On **16,384** without spares there is nearly always a node in repair: the job waits for 96 % of its life. It isn't a
#   slow job, it is none. Sixteen spare nodes, less than one in a hundred, bring it to 85 %. Then snapshots are worth
#   seven points, a warm restart of processes less than one, since only 13 failures of 100 are of processes alone; and
#   warm spares, which shorten all the others, three and a half.
# - On **131,072** there is a failure every 23 minutes, and a recovery of eleven minutes eats more than a third of all.
#   No interval helps against that. What helps is a shorter recovery, and in the end a job that doesn't need *all* of
#   its nodes.
#
# **Which knob comes first depends on the size**, and the ledger says which it is: the largest part that isn't green.
#
# **Exercise (write).** Your cluster: 4,096 GPUs in 512 nodes, which fail as often as those. A snapshot stalls for 20 s
# and is written in 120 s; a failure is noticed after a minute, a recovery takes another five, a repair *a day*. You may
# keep up to 8 spare nodes. Reach a goodput of 95 %, in the mean of 100 simulated jobs.

# %% plan tags=["exercise"]
# SOLUTION
plan = {"minutes": 22, "spares": 8}
# STUDENT: plan = {"minutes": ..., "spares": ...}
# END
check.plan(plan)

# %% [markdown]
# **Exercise (diagnose).** Four jobs of two ranks, recorded earlier, each with a bad goodput for another reason.
# Nothing of this was shown before. What is it? Choose from `"a failure is noticed late"`, `"nobody starts it again"`,
# `"snapshots too seldom"` and `"the first batch comes late"`.

# %% jobs tags=["exercise"]
from pathlib import Path

from course_lib.lab import fig08
from course_lib.lab.exercises import n08 as check
from course_lib.lab.goodput_cases import evidence, read_cases

record = read_cases(Path("notebooks/recorded/goodput.json"))
print(evidence(record))
# SOLUTION
answer = {"A": "a failure is noticed late", "B": "snapshots too seldom"}
answer |= {"C": "nobody starts it again", "D": "the first batch comes late"}
# STUDENT: answer = {"A": ..., "B": ..., "C": ..., "D": ...}
# END
check.causes(answer)
fig08.jobs(record)

# %% [markdown]
# <details><summary>How to read them (after you have tried)</summary>
#
# First the ledger: which kind is the largest after the productive one? Idle is time in which nothing of the job ran, so
# nobody started it. Replayed is work that was lost, and the number of steps says how far apart the snapshots were.
# Where it is the recovery, its phases tell the rest: a detection as long as the timeout is a rank that hung, and a long
# wait for the first batch is a data set that starts slowly.
# </details>
#
# Your bets:

# %% settle tags=["exercise"]
check.bets(bets)

# %% [markdown]
# Solved, or stuck? [The solutions](solutions/08_goodput.ipynb).
#
# ## Ten questions
#
# Answer before you unfold. Most of them change something above, so you can try it: change it where it stands, and run
# that cell and those below it.
#
# 1. Part 1 with `--nproc-per-node 3` and rank 1 killed. How many processes have to import torch again?
#    <details><summary>answer</summary>Three. When one worker dies, the agent replaces all of them.</details>
# 2. Part 1 with `--snapshot-every 100`: which kinds of the ledger change, and how?
#    <details><summary>answer</summary>Replayed grows to all steps before the kill, 28 or a few more, as there is no
#    snapshot to go on from. Recovering stays about as long, and goodput falls.</details>
# 3. Part 3 with `--cold` as the first option in `launcher`. Whose bar does the warm one look like then?
#    <details><summary>answer</summary>torchrun's: each worker starts Python and imports by itself.</details>
# 4. A module that your script imports says `MY_RANK = os.environ.get("RANK")` at its top level. What is in it under
#    the warm launcher?
#    <details><summary>answer</summary>None: the module was imported by the fork server, before there was a rank. Read
#    the environment in a function, or launch with <code>--cold</code>.</details>
# 5. In part 5 the kills come four times as often: `range(12)`, `expovariate(4 / 2)`, and as many restarts in
#    `launcher`. Which parts of the bar grow, and by how much?
#    <details><summary>answer</summary>Recovering grows fourfold: twelve recoveries for the same 120 steps. Done again
#    grows too, on average a little less than fourfold, as a kill often comes before half an interval is done; in one
#    job it is luck. The stall per step stays what it is.</details>
# 6. In part 5 you say `every = 1`. What happens to the steps that are done again, and what do you pay?
#    <details><summary>answer</summary>A few remain: the snapshot that is being written can't be loaded yet, and one
#    that comes due meanwhile is left out. You pay a stall for each one that is taken.</details>
# 7. Part 6: by a better network a recovery takes 60 s instead of 660 s. Which interval is the best now?
#    <details><summary>answer</summary>The same. The whole curve goes up, at its top by about five points, and the top
#    stays where it is.</details>
# 8. In part 7, `from dataclasses import replace` and `cluster = replace(cluster, spares=0, repair_s=0)`. Does the
#    formula hold?
#    <details><summary>answer</summary>Yes: a repair that takes no time is a spare that is always at hand.</details>
# 9. The plan with 8 spares and a repair of *four* days. Is there an interval for 95 %?
#    <details><summary>answer</summary>No: more than seven nodes are in repair on average, so eight spares are often too
#    few, and no interval helps against waiting. The simulator comes to 66 % at best.</details>
# 10. A job of 1,024 GPUs is moved from 128 nodes of 8 GPUs to 256 nodes of 4, each of which fails as often as the old
#     ones. What happens to the job's MTBF, and to the best interval?
#     <details><summary>answer</summary>Half the MTBF, for twice as many parts can fail; and the interval is shorter by
#     the square root of 2.</details>
#
# ## In five lines
#
# 1. Goodput is the share of the time in steps that count. A ledger that adds up shows where the rest went; steps done
#    again look like training and are none.
# 2. A restart is mostly Python and its imports: workers that are forked from a warm process skip them.
# 3. The best interval is about the square root of 2 × stall × MTBF, whatever a recovery takes; its top is flat.
# 4. A job's MTBF is a node's divided by the nodes: at 16,384 GPUs there is a failure every three hours, and without
#    spares there is no job.
# 5. Which measure comes first depends on the size: spares, then a short stall, then a short recovery.
#
# That was the last notebook. What you have used all the time, and can use in your own project, is in the
# [README](../README.md).
#
# *Sources:* J. W. Young, "A first order approximation to the optimum checkpoint interval", *Communications of the ACM*
# 17(9), 1974, 530–531. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
# *Future Generation Computer Systems* 22(3), 2006, 303–312,
# [doi:10.1016/j.future.2004.11.016](https://doi.org/10.1016/j.future.2004.11.016).
