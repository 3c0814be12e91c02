"""The difference of two scripts, made from the files."""

import re
from difflib import unified_diff as reference
from html import unescape
from pathlib import Path

import pytest
from helpers import REPO

from course_lib.lab.diff import Diff, show_diff, unified_diff

BEFORE = ["import a", "", "def f():", "    x = 1", "    return x", "", "def g():", "    pass", "f()"]
AFTER = [
    "import a",
    "",
    "def f():",
    "    with a:",
    "        x = 1",
    "        return x",
    "",
    "def g():",
    "    pass",
    "g()",
]


def test_a_line_that_only_moved_sideways_is_no_change() -> None:
    lines = unified_diff(BEFORE, AFTER)
    changed = [line for line in lines if line[:1] in ("+", "-")]
    assert changed == ["+    with a:", "-f()", "+g()"]
    assert "         x = 1" in lines, "shown where it stands now"


def test_with_indentation_it_is_the_usual_diff() -> None:
    usual = list(reference(BEFORE, AFTER, lineterm="", n=2))[2:]
    assert unified_diff(BEFORE, AFTER, indentation=True) == [line.rstrip() for line in usual]


def test_equal_files_have_none() -> None:
    assert unified_diff(BEFORE, BEFORE) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [("single_gpu", "data_parallel"), ("single_gpu", "ddp_spawn"), ("ddp_spawn", "ddp_torchrun")],
)
def test_the_scripts_are_shown_as_they_are(before: str, after: str) -> None:
    diff = show_diff(before, after)
    old, new = ((REPO / "scripts" / f"{name}.py").read_text().splitlines() for name in (before, after))
    text = diff.text.splitlines()
    assert text[:2] == [f"--- scripts/{before}.py", f"+++ scripts/{after}.py"]
    assert all(line[1:] in old for line in text[2:] if line.startswith("-"))
    assert all(line[1:] in new for line in text[2:] if line.startswith("+"))
    come = sum(line.startswith("+") for line in text[2:])
    assert diff.summary.endswith(f"{come} lines come") and come > 0
    assert repr(diff) == f"{diff.text}\n{diff.summary}"
    assert unescape(re.sub("<.*?>", "", diff._repr_html_())).split() == repr(diff).split(), "the same text, in colours"


def test_what_comes_and_what_goes_has_a_colour_of_its_own() -> None:
    shown = Diff("--- a\n+++ b\n@@ -1,2 +1,2 @@\n same\n-x < 1\n+x > 1", "1 & 1", "yours/b.py")._repr_html_()
    looks = dict(re.findall('<span style="(.*?)">(.)', shown))
    assert len(looks) == 3 and {"+", "-"} <= set(looks.values())
    assert "\n same\n" in shown and "x &lt; 1" in shown and '1 &amp; 1 Edit: <a href="yours/b.py">' in shown


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no scripts/nonesuch\.py"):
        show_diff("single_gpu", "nonesuch")
    assert not Path("scripts/nonesuch.py").exists()
