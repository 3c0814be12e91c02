"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a line for each row, and a newline behind the last."""
    return "".join("| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *rows))
