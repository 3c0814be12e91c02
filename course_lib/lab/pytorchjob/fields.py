"""Fields of a manifest, each taken with its type: what is wrong is noted with the field's path, and reading goes on.

Kubernetes' API server refuses a value of another type (a number where text is wanted, as in `value: 1`), and
`kubectl` a name that it does not know; so does this.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}


class Fields:
    """The fields of one object of a manifest at `path`; mistakes go to `findings`."""

    def __init__(self, value: Any, path: str, findings: list[str]) -> None:
        self.path, self.findings = path, findings
        self.values: dict[str, Any] = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            findings.append(f"{path or 'document'}: has to be an object with fields, not {describe(value)}")

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, what: str) -> None:
        """Note what is wrong with a field."""
        self.findings.append(f"{self.at(name)}: {what}")

    def only(self, *known: Sequence[str]) -> None:
        """Note the fields that the API does not have, and what may have been meant."""
        names = [name for group in known for name in group]
        for name in self.values:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                self.wrong(name, "there is no such field" + (f": did you mean {near[0]}?" if near else ""))

    def text(self, name: str, default: str | None = None, required: bool = False) -> str | None:
        """A text; `default` when it is missing, or wrong."""
        value = self._of(name, str, required, 'write it in quotes, as "{}"')
        if required and value == "":
            self.wrong(name, "is empty")
        return default if value is None else str(value)

    def number(self, name: str, default: int | None = None, low: int = 0, high: int = 2**31 - 1) -> int | None:
        """A whole number from `low` to `high`."""
        value = self._of(name, int)
        if value is not None and not low <= value <= high:
            bound = f"from {low} to {high}" if high < 2**31 - 1 else f"{low} or more"
            self.wrong(name, f"has to be {bound}, not {value}")
            value = None
        return default if value is None else int(value)

    def flag(self, name: str) -> bool:
        """A truth value, false when it is missing."""
        return bool(self._of(name, bool))

    def choice(self, name: str, options: Sequence[str], default: str | None) -> str | None:
        """One of `options`."""
        value = self.text(name, default)
        if value is not None and value not in options and isinstance(self.values.get(name), str):
            near = difflib.get_close_matches(value.lower(), [option.lower() for option in options], 1)
            meant = next((f": did you mean {o}?" for o in options if near and o.lower() == near[0]), "")
            self.wrong(name, f"has to be {', '.join(options[:-1])} or {options[-1]}, not {value}{meant}")
            return default
        return value

    def object(self, name: str, required: bool = False) -> "Fields":
        """The fields of an object; none when it is missing."""
        value = self.values.get(name)
        if value is None:
            if required:
                self.wrong(name, "is missing")
            value = {}
        return Fields(value, self.at(name), self.findings)

    def objects(self, name: str) -> Iterator["Fields"]:
        """The objects of a list."""
        for number, value in enumerate(self._of(name, list) or []):
            yield Fields(value, f"{self.at(name)}[{number}]", self.findings)

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        values = self._of(name, list) or []
        for number, value in enumerate(values):
            if not isinstance(value, str):
                self.findings.append(f"{self.at(name)}[{number}]: {_not_text(value)}")
        return tuple(value for value in values if isinstance(value, str))

    def _of(self, name: str, kind: type, required: bool = False, cure: str = "") -> Any:
        value = self.values.get(name)
        if value is None:
            if required:
                self.wrong(name, "is missing")
            return None
        if type(value) is kind:
            return value
        self.wrong(name, _not_text(value) if cure else f"has to be {_KINDS[kind]}, not {describe(value)}")
        return None


def _not_text(value: Any) -> str:
    cure = f': write it in quotes, as "{describe(value)}"' if isinstance(value, bool | int | float) else ""
    return f"has to be text, not {describe(value)}{cure}"


def describe(value: Any) -> str:
    """A wrong value in a few words."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return "nothing" if value is None else str(value) if isinstance(value, int | float) else repr(value)
