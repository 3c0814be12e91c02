"""What lies outside this package and may be missing or broken, told to the user in one line."""

import importlib
from typing import Any

from course_lib.engine.errors import UsageError


def reason(error: BaseException) -> str:
    """The error as one line: its type and its text, however many lines the text has."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def require(module: str, option: str, cure: str) -> Any:
    """Import a module that only some options need, when they need it.

    Importing torchvision takes as long as importing torch itself, and each loader worker and each restart
    would pay it again, so nothing imports it at the top of a file. The result is ``Any`` because torchvision
    ships no types.

    Errors: ``UsageError`` naming ``option`` and ending with ``cure`` when the module is not installed or does
    not load. A torchvision built for another torch raises ``RuntimeError`` or ``OSError`` on import.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        package = module.partition(".")[0]
        raise UsageError(f"{option} needs {package}, which does not load ({reason(error)}): {cure}") from error
