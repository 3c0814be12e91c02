"""The difference of two scripts, made from the files, so that it is never out of date."""

from difflib import SequenceMatcher
from html import escape
from pathlib import Path
from typing import Any


def unified_diff(before: list[str], after: list[str], context: int = 2, indentation: bool = False) -> list[str]:
    """Lines of a unified diff, without the heads; a line that only moved sideways is no change, unless `indentation`.

    `before` and `after` are lines without their ends. The unchanged lines are shown as `after` has them.
    """
    old, new = ([line if indentation else line.strip() for line in lines] for lines in (before, after))
    shown: list[str] = []
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        first, last = group[0], group[-1]
        shown.append(f"@@ -{first[1] + 1},{last[2] - first[1]} +{first[3] + 1},{last[4] - first[3]} @@")
        for kind, old_low, old_high, new_low, new_high in group:
            if kind == "equal":
                shown += [f" {line}".rstrip() for line in after[new_low:new_high]]
            else:
                shown += [f"-{line}" for line in before[old_low:old_high]]
                shown += [f"+{line}" for line in after[new_low:new_high]]
    return shown


def show_diff(before: str, after: str, context: int = 2, indentation: bool = False) -> Any:
    """What changes from scripts/`before`.py to scripts/`after`.py, coloured in a notebook.

    A line that only moved sideways, say into a `with`, counts as unchanged unless `indentation` is True.
    """
    paths = [Path(__file__).parents[2] / "scripts" / f"{name}.py" for name in (before, after)]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"there is no scripts/{path.name}; give names such as 'single_gpu'")
    old, new = (path.read_text().splitlines() for path in paths)
    lines = unified_diff(old, new, context, indentation)
    gone, come = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    head = [f"--- scripts/{before}.py", f"+++ scripts/{after}.py"]
    return Diff("\n".join([*head, *lines]), f"{gone} lines go, {come} lines come")


# With opacity in the last two digits, for light and dark themes; JupyterLab lets no rgba() through.
_LOOKS = {"+": "background-color:#2ea04333", "-": "background-color:#f8514933", "@": "color:#888888"}


class Diff:
    """A diff that a notebook colours when it is a cell's last value, and that prints as plain text.

    JupyterLab colours nothing but the @@ lines of a diff in a Markdown fence, so this is HTML. Where a site takes the
    colours out, the signs at the lines' beginnings still tell.
    """

    def __init__(self, text: str, summary: str, file: str = "") -> None:
        self.text, self.summary, self._file = text, summary, file  # `file`: to be edited, as seen from the notebook

    def __repr__(self) -> str:
        return f"{self.text}\n{self.summary}"

    def _repr_html_(self) -> str:
        lines = self.text.splitlines()
        width = max(map(len, lines))  # a coloured line is a band, not as long as its words
        rows = "\n".join(_row(line.ljust(width)) for line in lines)
        link = f' Edit: <a href="{escape(self._file)}">{escape(self._file)}</a>' if self._file else ""
        return f"<pre><small>{rows}</small></pre>\n<p>{escape(self.summary)}{link}</p>"


def _row(line: str) -> str:
    look = "color:#888888" if line.startswith(("--- ", "+++ ")) else _LOOKS.get(line[:1])
    return f'<span style="{look}">{escape(line)}</span>' if look else escape(line.rstrip())
