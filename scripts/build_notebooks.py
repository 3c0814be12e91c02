"""Build, execute and write the notebooks from notebooks/src, or check the committed ones without running them."""

import argparse
import sys
from pathlib import Path

from course_lib.engine import UsageError
from course_lib.lab.builder.execute import BuildFailed
from course_lib.lab.builder.make import check, make

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*", help="how the names of the notebooks begin, such as 04; all when left out")
    parser.add_argument("--check", action="store_true", help="run nothing; fail when a notebook is not what it must be")
    parser.add_argument("--force", action="store_true", help="write also when only outputs that may vary have changed")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks", help="the folder that holds src")
    options = parser.parse_args()
    if options.check:
        found = check(options.folder, options.name)
        print("\n".join(found), file=sys.stderr, end="\n" if found else "")
        sys.exit(1 if found else 0)
    for line in make(options.folder, options.name, ROOT, options.force):
        print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except (BuildFailed, UsageError) as error:
        sys.exit(f"error: {error}")
