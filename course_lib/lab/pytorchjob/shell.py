"""The script that a container gives its shell, as far as its words tell: its statements, and how each of them ends."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from course_lib.lab.pytorchjob.injected import resolve
from course_lib.lab.pytorchjob.job import Container

_BETWEEN = "();<>|&\n"  # a word of these stands between two statements, or redirects
_LEADING = re.compile(r"then|do|else|elif|!|\{|time|[A-Za-z_]\w*=.*", re.DOTALL)


@dataclass(frozen=True)
class Statement:
    """The words of one statement, without a leading keyword and variables; `piped` also behind a pipe."""

    words: tuple[str, ...]
    piped: bool
    background: bool


@dataclass(frozen=True)
class Script:
    """`shell` is the program's name; the statements have the script's arguments in place of `"$@"`."""

    shell: str
    statements: tuple[Statement, ...]


def shell_script(container: Container) -> Script | None:
    """The script, None where no shell runs one that stands in the container's words."""
    words = container.words
    if not words or PurePath(words[0]).name not in ("sh", "bash", "dash", "ash", "zsh"):
        return None
    n, given = 1, False
    while n < len(words) and re.match("[-+].", words[n]) and words[n] != "--":
        given |= re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", words[n]) is not None
        n += 2 if re.fullmatch(r"[-+][a-zA-Z]*[oO]", words[n]) else 1  # -o pipefail
    n += words[n : n + 1] == ("--",)
    if not given or n >= len(words):
        return None
    arguments = shlex.join(words[n + 2 :])  # behind the name that $0 has
    text = re.sub(r'"?\$\{?[@*]\}?"?', lambda _: arguments, resolve(words[n], {}))
    return Script(PurePath(words[0]).name, tuple(_statements(text)))


def _statements(text: str) -> Iterator[Statement]:
    """Split as a shell does, quotes heeded; a text with an open quote is one statement."""
    text = re.sub(r"(^|\s)#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    inner: list[str] = re.findall(r"\$\([^()]*\)", text)  # of a shell, or Kubernetes' references: they stay words
    for number, each in enumerate(inner):
        text = text.replace(each, f"\0{number}\0")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_BETWEEN)
    lexer.whitespace_split, lexer.whitespace, lexer.commenters = True, " \t\r", ""
    try:
        tokens = [re.sub(r"\0(\d+)\0", lambda m: inner[int(m[1])], token) for token in lexer]
    except ValueError:
        tokens = text.split()
    words: list[str] = []
    before = ""
    for token in [*tokens, ";"]:
        if not set(token) <= set(_BETWEEN) or set(token) & set("<>"):
            words.append(token)
            continue
        end = token.strip("\n")
        while words and _LEADING.fullmatch(words[0]):
            words.pop(0)
        if words:
            pipes = ("|", "|&")
            yield Statement(tuple(words), before in pipes or end in pipes, end.startswith("&") and end[1:2] != "&")
            before = end
        words = []
