"""Changed events turn every claim cell of every notebook red."""

from pathlib import Path

import pytest
from changed_records import CHANGES, read_record
from claim_cells import cells_of, findings
from helpers import REPO
from kernels import kernel
from test_claims import calm_run, crashed_run, write

from course_lib.lab.builder.make import sources
from course_lib.lab.builder.source import build

SOURCES = {path.stem: path for path in sources(REPO / "notebooks", [])}


@pytest.mark.timeout(900)  # the whole notebook, and each claim cell ten times
@pytest.mark.parametrize("name", SOURCES)
def test_changed_events_turn_every_claim_cell_red(name: str, tmp_path: Path) -> None:
    cells = cells_of(build(SOURCES[name]))
    assert any(cell.runs for cell in cells)
    with kernel(REPO / "notebooks", {"COURSE_RUNS": str(tmp_path / "runs")}) as it:
        found = findings(it, cells)
    assert not found, "\n".join(found)


SAMPLE = """\
# %%
import shutil

from course_lib.lab.notebook import fresh, setup

setup()

# %% train tags=["nbval-ignore-output"]
calm, run = fresh("calm"), fresh("run")
for folder in (calm, run):
    shutil.copytree(f"{recorded}/{folder.name}", folder, dirs_exist_ok=True)

# %% honest
from course_lib.engine import read_events
from course_lib.lab.claims import every_sample_once, max_difference, restarts, same_weights

count = restarts(run)
print(f"{count} · {max_difference(calm, run)} · {same_weights(calm, run)}")
print(every_sample_once(calm) and every_sample_once(run))

# %% of-the-record
print(run.name, "is done; restarts 1, difference 0.0")

# %% of-memory
print("restarts", count)

# %% unverified
print("steps:", len([event for event in read_events(run).events if event["event"] == "step"]) > 5)

# %% none-of-our-business
for run in range(3):
    print(run)

# %% tags=["exercise"]
print(calm)
"""


def test_a_claim_cell_that_rests_on_nothing_is_found(tmp_path: Path) -> None:
    for name, files in (("calm", calm_run()), ("run", crashed_run())):
        write(tmp_path / "recorded" / name, files)
    (tmp_path / "00_sample.py").write_text(SAMPLE.replace("{recorded}", str(tmp_path / "recorded")))
    cells = cells_of(build(tmp_path / "00_sample.py"))
    claims = {"honest": {"calm", "run"}, "of-the-record": {"run"}, "of-memory": {"run"}, "unverified": {"run"}}
    assert {cell.name.removeprefix("code-"): cell.runs for cell in cells if cell.runs} == claims
    with kernel(tmp_path, {"COURSE_RUNS": str(tmp_path / "runs")}) as it:
        found = findings(it, cells)
    sound = read_record(tmp_path / "runs" / "run")
    every = [what for what, change in CHANGES.items() if change(sound) != sound]
    assert len(every) == 6
    assert [line.split(":")[0] for line in found] == [
        f"code-{cell} shows the same with {what} in run"
        for cell in ("of-the-record", "of-memory", "unverified")
        for what in every
    ]
