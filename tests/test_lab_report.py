"""The report of a run: one real crash, looked at while it runs and afterwards; its page, its tables, its refusals."""

import json
import os
import re
import shlex
import shutil
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Completed, running, torchrun_cmd, torchrun_env
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text
from run_tools import event, life, write

from course_lib.engine import UsageError, read_events
from course_lib.lab.account import Report, examine
from course_lib.lab.history import Event
from course_lib.lab.ledger import KINDS, MOST_UNATTRIBUTED, Piece, check_ledger
from course_lib.lab.plots import NotebookFigure
from course_lib.lab.report import main, text
from course_lib.lab.report_figures import coarse, ledger_figure, loss_figure, recovery_figure
from course_lib.lab.report_page import page


@pytest.fixture(scope="module")
def crash(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A run whose rank 1 was killed in step 37, and its report as it was when the second life had begun to train."""
    run_dir = tmp_path_factory.mktemp("report") / "run"
    command = torchrun_cmd("--fault", "kill:rank=1,step=37", script="scripts/ddp_torchrun.py", max_restarts=3,
                           run_dir=run_dir)  # fmt: skip
    with running(command, env=torchrun_env()) as job:
        job.wait_for("resumed from")
        while job.popen.poll() is None and not any(e["generation"] == 2 for e in read_events(run_dir).named("step")):
            time.sleep(0.02)
        live = examine(run_dir)
        done = job.wait()
    assert done.returncode == 0, done.tail()
    return run_dir, live


def test_a_run_is_reported_while_it_goes_on(crash: tuple[Path, Report]) -> None:
    _, live = crash
    assert live.state == "running" and live.history.now is not None
    assert not any("engine" in note or "unattributed" in note for note in live.notes())
    assert sum(live.ledger.totals().values()) == live.history.now - live.history.begin
    assert len(live.recoveries) == 1 and live.ledger.steps["productive"] >= 31


def test_a_crashed_run_is_accounted_for_and_agrees_with_its_own_report(crash: tuple[Path, Report]) -> None:
    run_dir, _ = crash
    report = examine(run_dir)
    assert report.state == "finished" and report.generations == 2 and report.notes() == []
    assert report.ledger.steps == {"productive": 96, "replayed": 7}
    assert check_ledger(run_dir) == [] and report.ledger.share("unattributed") <= MOST_UNATTRIBUTED
    told = json.loads((run_dir / "report.json").read_text())
    assert report.ledger.share("productive") == pytest.approx(told["goodput"], abs=0.002)
    assert report.median_recovery == pytest.approx(told["recovery_seconds"][0], abs=0.002)
    (recovery,) = report.recoveries
    names = [phase.name for phase in recovery.phases]
    assert {"import", "process group", "data", "snapshot load", "warm-up", "first step"} <= set(names)
    assert not any("+" in name for name in names)
    assert set(recovery.ranks) == {0, 1}


def test_the_command_prints_narrow_tables_and_writes_a_page_that_needs_nothing_else(
    crash: tuple[Path, Report], launch: Callable[..., Completed], tmp_path: Path
) -> None:
    run_dir, _ = crash
    numbers = tmp_path / "numbers.json"
    done = launch([sys.executable, "-m", "course_lib.lab.report", run_dir, "--json", numbers])
    assert done.returncode == 0, done.tail()
    lines = [line for line in done.output.splitlines() if not line.startswith("wrote ")]
    assert max(map(len, lines)) <= 100 and "1 recovery of " in lines[0]
    told = json.loads(numbers.read_text())
    assert sum(told["ledger_us"].values()) == told["wall_us"] and set(told["ledger_us"]) == set(KINDS)
    assert all(sum(found["phases_us"].values()) == found["total_us"] for found in told["recoveries"])
    pictures = assert_self_contained((run_dir / "report.html").read_text())
    assert pictures == 3  # the ledger, one recovery, the loss


def assert_self_contained(html: str) -> int:
    """That a page asks for nothing from elsewhere; the number of its pictures."""
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert not re.search(r"https?:|@import|url\(|<script|<link", html)
    for source in sources:
        assert b64decode(source.removeprefix("data:image/png;base64,"), validate=True)[:4] == b"\x89PNG"
    return len(sources)


def many(count: int) -> list[list[Event]]:
    """A run with that many recoveries."""
    lives = [life(range(n, n + 2), 10.0 * n, n + 1) for n in range(count + 1)]
    lives[-1].append(event("finish", 10.0 * count + 6, 0, count + 1))
    return lives


def test_many_recoveries_fit_on_a_page(tmp_path: Path) -> None:
    report = examine(write(tmp_path / "<b>run", *many(9)))
    assert len(report.recoveries) == 9
    lines = text(report).splitlines()
    assert max(map(len, lines)) <= 100 and "4 more recoveries are in the medians" in lines
    html = page(report)
    assert assert_self_contained(html) == 2 + 6
    assert "<b>run" not in html and "3 more recoveries are not drawn" in html


def test_every_word_in_the_figures_can_be_read(tmp_path: Path) -> None:
    report = examine(write(tmp_path / "run", *many(2)))
    figures = [ledger_figure(report.history, report.ledger), loss_figure(report.events)]
    for figure in [*figures, *map(recovery_figure, report.recoveries)]:
        assert_readable(figure)


def assert_readable(figure: NotebookFigure) -> None:
    figure.draw_without_rendering()
    assert min(found.get_fontsize() for found in figure.findobj(Text) if found.get_text().strip()) >= 9
    for found in [*figure.texts, *(found for ax in figure.axes for found in ax.texts)]:
        box = found.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, found.get_text()


def test_a_run_that_died_and_one_that_never_trained_have_a_page(tmp_path: Path) -> None:
    died = examine(write(tmp_path / "died", life(range(6)), tail="{"))
    assert died.state == "died" and assert_self_contained(page(died)) == 2
    assert died.notes() == [
        "1 line of the event logs could not be read",
        "6 steps were lost and not done again",
        "the engine's goodput is 60.0%: it counts lost steps, and evaluations within a step's seconds",
    ]
    never = examine(write(tmp_path / "never", life()[:3]))
    assert never.state == "died" and assert_self_contained(page(never)) == 1
    assert "goodput 0.0%, 0 recoveries" in text(never)


def test_what_is_no_run_is_refused_in_one_line(launch: Callable[..., Completed], tmp_path: Path) -> None:
    done = launch([sys.executable, "-m", "course_lib.lab.report", tmp_path / "none"])
    assert done.returncode == 2 and done.output.count("\n") == 1
    assert done.output.startswith("error: ") and "--run-dir" in done.output
    with pytest.raises(UsageError, match="required: RUN_DIR"):
        main([])
    run_dir = write(tmp_path / "run", life(range(2)))
    with pytest.raises(UsageError, match="cannot write .*page.html: No such file"):
        main([str(run_dir), "--html", str(tmp_path / "no" / "page.html")])
    theirs = write(tmp_path / "theirs", life(range(2)))
    for options in (
        ["--html", "a", "--json", "./a"],
        ["--json", f"{run_dir}/../run/report.json"],
        ["--json", f"{theirs}/report.json"],
        ["--html", f"{theirs}/events/h-0.jsonl"],
    ):
        with pytest.raises(UsageError, match="give another path"):
            main([str(run_dir), *options])
    (tmp_path / "loop").symlink_to("loop")
    for odd in ("loop", "x" * 300):
        with pytest.raises(UsageError, match="cannot read"):
            main([str(tmp_path / odd)])
    target = tmp_path / "page.html"
    (tmp_path / "link").symlink_to(target)
    main([str(run_dir), "--html", str(tmp_path / "link"), "--json", "/dev/null"])
    assert target.is_file() and (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 5


def test_who_reads_no_more_and_a_disk_that_is_full(launch: Callable[..., Completed], tmp_path: Path) -> None:
    run_dir = write(tmp_path / "r\u00e9", life(range(2)))
    command = f"{shlex.quote(sys.executable)} -m course_lib.lab.report {shlex.quote(str(run_dir))}"
    done = launch(["bash", "-c", f'{command} | true; exit "${{PIPESTATUS[0]}}"'])
    assert (done.returncode, done.output) == (0, "")
    done = launch(["bash", "-c", f"{command} > /dev/full"])
    assert done.returncode == 2 and done.output == "error: cannot print: No space left on device\n"
    done = launch(["bash", "-c", f"PYTHONIOENCODING=ascii {command}"])
    assert done.returncode == 0 and done.output.splitlines()[-1].endswith("r?/report.html")


def test_a_directory_may_have_any_name_and_must_be_readable(launch: Callable[..., Completed], tmp_path: Path) -> None:
    run_dir = write(tmp_path / os.fsdecode(b"r\xff<n"), life(range(2)))
    done = launch([sys.executable, "-m", "course_lib.lab.report", run_dir, "--json", tmp_path / "numbers.json"])
    assert done.returncode == 0 and "wrote" in done.output, done.tail()
    assert json.loads((tmp_path / "numbers.json").read_text())["run"].endswith("r\ufffd<n")
    assert "r\ufffd&lt;n" in (run_dir / "report.html").read_text(encoding="utf-8")
    command: list[str | Path] = [sys.executable, "-m", "course_lib.lab.report", run_dir]
    if os.geteuid() == 0:  # who may read everything
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv")
        command = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", *command]
    for folder, mode in ((run_dir, 0), (run_dir / "events", 0), (run_dir / "events", 0o400)):
        folder.chmod(mode)
        try:
            done = launch(command)
        finally:
            folder.chmod(0o700)
        assert done.returncode == 2 and done.output.startswith("error: ") and done.output.count("\n") == 1


def test_clocks_that_are_wrong_and_steps_longer_than_a_life(tmp_path: Path) -> None:
    now = time.time()
    report = examine(write(tmp_path / "run", [*life(range(3), now), event("finish", now + 3600.0)]))
    assert [note for note in report.notes() if re.match(r"the last event is dated 3[56]\d\d s ahead", note)]
    told = [*life(range(3), now - 60), event("finish", now - 53.0)]
    told[-2] |= {"seconds": 1e9}  # it began where the one before it ended
    found = examine(write(tmp_path / "long", told))
    assert found.ledger.totals()["productive"] == 3_000_000


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from(KINDS)), min_size=1, max_size=60))
def test_a_coarser_picture_has_the_same_edges_and_no_gap(parts: list[tuple[int, str]]) -> None:
    pieces, at = [], 0
    for length, kind in parts:
        pieces.append(Piece(at, at + length, kind))
        at += length
    drawn = coarse(pieces, at, columns=10)
    assert all(a.end == b.begin for a, b in zip(drawn, drawn[1:], strict=False))
    assert (drawn[0].begin, drawn[-1].end) == (0, at) and len(drawn) <= 10
