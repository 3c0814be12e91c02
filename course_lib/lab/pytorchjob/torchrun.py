"""The torchrun command that a container runs, as far as its words tell."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from course_lib.lab.pytorchjob.injected import is_shell
from course_lib.lab.pytorchjob.job import Container

# torchrun's options without a value; every other one is followed by its own.
_FLAGS = ("standalone", "no_python", "run_path", "module", "m", "h", "help", "virtual_local_rank", "cold")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "course_lib.engine.launch")


@dataclass(frozen=True)
class Command:
    """`options` are torchrun's by their long names with `_`, `rest` the script and its arguments.

    `gives_code` is whether the agent ends with the exit code of its workers, as `course_lib.engine.launch` does.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    gives_code: bool = False
    shell: bool = False
    execs: bool = False  # in a shell's script: it gives its process to torchrun

    def script_option(self, name: str) -> str | None:
        """The value of an option of the script, None when it is not given."""
        for word, after in zip(self.rest, (*self.rest[1:], ""), strict=True):
            key, equals, value = word.partition("=")
            if key.replace("_", "-") == f"--{name}":
                return value if equals else after
        return None


def torchrun_command(container: Container) -> Command | None:
    """What torchrun is given, None when the container does not run it."""
    shell = is_shell(container)
    words = _script_words(container) if shell else list(container.words)
    for n, word in enumerate(words):
        if PurePath(word).name == "torchrun" or (word in _MODULES and n and words[n - 1] == "-m"):
            options, rest = _options(words[n + 1 :])
            return Command(options, rest, word == "course_lib.engine.launch", shell, "exec" in words[:n])
    return None


def _script_words(container: Container) -> list[str]:
    script = " ".join(container.words[2:])
    try:
        return shlex.split(script.replace("\\\n", " "), comments=True)
    except ValueError:
        return script.split()


def _options(words: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    found: dict[str, str] = {}
    n = 0
    while n < len(words) and words[n].startswith("-"):
        key, equals, value = words[n].partition("=")
        name = key.lstrip("-").replace("-", "_")
        n += 1
        if not equals and name not in _FLAGS:
            value = words[n] if n < len(words) else ""
            n += 1
        found[name] = value
    rest = []
    for word in words[n:]:
        if re.fullmatch(r"[;&|]+", word):
            break
        rest.append(word.rstrip(";"))
        if word.endswith(";"):
            break
    return found, tuple(rest)
