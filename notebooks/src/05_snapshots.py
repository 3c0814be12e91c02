# %% [markdown]
# # 05 · Snapshots: whom do you trust?
#
# In notebook 04 a job died and lost nothing, because there was a file, and the file was whole. Now the file itself is
# the suspect. Three weeks of training hang on it, and you find out what it is worth on the day you need it.
#
# **The question of this notebook:** when is a snapshot a snapshot?
#
# You will kill a save at a byte of your choice, turn one bit around and watch what it does to training, write a
# `publish` that survives a power cut at any of its lines, decide which snapshot a job may trust, and find out how long
# all that has to hold training up.
#
# *For teachers: 90 minutes. To discuss: "Our snapshots are on mirrored disks, and there is a backup each night: what
# more do you want?" Name three things in this notebook that neither of the two helps against.*
#
# **Bet first.** Which of these are true? Put `True` or `False`; at the end you come back to your bets.
#
# - **A** · A file that `torch.load` opens without an error holds what was saved.
# - **B** · A save that is killed can cost you the snapshot before it.
# - **C** · Once `new.replace(path)` has returned, a power cut can't take the new snapshot away.
# - **D** · Of all good snapshots, the one with the most steps is the right one to go on from.
# - **E** · While a snapshot is being written, training can go on.

# %% ready
# No module named course_lib? This kernel isn't the course's: close it, and say `make lab` in the course's folder.
from course_lib.lab.notebook import expect_failure, fresh, setup

setup()

# SOLUTION
bets = {"A": False, "B": True, "C": False, "D": False, "E": True}
# STUDENT: bets = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}
# END

# %% [markdown]
# ## 1 · Killed at a byte
#
# A model of 6.7 million parameters with AdamW has three numbers of four bytes for each: 80 MB. Here are two ways to
# save it over the last snapshot. In a moment a process of its own does each of them, and is killed with SIGKILL as
# soon as its file holds as many bytes as you say; then at its first byte, and at its last but one. (`open_file(path)`
# opens a file for writing: one in which the process dies.)
#
# **Predict.** There are 80 million places to die. How many of them leave a snapshot that can be opened, with the first
# way, and how many with the second?

# %% two-ways
from inspect import getsource

from IPython.display import Markdown

from course_lib.lab import torn

Markdown(f"```python\n{getsource(torn.in_place)}\n\n{getsource(torn.beside)}```")

# %% kill tags=["nbval-ignore-output"]
from course_lib.lab.launch import runs_directory

byte = 40_000_000  # yours, up to 80,000,000
folder = runs_directory() / "05-torn"
# !python -m course_lib.lab.torn --folder {folder} 0 {byte} -1

# %% claims-torn
from course_lib.lab import fig05
from course_lib.lab.snapshot_claims import deaths

dead = deaths(folder)
for way in ("in place", "beside"):
    steps = [death.step for death in dead if death.way == way]
    print(f"{way}: {len(steps)} killed · {steps.count(None)} can't be opened · {steps.count(1)} hold the old snapshot")
fig05.torn(dead)

# %% [markdown]
# Written in place, *none*. Opening a file for writing empties it, so the old snapshot is gone before the first byte
# of the new one is there. And the new one is no snapshot before its very last byte: the list of what is in the file
# stands at its end. In the last row every weight is in the file, one byte is missing, and nothing can open it. (One of
# the course's tests cuts a small snapshot at each of its bytes. Not one of the pieces opens.)
#
# So the dangerous time is the whole of the save, and a job that saves often is in danger often. Written beside, all 80
# million places are harmless. (What stays is half a file of the dead process, which somebody has to sweep up: in the
# engine the next generation does.) You wrote that yourself in notebook 04. Is it enough?
#
# ## 2 · One bit
#
# A file can be whole and wrong. A cable, a controller, a bit of memory on the way to the disk: one bit comes out the
# other way round. A float32 has 32 of them: the sign, eight for the exponent, 23 for the fraction. The weight 0.5 is
# `0 01111110 000…`: plus, 2 to the power of 126 - 127, times 1.
#
# **Exercise (predict).** Bit 23, the lowest of the exponent, is flipped. Which number does 0.5 become?

# %% flipped tags=["exercise"]
from course_lib.lab.exercises import n05 as check

# SOLUTION
number = 1.0
# STUDENT: number = ...
# END
check.flipped(number)

# %% bits
fig05.bits(0.5)

# %% [markdown]
# Of the 32 flips, 23 change the weight by less than its own size; eight turn it round, double it, or make it smaller;
# and one makes it as large as numbers get. Now the experiment. A small network has read digits for 25 steps and is
# saved. Then one bit of one weight is flipped *in the file*, and training goes on from there.
#
# **Predict.** Who complains first: `torch.load`, the loss curve, or nobody?

# %% flips
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from course_lib.lab import one_bit
from course_lib.lab.fallback import flip

scratch = TemporaryDirectory()
good, bad = Path(scratch.name, "good.pt"), Path(scratch.name, "bad.pt")
one_bit.write_snapshot(good)

flips = {"lowest bit of the fraction": ("last", 0), "the sign": ("last", 31)}
flips["highest bit of the exponent"] = ("first", 30)
curves = {}
for name, (layer, bit) in flips.items():
    shutil.copyfile(good, bad)
    flip(bad, one_bit.find(bad, layer) + bit // 8, bit % 8)  # reads the file, turns one bit round, writes it
    torch.load(bad, map_location="cpu", weights_only=True)  # not a word
    curves[name] = one_bit.train_on(bad)

# %% curves
from zipfile import ZipFile

whole = one_bit.train_on(good)
sign, bomb = curves["the sign"], curves["highest bit of the exponent"]
print(f"the sign: another loss at once {sign[0] != whole[0]} · finite to the end {torch.tensor(sign).isfinite().all()}")
print(f"the exponent: first 10 losses the same {bomb[:10] == whole[:10]} · the end {bomb[-1]}")
print(f"a checksum that is wrong: in {good.name} {ZipFile(good).testzip()} · in {bad.name} {ZipFile(bad).testzip()}")
fig05.curves(whole, curves)

# %% [markdown]
# `torch.load` says nothing, to any of them. And then:
#
# - the lowest bit: nobody will ever know. It is another model, by a hair;
# - the sign of the largest weight of the last layer: the loss jumps, and within thirty steps it has healed. In a log of
#   a hundred thousand steps this is a little spike that somebody calls noise;
# - the highest bit of the exponent, of a weight that looks at a pixel which is dark in nearly all digits: for ten steps
#   *exactly* the right curve. Then the first digit comes that lights the pixel. A bomb with a fuse: between damage and
#   explosion can lie days, and by then every older snapshot may have been tidied away.
#
# The last line is the irony of it: the file *has* a checksum of each tensor, and `torch.load` doesn't look at it.
#
# So a snapshot needs a **digest** over every byte, and somebody who computes it again *before* a tensor reaches the
# model. We come to that in part 4. First the file has to get to the disk.
#
# ## 3 · Until the machine dies
#
# SIGKILL takes a process. What it had written is with the kernel, and still reaches the disk. When the **machine**
# dies, that memory is gone, too. Only what somebody had asked for is then on the disk for certain:
#
# - the **bytes** of a file, once `os.fsync` of that file has returned;
# - a **name**, once `os.fsync` of its folder has returned. A name is an entry in a folder, and a folder is a file.
#
# Everything else may be there or not, in any order: the file system writes when it likes. (Many are kinder than that.
# None promises it to you.) The next cell runs a function for real, watches each of its lines, and works out what the
# disk may hold when the power fails right after it. An unsynced file may be empty, cut, full of zeros, or whole.
#
# **Predict.** Your save from notebook 04 wrote beside and then replaced (`new.replace(path)` is `os.replace`). What may
# be under the name?

# %% beside-map
from course_lib.lab.publishing import verdict


def beside(path, content):
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
    new.replace(path)


print(verdict(beside))
fig05.crash_map(beside)

# %% [markdown]
# The name can be on the disk before the bytes: then a perfectly good name stands for zeros. (Let `beside` write to
# `path` itself, and look: it is worse.) And even when `beside` has returned, and your log says "saved", there may be
# *nothing*: the name was in memory.
#
# **Exercise (write).** Write `publish(path, content)`. Its promise:
#
# - as long as it hasn't returned, there is nothing under `path`, or all of `content`;
# - once it has returned, there is all of it, whatever dies;
# - nothing is left over, and nothing else in the folder is touched;
# - if `path` is taken it raises `FileExistsError`, and what was there stays. Also when another process takes the name
#   at the last moment. (Part 7 shows who that is.)
#
# Tools: `file.flush()` hands Python's own buffer to the kernel, `os.fsync(file.fileno())` syncs a file, and for a
# folder `number = os.open(path.parent, os.O_RDONLY)`, `os.fsync(number)`, `os.close(number)`. `os.link(new, path)`
# gives a file a second name, if that name is free; `new.unlink()` takes a name away.
#
# The check lets the machine die after each of your lines, tries everything that may be on the disk then, and names
# what is missing.

# %% publish tags=["exercise"]
import os

from course_lib.lab import fig05
from course_lib.lab.exercises import n05 as check


def publish(path, content):
    # SOLUTION
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.link(new, path)
    new.unlink()
    number = os.open(path.parent, os.O_RDONLY)
    os.fsync(number)
    os.close(number)
    # STUDENT: ...
    # END


check.publish(publish)
fig05.crash_map(publish)

# %% [markdown] tags=["exercise"]
# *Solved*? Then spoil it: take away one line after the other, and look at the picture each time. Every line has a
# crash of its own that it is there for.
#
# The engine's is in `course_lib/engine/snapshots/files.py`: the same lines, a temporary name that nobody else can have,
# and an error of the disk leaves nothing behind. With it the engine publishes a snapshot as *two* files: the payload,
# and then the manifest that says what the payload must be.
#
# **Exercise (predict).** How many times does the engine call `os.fsync` for one snapshot?

# %% fsyncs tags=["exercise"]
# SOLUTION
calls = 4
# STUDENT: calls = ...
# END
check.fsyncs(calls)

# %% count-fsyncs
from course_lib.engine import SnapshotStore
from course_lib.lab.crash_disk import record

store = SnapshotStore(Path(scratch.name, "counted"))
claim = store.claim(1, parent=None)
facts = {"epoch": 0, "world_size": 1, "config": {}}


def save_one():
    store.save(claim, {"weights": torch.ones(1000)}, step=10, **facts)


syncs = record(save_one, folder=store.directory).syncs
print("fsync of", " · ".join("the folder" if sync is None else "a file" for sync in syncs))

# %% [markdown]
# In this order: if the manifest is there, its payload is there, and all of it. A payload without a manifest is no
# snapshot: its writer died between the two.
#
# ## 4 · Digests, and the way back
#
# Now a real job: one epoch of the digits, a snapshot every 5 steps, of which the three newest are kept. What it leaves,
# and a part of the newest manifest:

# %% train tags=["nbval-ignore-output"]
import json
from textwrap import shorten

run = fresh("05-run")
train = "scripts/ddp_torchrun.py --epochs 1 --snapshot-every 5 --run-dir"
# !python {train} {run}
for path in sorted(run.glob("snapshots/*")):
    print(f"{path.stat().st_size:>10,} bytes  {path.name}")

manifest = json.loads(max(run.glob("snapshots/gen-*-step-*.json")).read_text())
for name in ("step", "generation", "parent", "bytes", "sha256", "config", "digest"):
    print(f"{name:>10}: {shorten(str(manifest[name]), 80)}")

# %% [markdown]
# `sha256` is the digest of the payload's bytes, `digest` the manifest's own: a flipped bit in a manifest is as bad as
# one in a tensor. `parent` and `generation` are for part 7, `config` for refusing the snapshot of another job. (And the
# payload is opened with `weights_only=True`: one that wants to run code is refused.)
#
# A digest only *finds* the damage. What then? There are older snapshots, and that is why they are kept.
#
# **Exercise (write).** In the check's folders a snapshot is a payload `step-40.pt` and a manifest `step-40.json`, which
# holds `{"step": 40, "sha256": …}`. Write `newest_good(folder)`: the path of the payload of the newest snapshot that
# can be trusted. The check damages snapshots in every way it knows. Two cases are up to your judgement: a folder
# without any snapshot, and one in which none is good. In which of them may a job begin at step 0? (There: return
# `None`. In the other one: raise.)

# %% newest-good tags=["exercise"]
import hashlib
import json

from course_lib.lab.exercises import n05 as check


# SOLUTION
def is_good(payload):
    try:
        manifest = json.loads(payload.with_suffix(".json").read_text())
        return hashlib.sha256(payload.read_bytes()).hexdigest() == manifest["sha256"]
    except (OSError, ValueError, KeyError):
        return False


def newest_good(folder):
    manifests = sorted(folder.glob("step-*.json"), key=lambda path: int(path.stem[5:]), reverse=True)
    for manifest in manifests:
        if is_good(manifest.with_suffix(".pt")):
            return manifest.with_suffix(".pt")
    if manifests:
        raise RuntimeError("there are snapshots, and none of them is good")
    return None


# STUDENT: def newest_good(folder):
# STUDENT:     ...
# END
check.newest_good(newest_good)

# %% [markdown] tags=["exercise"]
# **Exercise (predict).** The job above did 24 steps and has kept the snapshots after 15, 20 and 24 steps. The two
# newest get a flipped bit each, and the same command is started again. How many steps does it do again?
#
# (The next cell damages the newest, in a copy of the run, and all three in another. `verify` is the engine's own tool:
# it reads every byte of every snapshot, and its exit code says whether all are good.)

# %% after-two tags=["exercise"]
# SOLUTION
steps_again = 9
# STUDENT: steps_again = ...
# END
check.after_two(steps_again)

# %% damage tags=["nbval-ignore-output"]
damaged, lost = fresh("05-damaged"), fresh("05-lost")
for twin, which in {damaged: "*-step-00000024.pt", lost: "*.pt"}.items():
    shutil.copytree(run, twin, dirs_exist_ok=True)
    for payload in twin.glob(f"snapshots/{which}"):
        flip(payload, byte=payload.stat().st_size // 2)

with expect_failure() as verified:
    print("The newest is damaged:")
    # !python -m course_lib.engine.snapshots verify {damaged}
print(f"\nverify's exit code {verified.exit_code}; and now the job's own command again:")
# !python {train} {damaged}

with expect_failure() as refused:
    print("\nAll of them are damaged, and the job's command again:")
    # !python {train} {lost}
print("its exit code", refused.exit_code)

# %% claims-damage
from course_lib.lab.claims import every_sample_once, replay_difference, replayed, restarts, same_weights

print(f"restarts {restarts(damaged)} · steps done again {replayed(damaged)} · difference {replay_difference(damaged)}")
print(f"every sample once {every_sample_once(run) and every_sample_once(damaged)}")
print(f"the same weights at the end as without the damage {same_weights(run, damaged)}")

# %% [markdown]
# It passed over the damaged one, said so, went on from the one before, and came to the same bits. **A damaged snapshot
# costs steps, not the run.** And the job that had no good one left refused to start. The next cell tries each number of
# damaged snapshots, with the engine's own search:

# %% fall-back
from course_lib.lab.snapshot_claims import resume_points

for count, point in resume_points(run).items():
    print(f"newest {count} damaged:", "stops" if point is None else f"goes on after {point} steps")
fig05.fall_back(run)

# %% [markdown]
# The last row is a decision. A job that finds only damaged snapshots could begin at step 0, and many do: the log looks
# healthy, and three weeks are gone without a word. Ours stops. Whoever really wants to begin again says so, with
# another run directory.
#
# There is a second trap in the picture. A tidy job that keeps "the newest three" and counts *files* may throw the last
# good one away, to keep three damaged ones. So the engine counts only snapshots that it has read again and found good.
#
# ## 5 · What belongs into it
#
# A digest proves that the file holds what was put in. It says nothing about what was forgotten. Notebook 04 had the
# line-up of the classic pieces; here is the whole list:
#
# | what | without it |
# | --- | --- |
# | weights and buffers | that isn't a snapshot |
# | optimizer, scheduler, GradScaler | the first loss is right, and then the weights part |
# | position: epoch, next sample, what the order follows from | samples twice, samples never |
# | what else has a memory: averages of weights, best value so far, counters of patience | *training looks perfect* |
# | seed, global batch, data set, model: as a refusal, not to be restored | the right file for the wrong job |
#
# And what doesn't belong: gradients, the wrapper's `module.` before each name, the world size as a condition; and
# random states, if all that is random is a function of seed and position.
#
# **Exercise (diagnose).** Five runs of a job, killed after 47 steps and resumed. Four of the snapshots lacked one
# piece. The job keeps an average of its weights, writes `best.pt` when the held-out loss has never been lower, lowers
# the learning rate when it hasn't fallen for more than three epochs of 5 steps, and draws the seed of its order when a
# process starts. Which run lacked what?
#
# `average` · `best value` · `plateau counter` · `order's seed` · `nothing missing`

# %% lost-pieces tags=["exercise", "nbval-ignore-output"]
from course_lib.lab import fig05_time

fig05_time.lost_pieces()

# %% left-out tags=["exercise"]
from course_lib.lab.exercises import n05 as check

# SOLUTION
answer = {"A": "average", "B": "plateau counter", "C": "order's seed", "D": "nothing missing", "E": "best value"}
# STUDENT: answer = {"A": ..., "B": ..., "C": ..., "D": ..., "E": ...}
# END
check.left_out(answer)

# %% [markdown]
# <details><summary>How to read them (after you have tried)</summary>
#
# Blue at once: the first batch holds other samples, so the order was another one. Only orange at once: training is the
# same, and the average began anew; it heals, since an average forgets. Blue after two epochs: until then all was the
# same, so something was *counted* from zero again, and the rate fell later than it should have. No curve at all, but a
# `best.pt`: the first evaluation after the resume beat a best value that nobody remembered, and the best model of the
# run was overwritten by a worse one. Flat and without a star: nothing missing.
# </details>
#
# In the engine all of these go in by name: `TrainState(model, optimizer, scheduler, extra={"average": …, "best": …})`.
#
# ## 6 · What it costs
#
# Digest, fsync, manifest: does training have to wait for all that? Here is a real training loop with 80 MB of state,
# which saves in each of four ways. **Predict** the order of the four, by how long the training thread is held up.

# %% stalls tags=["nbval-ignore-output"]
from course_lib.lab import fig05_time, stalls

timelines = []
for way in stalls.WAYS:
    with TemporaryDirectory(dir=runs_directory()) as place:
        timelines.append(stalls.measure(way, Path(place)))
fig05_time.stalls(timelines)

# %% recorded
print(stalls.recorded_table(Path("notebooks/recorded/snapshot_stall.json")))

# %% [markdown]
# `torch.save` holds training up until the file is with the kernel, which is not yet the disk. Made durable, the same
# takes longer; how much, depends on the disk. `async_save` of torch's own distributed checkpointing copies the state,
# and writes and syncs the copy in another thread. So does the engine, but it copies into memory that it has used
# before. New memory has to be handed out page by page, which takes longer than the copying. (The engine's grey bar is
# long: that thread has digests to compute as well, and it shares the processor and Python's lock with training. Nobody
# waits for it, as long as the next snapshot isn't due.)
#
# This is what happens at a snapshot, in `course_lib/engine/saver.py`:
#
# 1. **copy**: the training thread copies the state into its buffers and goes on with the next step;
# 2. **write**: another thread writes the copy into a temporary file, digests what passes, and syncs it;
# 3. **compare**: each rank posts the digest of its own weights. If one rank's replica has drifted, there is no
#    snapshot, but an error;
# 4. **publish**: the payload gets its name, then the manifest;
# 5. at the end of the step in which that is done, the ranks hear of it. An error of the disk is a warning and an event:
#    training goes on with the old snapshots. The last snapshot of all is waited for.
#
# The copy is the part that can't be left out. Or can it? The cheapest of all is to give the state to a thread as it is:

# %% torn-in-time
from threading import Thread

from course_lib.engine.tree import HostCopy


def save_behind(state, copy):
    """The steps whose values each tensor has in the file, when training goes on meanwhile."""
    path = Path(scratch.name, "behind.pt")
    state = {name: torch.full_like(tensor, 3.0) for name, tensor in state.items()}  # after three steps
    writer = Thread(target=torch.save, args=(copy(state), path))
    writer.start()
    while writer.is_alive():
        for tensor in state.values():
            tensor += 1  # a step changes every weight
    found = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor[::1000].tolist() for name, tensor in found.items()}


state = {f"layer {number}": torch.empty(2_500_000) for number in range(8)}
without, copied = save_behind(state, copy=lambda state: state), save_behind(state, copy=HostCopy())
for name, layers in {"without a copy": without, "with a copy": copied}.items():
    steps = {step for values in layers.values() for step in values}
    print(f"{name}: values of one step {len(steps) == 1}, of the step at which the save began {steps == {3.0}}")
fig05_time.moments(without, began=3)

# %% [markdown]
# Not a bit is wrong, a digest would match, `torch.load` is happy: and the file holds a model that has never existed.
# The first layers are from one step, the last ones from much later. It is torn, in time. **A snapshot is of one
# moment**, and the copy is what makes it so.
#
# **Exercise (predict).** Step time 0.1 s, a snapshot every 10 steps. Copying takes 0.01 s, and the disk is slow:
# writing takes 1.5 s. One write is in flight at most; when the next snapshot is due, the engine waits for it (up to
# five seconds, then it does without). For how many seconds is training held up at each snapshot but the first?

# %% held-up tags=["exercise"]
# SOLUTION
seconds = 0.5
# STUDENT: seconds = ...
# END
check.held_up(seconds)

# %% [markdown]
# ## 7 · Two generations
#
# Last question: *who* writes? A node stops answering, and the job is started again elsewhere, from the newest snapshot.
# Then the old node wakes up. Nobody has told it that it is dead: it goes on, and saves.
#
# So each start **claims** the next generation, and writes down which snapshot it has grown from, its parent.
# Generation 1 has snapshots after 10 and 20 steps, and is paused in the middle of a save. Generation 2 grows from 20
# and saves after 25. Then generation 1 wakes up and publishes a snapshot after 30 steps, whole and with the right
# digest.
#
# **Exercise (predict).** The job starts once more. After how many steps does it go on?

# %% resumed tags=["exercise"]
# SOLUTION
steps = 25
# STUDENT: steps = ...
# END
check.resumed(steps)

# %% two-generations
from course_lib.lab.snapshot_claims import restore

store = SnapshotStore(Path(scratch.name, "two"))


def save(claim, step):
    return store.save(claim, {"weights": torch.full((3,), float(step))}, step=step, **facts)


one = store.claim(1, parent=None)
save(one, 10)
parent = save(one, 20)
with store.draft(one, {"weights": torch.ones(3)}, step=30, **facts) as asleep:  # written, but paused here
    two = store.claim(2, parent=parent.name)
    save(two, 25)
    try:  # generation 1 wakes up
        store.publish(asleep)
    except FileNotFoundError:
        print("its half-done save is gone: generation 2 has swept the folder")
late = save(one, 30)  # so it saves once more, and nobody is in its way
print(f"published {late.name}; a start goes on after {restore(store.directory.parent).manifest.step} steps")
fig05_time.generations(store)

# %% [markdown] tags=["exercise"]
# It is there, it is sound, and it changes nothing: whoever starts asks the newest claim for its line, which is 25, then
# its parent 20, then 10. In the line, the higher step counts; outside of it, nothing does. An old generation deletes
# nothing either, once it sees a newer claim, and it can't write over a file of the newer one: the generation is part of
# each name, and `publish` takes no name from anybody.
#
# (And why not look, just before the publish, whether one is still the newest? Because the pause may come right after
# the look. That is the gap in *look, then act*, which `os.link` hasn't got either.)
#
# Your bets:

# %% settle tags=["exercise"]
check.bets(bets)

# %% [markdown]
# Solved, or stuck? [The solutions](solutions/05_snapshots.ipynb).
#
# ## Ten questions
#
# Answer before you unfold. Most of them change something above, so you can try it.
#
# 1. Part 1 with `byte = 79_999_999`: what do you find in the folder right after the death of the save that writes
#    beside?
#    <details><summary>answer</summary>The old snapshot, whole, and next to it <code>snapshot.new</code>, with
#    79,999,999 bytes of the new one.</details>
# 2. In part 2 you flip the same bit of the same file twice. What do the curve and a digest say?
#    <details><summary>answer</summary>Nothing: the file is what it was before, in every byte.</details>
# 3. The bomb again, on a weight whose pixel is dark in all images. Which curve do you get, and is all well?
#    <details><summary>answer</summary>Exactly the grey one, to the end of training. Whoever uses the model on an image
#    that lights the pixel gets infinities.</details>
# 4. In `publish` you sync the folder before `os.link` instead of after it. Which row of the picture turns red first?
#    <details><summary>answer</summary>Only the last: it has returned, and the name may be gone. Before that, nothing is
#    a legal answer.</details>
# 5. In `publish` you leave out `file.flush()`. Which row turns red first, although there is an `fsync`?
#    <details><summary>answer</summary>The one of <code>os.link</code>. At the fsync the content was still in Python's
#    buffer, so an empty file was synced; it was handed over when the file was closed, and synced by nobody.</details>
# 6. Part 4 with `--snapshot-every 12`, and the newest is damaged. How many steps are done again?
#    <details><summary>answer</summary>12: the snapshots are those after 12 and after 24 steps.</details>
# 7. Part 4 with `--keep 1`, and the newest is damaged. What does the job do?
#    <details><summary>answer</summary>It stops and says that no snapshot can be trusted: there is no older one to fall
#    back on.</details>
# 8. The line-up with an average that forgets a hundred times as slowly. What becomes of run A's orange curve?
#    <details><summary>answer</summary>It starts higher, and stays there: an average that forgets so slowly takes a
#    hundred times as many steps to forget that it began anew.</details>
# 9. The state is twice as large. Which parts of the timeline double, for `torch.save` and for the engine?
#    <details><summary>answer</summary>For <code>torch.save</code> the whole time that it holds training up. For the
#    engine the copy, which is short, and the grey bar, which holds up nobody as long as the interval is
#    longer.</details>
# 10. In part 7, generation 2 dies before its first snapshot, and then generation 1 wakes up and publishes 30. After how
#     many steps does generation 3 go on?
#     <details><summary>answer</summary>20. The newest claim is still generation 2's, and it has grown from 20. The
#     steps up to 30 are done again: safe before fast.</details>
#
# ## In five lines
#
# 1. A save has a dangerous time, which is all of it: write beside, and give the name when the file is whole.
# 2. The machine's death takes what was not synced: sync the bytes, then give the name, then sync the folder.
# 3. A file can be whole and wrong. Check a digest of every byte before use, fall back to the newest good one, and stop
#    when there is none.
# 4. A snapshot holds everything that has a memory, and is of one moment: copy it, and write the copy behind training's
#    back.
# 5. The newest claim decides what counts: a process that doesn't know that it is dead changes nothing.
#
# Next: the number of ranks isn't fixed, either. [06 · Elastic](06_elastic.ipynb)
