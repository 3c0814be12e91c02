"""Damage the snapshot files of a run in thousands of ways, one after another, and look what a new process loads.

Each damage must be noticed and reported, and the newest snapshot that is still good loaded with the right bits; when
none is, the start must be refused. A damaged claim must change nothing about which snapshots may be loaded.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from _damages import Damage, claim_damages, manifest_damages, payload_damages
from torch import nn

from course_lib.engine import SnapshotStore, TrainState, UsageError, World, run
from course_lib.engine.snapshots import Claim, claim_generation, find_snapshot
from course_lib.engine.tree import digest

ALONE = World(0, 0, 1, torch.device("cpu"))
EVERY_BYTE = ("manifest: a bit", "manifest: cut")  # of one manifest all places come first, before those of the others
START_EVERY = 20  # of so many cases, one goes on: a new generation starts, saves, and is found


@dataclass(frozen=True)
class Sample:
    """A sound run: its files, the line of its newest generation (newest first), and the digest of each content."""

    store: SnapshotStore
    files: dict[str, bytes]
    line: tuple[str, ...]
    digests: dict[str, str]

    def restore(self) -> None:
        shutil.rmtree(self.store.directory)
        self.store.directory.mkdir()
        for name, content in self.files.items():
            (self.store.directory / name).write_bytes(content)


def make_sample(directory: Path, seed: int) -> Sample:
    """Three generations with two snapshots each, and a late one of the first, which is not of the line."""
    store = SnapshotStore(directory, keep=9)
    contents, digests, line = trained(seed), dict[str, str](), list[str]()
    claims: list[Claim] = []

    def save(claim: Claim, step: int) -> str:
        content = next(contents) | {"step": step}
        name = store.save(claim, content, step=step, epoch=0, world_size=1, config={"seed": seed}).name
        digests[name] = digest(content)
        return name

    for first in (10, 30, 50):
        claims.append(claim_generation(store, ALONE, find_snapshot(store, ALONE)))
        line += [save(claims[-1], first), save(claims[-1], first + 10)]
    save(claims[0], 90)
    files = {path.name: path.read_bytes() for path in sorted(store.directory.iterdir())}
    return Sample(store, files, tuple(reversed(line)), digests)


def trained(seed: int) -> Iterator[dict[str, Any]]:
    """The state of a small training job after each of its steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
        yield {"state": TrainState(model, optimizer).state_dict(), "progress": {"lr": 0.01}}


def cases(ours: Sample, theirs: Sample, draw: random.Random) -> Iterator[tuple[Damage, ...]]:
    """The damages, one of each kind in turn; with each, some that make a new process come to look at that file.

    It takes the newest good snapshot, so whatever is newer than a damaged one has to be damaged, too.
    """
    kinds: dict[str, list[Damage]] = {}
    claims = [file for file in ours.files if file.endswith(".claim.json")]
    each = [damages(ours.files, theirs.files, n) for n in ours.line for damages in (payload_damages, manifest_damages)]
    for damage in chain(*each, *(claim_damages(ours.files, theirs.files, file) for file in claims)):
        kinds.setdefault(damage.kind, []).append(damage)
    spoilers: dict[str, list[Damage]] = {name: [] for name in ours.line}
    for damages in kinds.values():
        draw.shuffle(damages)
        if damages[0].kind in EVERY_BYTE:
            damages.sort(key=lambda damage: damage.bad != ours.line[:1])
        for damage in damages[:60]:
            if damage.bad and Path(damage.file).stem in spoilers:
                spoilers[damage.bad[0]].append(damage)
    for damage in filter(None, chain.from_iterable(zip_longest(*kinds.values()))):
        name = Path(damage.file).stem
        newer = ours.line[: ours.line.index(name)] if name in ours.line else ()
        yield damage, *(draw.choice(spoilers[other]) for other in newer)


def outcome(sample: Sample, damages: tuple[Damage, ...], go_on: bool) -> tuple[str, str | None]:
    """What a new process made of the damaged run, and what is wrong with that (None: nothing)."""
    bad = {name for damage in damages for name in damage.bad}
    reported = {name for damage in damages for name in damage.reported}
    expected = next((name for name in sample.line if name not in bad), None)
    before = set(sample.store.directory.iterdir())
    try:
        found = find_snapshot(SnapshotStore(sample.store.directory.parent), ALONE)
    except UsageError as error:
        listed = sum(name in str(error) for name in sample.line) >= 5  # it names five, and a line is enough
        return "refused, none is good", None if expected is None and listed else f"refused, not {expected}: {error}"
    name = found.manifest.name if found.manifest else None
    what = f"loaded, number {sample.line.index(name) + 1} of the line" if name in sample.line else f"loaded {name}"
    said = {skipped for skipped, _ in found.skipped}
    if name is None or name != expected:
        return what, f"{name} instead of {expected}"
    if digest(found.content) != sample.digests[name]:
        return what, f"{name} has other bits"
    if said != reported:
        return what, f"reported {sorted(said)} instead of {sorted(reported)}"
    if set(sample.store.directory.iterdir()) != before:
        return what, "looking wrote something"
    return what, start_and_save(sample) if go_on else None


def start_and_save(sample: Sample) -> str | None:
    """Let the next generation start in the damaged run and save; what is wrong with that, or None."""
    store = SnapshotStore(sample.store.directory.parent)
    claim = claim_generation(store, ALONE, find_snapshot(store, ALONE))
    mine = store.save(claim, {"step": 99}, step=99, epoch=0, world_size=1, config={})
    found = find_snapshot(SnapshotStore(sample.store.directory.parent), ALONE)
    return None if found.manifest == mine else f"the next generation's own snapshot was not found: {found.manifest}"


def campaign(directory: Path, count: int, seed: int) -> dict[str, Any]:
    """Damage `count` files and return the figures; whatever was not right is under "failures"."""
    ours, theirs = make_sample(directory / "ours", seed), make_sample(directory / "theirs", seed + 1)
    kinds, outcomes, failures, files, same = Counter[str](), Counter[str](), list[str](), 0, 0
    for number, damages in enumerate(cases(ours, theirs, random.Random(seed))):
        if sum(kinds.values()) == count:
            break
        go_on = number % START_EVERY == 0
        for damage in damages:
            damage.apply(ours.store.directory, ours.files)
        try:
            what, wrong = outcome(ours, damages, go_on)
        except Exception as error:  # no damage may lead to one
            what, wrong = "crashed", f"{type(error).__name__}: {error}"
        if go_on or wrong is not None:
            ours.restore()
        for damage in damages:
            damage.undo(ours.store.directory, ours.files)
        if wrong is not None:
            failures.append(f"case {number}, {[(d.kind, d.file) for d in damages]}: {wrong}")
        outcomes[what] += 1
        if damages[0].reported:
            kinds[damages[0].kind] += 1
            files += len(damages)
        else:
            same += 1  # white space: it still says what it said, and was loaded
    figures = {"damaged": sum(kinds.values()), "files damaged in all": files, "only other white space": same}
    return figures | {
        "failures": failures,
        "outcomes": dict(sorted(outcomes.items())),
        "kinds": dict(sorted(kinds.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000, help="files to damage, one after another")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs and of the order of the damages")
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for the figures")
    options = parser.parse_args()
    if options.files < 1:
        raise UsageError("--files must be at least 1")
    started = time.monotonic()
    torch.set_num_threads(1)  # more would wait for each other longer than they work
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        figures = campaign(Path(directory), options.files, options.seed)
    figures = {"seed": options.seed, **figures, "seconds": round(time.monotonic() - started, 1)}
    for name, value in figures.items():
        rows = [f"  {key:40} {number}" for key, number in value.items()] if isinstance(value, dict) else []
        print("\n".join([f"{name:42} {'' if rows else value}", *rows]))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if figures["failures"] or figures["damaged"] < options.files:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
