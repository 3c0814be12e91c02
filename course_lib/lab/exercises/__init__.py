"""The exercises of the notebooks: module nNN holds those of notebook NN, each an `Exercise` under its own name.

A notebook imports its module as `check`, and calls `check.NAME(answer)`.
"""

from importlib import import_module
from pkgutil import iter_modules

from course_lib.lab.checks import Exercise


def all_exercises() -> dict[str, Exercise]:
    """Every exercise of every notebook, as "nNN.NAME"."""
    found: dict[str, Exercise] = {}
    for module in iter_modules(__path__):
        names = vars(import_module(f"{__name__}.{module.name}"))
        found |= {f"{module.name}.{name}": it for name, it in names.items() if isinstance(it, Exercise)}
    return dict(sorted(found.items()))
