"""Look after the snapshots of a run: list them, verify every byte, remove the old ones, export the weights."""

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from course_lib.engine.entry import run
from course_lib.engine.errors import UsageError
from course_lib.engine.snapshots.store import SnapshotStore
from course_lib.engine.snapshots.survey import Survey, survey
from course_lib.engine.snapshots.upkeep import export, prune

ENDS = """exit codes:
  0  done; of verify: everything is good
  1  of verify: something is damaged, and there still is a good snapshot that a resume would load
  2  wrong usage, unusable input, or a refusal, which one line explains
  3  of verify: there is no good snapshot that a resume would load"""


class _Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help explains)")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """What was asked for; raises UsageError."""
    texts: dict[str, Any] = {"epilog": ENDS, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = _Parser("python -m course_lib.engine.snapshots", description=__doc__, **texts)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify|prune|export")

    def command(name: str, purpose: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=purpose, description=purpose, **texts)
        added.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="what the job had as --run-dir")
        return added

    show = command("list", "show each snapshot and what a resume would do, without reading payloads")
    verify = command("verify", "show the same after reading every byte and opening each payload")
    for either in (show, verify):
        either.add_argument("--json", action="store_true", help="print JSON instead of a table")
    old = command("prune", "remove snapshots that no resume needs, and what dead processes left half done")
    old.add_argument("--keep", type=int, default=3, metavar="K", help="good snapshots of the line that stay (3)")
    old.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    out = command("export", "write the model's weights, verified, as a plain state dict")
    out.add_argument("out", metavar="OUT", type=Path, help="the file to write, which must not exist")
    out.add_argument("--snapshot", metavar="NAME", help="which one, by its name in the list (the newest good one)")
    out.add_argument("--format", choices=("torch", "safetensors"), help="by default what the suffix of OUT says")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Do what the command line says and return the exit code; raises UsageError, in one line."""
    options = parse(argv)
    try:
        store = SnapshotStore(options.run_dir, getattr(options, "keep", 1))
        if options.command == "prune":
            gone = [path.name for path in prune(store, options.dry_run)]
            _say(*gone, f"files {'that would be removed' if options.dry_run else 'removed'}: {len(gone)}")
        elif options.command == "export":
            taken = export(store, options.out, options.snapshot, options.format)
            _say(f"{options.out}: the weights of {taken.name}, after {taken.step} steps")
        else:
            return _show(store, read=options.command == "verify", as_json=options.json)
    except MemoryError:
        raise UsageError(f"not enough memory to read the snapshots in {options.run_dir}") from None
    except OSError as error:
        raise UsageError(str(error)) from None
    return 0


def _show(store: SnapshotStore, read: bool, as_json: bool) -> int:
    found = survey(store, read)
    if as_json:
        _say(json.dumps(asdict(found) | {"payloads_read": read}, indent=1))
    elif read:
        _say(*_table(found, "good"), found.outlook())
    else:
        _say(*_table(found, "right size"), f"{found.outlook()} (payloads were not read: verify reads them)")
    damaged = bool(found.bad_claims) or any(row.problem for row in found.snapshots)
    return 0 if not read else 3 if found.resume is None else int(damaged)


def _table(found: Survey, fine: str) -> list[str]:
    head = ("snapshot", "step", "epoch", "generation", "ranks", "bytes", "age", "in line", "state")
    lines: list[tuple[str, ...]] = [head]
    for row in found.snapshots:
        *plain, size, age, in_line, problem = asdict(row).values()
        size = None if size is None else f"{size:,}"
        age = None if age is None else timedelta(seconds=int(age))
        in_line = {True: "yes", False: "no", None: "?"}[in_line]
        cells = [*plain, size, age, in_line, problem or fine]
        lines.append(tuple("-" if cell is None else str(cell) for cell in cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join([*map(str.rjust, cells[:-1], widths), cells[-1]]) for cells in lines]
    return table + [f"{name}: {reason}" for name, reason in found.bad_claims.items()]


def _say(*lines: str) -> None:
    with suppress(BrokenPipeError):  # whoever reads has seen enough, as with `| head`; the exit code still counts
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
