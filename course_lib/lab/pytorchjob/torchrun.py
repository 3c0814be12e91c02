"""The torchrun command that a container runs, as far as its words tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from course_lib.lab.pytorchjob.job import Container
from course_lib.lab.pytorchjob.shell import shell_script

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

    def script_option(self, name: str) -> str | None:
        """The value of an option of the script, None when it is not given."""
        for n, word in enumerate(self.rest):
            key, equals, value = word.partition("=")
            if key.replace("_", "-") == f"--{name}":
                return value if equals else "".join(self.rest[n + 1 : n + 2])
        return None


def torchrun_command(container: Container) -> Command | None:
    """What torchrun is given, None when the container does not run it."""
    script = shell_script(container)
    lines = [container.words] if script is None else [statement.words for statement in script.statements]
    for words in lines:
        if (at := launcher_at(words)) is not None:
            options, rest = _options(words[at + 1 :])
            return Command(options, rest, words[at] == "course_lib.engine.launch")
    return None


def launcher_at(words: Sequence[str]) -> int | None:
    """Which of the words is torchrun, or the module that is."""
    for n, word in enumerate(words):
        if PurePath(word).name == "torchrun" or (word in _MODULES and n and words[n - 1] == "-m"):
            return n
    return None


def _options(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
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
    return found, tuple(words[n:])
