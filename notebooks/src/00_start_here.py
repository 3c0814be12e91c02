# %% [markdown]
# # 00 · Start here: kill it, and lose nothing
#
# A training job on many machines does not ask *whether* one of its processes will die, but *when*: memory runs out, a
# GPU falls off its bus, a node goes away. Normally one death ends the whole job, and somebody finds out in the
# morning. **Can a job lose a process in the middle of a step, and still end with the very weights that it would have
# had?**
#
# In the next ten minutes you kill one yourself. You need no GPU and no network. Run the cells from top to bottom with
# Shift-Enter; whatever a cell starts ends with it.

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
import os
import signal

from course_lib.lab.notebook import fresh, setup

setup()

from course_lib.engine import read_events
from course_lib.lab.exercises import n00 as check
from course_lib.lab.launch import start
from course_lib.lab.plots import recovery_figure

# %% [markdown]
# ## Predict
#
# The command below starts an *agent*, `torchrun`, which starts two *workers*. They have numbers, *rank* 0 and *rank*
# 1, and train one small network to read handwritten digits: of each batch of 64 images they take 32 each, and in
# every step they average their gradients. After every 10 steps the job writes a *snapshot* to the disk.
#
# When step 25 is done you will send rank 1 a SIGKILL. No process can catch that signal: rank 1 saves nothing, tells
# nobody, and is gone in mid-step. **What happens then?** Commit to a letter before you go on; a wrong bet teaches
# more than none.
#
# - **a** · The job begins again at step 0.
# - **b** · Rank 1 alone is replaced; rank 0 waits for it, and no step is done twice.
# - **c** · Both ranks are replaced and go back to a snapshot. The loss ends *close to* that of an undisturbed run.
# - **d** · Both ranks are replaced and go back to a snapshot. The loss ends *exactly on* that of an undisturbed run.

# %% bet
train = "torchrun --standalone --nproc-per-node 2 --max-restarts 3 scripts/ddp_torchrun.py --epochs 3"

# SOLUTION
bet = "d"
# STUDENT: bet = ...  # "a", "b", "c" or "d", with the quotes
# END

# %% crash tags=["nbval-ignore-output"]
run = fresh("00-crash")
job = start(f"{train} --run-dir {run}")
print(job.tree())  # the agent and its two workers, as soon as they live

job.wait_for(step=25)
os.kill(job.pid(rank=1), signal.SIGKILL)  # your own hand; keep your eyes on the curve

job.watch()  # until the job ends

# %% [markdown]
# It fell back, and went on by itself. But was anything lost on the way: a batch left out, one used twice, a digit of
# the momentum? There is a hard test. **Run the same training again, with nobody to disturb it, and subtract.**

# %% twin tags=["nbval-ignore-output"]
twin = fresh("00-twin")
# !{train} --run-dir {twin}

# %% proof
from course_lib.lab.claims import every_sample_once, max_difference, restarts, same_weights

print(f"restarts {restarts(run)} · max difference {max_difference(twin, run)} · same weights {same_weights(twin, run)}")
print(f"every sample once {every_sample_once(run)}")
check.bet(bet)
recovery_figure(read_events(twin).events, read_events(run).events)

# %% [markdown]
# ## What happened
#
# Rank 1 died in the middle of a step, so rank 0, which was waiting for the other half of the gradient, found the
# connection broken and gave up as well. The agent saw the dead process and started *both* ranks anew: new process
# ids, empty memories. They agreed on the newest good snapshot, took up weights, momentum, learning rate and the place
# in the data from it, and did the lost steps (yellow) again. The weights at the end are the twin's in every bit,
# because all that a step does follows from the seed, the place in the data, and what the snapshot holds.
#
# That zero is not luck, and nobody gets it for nothing: in notebook 04 you will kill the loop that most tutorials
# give, and see what it loses. The course is about what the zero takes.

# %% [markdown] tags=["exercise"]
# ## Break it, twice
#
# **1 · Read another run's record.** Its job was killed twice; a snapshot was written after every 10 steps, and steps
# count from 0.
#
# | | goes on from | last step that was done | then |
# |:--|:--|:--|:--|
# | start 1 | nothing | 26 | killed |
# | start 2 | the snapshot after 20 steps | 34 | killed |
# | start 3 | the snapshot after 30 steps | 47 | finished |
#
# How many times was a step done again, in all?
#
# **2 · Kill rank 0, twice.** Rank 0 is the one that writes the snapshots. Start the job once more, in
# `fresh("00-twice")`; kill rank **0** after step 25; when the job has come back and is past step 45, kill rank 0
# again, and watch it to the end. To wait for a step *after the first restart* say `job.wait_for(step=45,
# restarts=1)`. Will the difference to the twin still be 0.0?

# %% twice tags=["exercise", "nbval-ignore-output"]
# SOLUTION
done_again = 12
# STUDENT: done_again = ...  # 1
# END
check.done_again(done_again)

# SOLUTION
twice = fresh("00-twice")
job = start(f"{train} --run-dir {twice}")
job.wait_for(step=25)
os.kill(job.pid(rank=0), signal.SIGKILL)
job.wait_for(step=45, restarts=1)
os.kill(job.pid(rank=0), signal.SIGKILL)
job.watch()
# STUDENT: twice = ...  # 2: fresh("00-twice"), and below it the job and the kills; the cell of the first kill shows how
# END
check.rank_0_twice(twice)

# %% machine tags=["nbval-ignore-output"]
from course_lib.lab.machine import machine_report

# What your machine has of what the course uses, what a Mac lacks, and what that costs.
machine_report()

# %% [markdown]
# ## Ten questions
#
# They are about runs that you have not seen: take the command of this notebook, change it as each question says, and
# answer before you open the fold. Better: try it.
#
# 1. You leave out `--max-restarts 3` and kill rank 1 as before. What is left a second later?
#    <details><summary>answer</summary>Nothing runs: torchrun restarts 0 times unless told otherwise, and ends with
#    exit code 1. The snapshots are still there, and the same command typed again goes on from the newest.</details>
# 2. `--snapshot-every 4`, and rank 1 dies in step 27. Where does start 2 begin, and how many steps are done again?
#    <details><summary>answer</summary>After 24 steps. The steps 24, 25 and 26 are done again: 3. Step 27 had not been
#    done, so it is not repeated.</details>
# 3. `--snapshot-every 1000`, and rank 1 dies in step 27. Where does start 2 begin, and what is the max difference at
#    the end?
#    <details><summary>answer</summary>At step 0, with 27 steps done again; and still 0.0. A snapshot saves time. The
#    zero comes from the determinism.</details>
# 4. The twin gets `--seed 1`, the killed run stays as it is. Which of the three claims change?
#    <details><summary>answer</summary>The max difference is no longer 0.0, and "same weights" is False: other initial
#    weights, another order of the samples. "Restarts 1" stays, since only the killed run's record says it.</details>
# 5. Somebody's snapshot forgets the optimizer's momentum, and the job resumes after 20 steps. At which step does the
#    lowest panel leave zero?
#    <details><summary>answer</summary>At step 21. The loss of step 20 is computed with the right weights; the update
#    that follows is the first that misses the momentum, and the next loss shows it.</details>
# 6. You kill a rank four times, each time after the job has come back. What does the fourth kill do?
#    <details><summary>answer</summary>It ends the job with exit code 1: three restarts were allowed. A new launch has
#    three again, and goes on from the newest snapshot.</details>
# 7. `--nproc-per-node 3`. How many processes does the tree show, and how many images does the job use in one step?
#    <details><summary>answer</summary>Four: the agent and three ranks (a moment later each rank has a guard, which
#    kills it should it hang). Still 64 images, as 22 + 21 + 21: the batch belongs to the experiment, not to the
#    machine.</details>
# 8. The job has finished, and you type its command again with the same `--run-dir`. How many steps does it do?
#    <details><summary>answer</summary>None. It finds the snapshot of the last step, says "nothing to do", and ends
#    with exit code 0.</details>
# 9. You send rank 1 a SIGTERM instead of the SIGKILL. How many restarts, and how many steps are lost?
#    <details><summary>answer</summary>No restart and no step. SIGTERM can be caught: the ranks agree on a step, write
#    a snapshot after it and leave, and the agent is told not to start them again. The same command goes on from
#    there.</details>
# 10. In the overlay of a job, start 2 begins at step 30 and the yellow band is 10 steps wide. What was the last step
#     that start 1 did?
#     <details><summary>answer</summary>Step 39: the steps 30 to 39 were lost. The snapshot that was due after 40
#     steps was not yet there.</details>

# %% [markdown]
# ## In five lines
#
# - One death ends a distributed step for everybody; what brings the job back is the agent, which restarts *all*
#   ranks.
# - A restart goes on from the newest good snapshot; the steps since then are done again.
# - "It works again" is not the test. The test is the difference to an undisturbed run, and it can be exactly 0.0.
# - Exactness takes everything that the next step depends on: weights, optimizer, schedule, position, randomness.
# - `--max-restarts` is 0 unless you set it.
#
# ## Your way through the course
#
# | you have | take |
# |:--|:--|
# | 15 minutes | this notebook, both exercises, and `make demo` in a terminal |
# | an hour | this one, then [04](04_torchrun.ipynb) without its exercises: restarts, snapshots, who died first |
# | a workshop | all in order, from [01](01_single_gpu.ipynb) on; five hours reach the end of 04 |
#
# Answers to the exercises: [solutions](solutions/00_start_here.ipynb). **For teachers**: 15 minutes. To discuss: *Why
# must the agent replace rank 0, too, which was healthy?* The other notebooks are in [TEACHING](TEACHING.md).
#
# **Next: [01 · The loop on one GPU](01_single_gpu.ipynb)**, where every distributed job begins.
