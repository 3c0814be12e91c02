"""Where the time of a run went: `python -m course_lib.lab.report RUN_DIR [--html PATH] [--json PATH]`

Prints the run's goodput ledger and the phases of its recoveries, and writes them with figures into one HTML page that
needs nothing else, RUN_DIR/report.html. It works for a run of any script of the course, also one that crashed, that
changed its number of ranks, or that is still going on, which is reported as of now. `course_lib.lab.ledger` and
`course_lib.lab.anatomy` say what each kind of time and each phase is.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from course_lib.engine import UsageError, run
from course_lib.engine.snapshots.files import temporary_for, withdraw
from course_lib.lab.account import Report, examine, headline
from course_lib.lab.anatomy import medians
from course_lib.lab.ledger import KINDS

_LINE, _CELL = 100, 9  # characters of a line, and of a number in it
_WHOLE = "death to first new step done"


def text(report: Report) -> str:
    """The tables, at most 100 columns wide."""
    ranks = len({worker.rank for worker in report.history.workers})
    about = f"{report.state}, {ranks} rank{'s' * (ranks != 1)}, {report.generations} generation"
    lines = [f"{about}{'s' * (report.generations != 1)}: {headline(report)}", "", f"{'':14}{'seconds':>12}   share"]
    totals, steps = report.ledger.totals(), report.ledger.steps
    for kind in KINDS:
        count = f"{steps[kind]:>8} step{'s' * (steps[kind] != 1)}" if steps[kind] else ""
        lines.append(f"{kind:14}{totals[kind] / 1e6:12.6f} {report.ledger.share(kind):>7.2%}{count}")
    lines += [f"{'wall time':14}{sum(totals.values()) / 1e6:12.6f} {1:>7.2%}", ""]
    return "\n".join([*lines, *_recovery_table(report), *(f"note: {note}" for note in report.notes())]).rstrip()


def _recovery_table(report: Report) -> list[str]:
    """A column for each recovery, as far as they fit, and the medians of all."""
    if not report.recoveries:
        return []
    middle = medians(list(report.recoveries))
    wide = max(map(len, [*middle, _WHOLE])) + 1
    shown = report.recoveries[: (_LINE - wide) // _CELL - 1]
    many = len(report.recoveries) > 1
    heads = [*map(str, range(1, len(shown) + 1)), *(["median"] if many else [])]
    lines = [f"{'recovery':{wide}}" + "".join(f"{head:>{_CELL}}" for head in heads)]
    for name, seconds in [*middle.items(), (_WHOLE, report.median_recovery or 0.0)]:
        cells = [sum(p.end - p.begin for p in found.phases if name in (p.name, _WHOLE)) / 1e6 for found in shown]
        row = "".join(f"{cell:{_CELL}.3f}" if cell else " " * _CELL for cell in [*cells, *([seconds] if many else [])])
        lines.append(f"{name:{wide}}{row}".rstrip())
    if (more := len(report.recoveries) - len(shown)) > 0:
        lines.append(f"{more} more recoveries are in the medians")
    return [*lines, ""]


class _Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help explains)")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report and write its page; raises UsageError for a directory that holds no run."""
    parser = _Parser("python -m course_lib.lab.report", description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the --run-dir of a run")
    parser.add_argument(
        "--html", type=Path, metavar="PATH", help="where to write the page; default RUN_DIR/report.html"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there, too")
    options = parser.parse_args(argv)
    target = options.html or options.run_dir / "report.html"
    try:
        _refuse_losses([path for path in (target, options.json) if path is not None])
        report = examine(options.run_dir)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or options.run_dir}: {error.strerror or error}") from None
    _say(text(report))
    from course_lib.lab.report_page import page  # here, since it imports what draws: the numbers come at once

    written = {target: page(report)}
    if options.json is not None:
        written[options.json] = json.dumps(report.as_json(), indent=1) + "\n"
    for path, content in written.items():
        _write(path, content)
        _say(f"wrote {path}")


def _refuse_losses(targets: list[Path]) -> None:
    """Refuse to write over what a run has left, or one thing over the other."""
    paths = [Path(os.path.realpath(path)) for path in targets]
    if len(set(paths)) < len(paths):
        raise UsageError("--html and --json must be two files: give another path")
    for path in paths:
        run_dir = path.parent.parent if path.parent.name in ("events", "snapshots") else path.parent
        if (run_dir / "events").is_dir() and (run_dir != path.parent or path.name == "report.json"):
            raise UsageError(f"{path} would lie over what the run has left: give another path")


def _say(words: str) -> None:
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a closed one is None
        print(words.encode(encoding, errors="replace").decode(encoding), flush=True)
    except BrokenPipeError:
        pass  # whoever reads has seen enough, as with `| head`
    except OSError as error:
        raise UsageError(f"cannot print: {error.strerror or error}") from None


def _write(path: Path, content: str) -> None:
    """All of it or, on a full disk, what was there before."""
    real = Path(os.path.realpath(path))  # a link stays one
    temporary = temporary_for(real)
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_text(content, encoding="utf-8")
        else:
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(real)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        withdraw(temporary)


if __name__ == "__main__":
    run(main)
