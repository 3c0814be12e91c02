"""The documents of a YAML file, read as `kubectl` reads them: strictly, and every mistake with its place.

PyYAML by itself takes the last of two equal keys, and knows numbers to the base 60 and dates, which Kubernetes does
not: there `1:3` and `2026-01-01` are text.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from course_lib.engine import UsageError

_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


class ManifestError(UsageError):
    """What is wrong with a manifest: `findings` has a line for each mistake, which begins with the field's path."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = tuple(findings)


class _Loader(yaml.SafeLoader):
    bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}
    # A table of its own for each first letter; PyYAML's has the two kinds that Kubernetes lacks.
    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in (
    ("bool", r"(?i:y|yes|n|no|true|false|on|off)$", "yYnNtTfFoO"),
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:e[-+]?[0-9]+)?|[0-9]+e[-+]?[0-9]+|\.[0-9]+)$", "-+.0123456789"),
    ("merge", r"<<$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def read_documents(path: Path) -> list[dict[str, Any]]:
    """The documents of the file that hold something, in order. Raises ManifestError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ManifestError([f"{path}: cannot be read: {reason}"]) from None
    try:
        found = list(_documents(text))
    except yaml.YAMLError as error:
        raise ManifestError([f"{path}{_where(error)}: {_problem(error)}"]) from None
    except RecursionError:
        raise ManifestError([f"{path}: it is nested too deeply"]) from None
    documents = [document for document in found if document is not None]
    if not documents:
        raise ManifestError([f"{path}: it is empty: it has to hold a PyTorchJob"])
    for document in documents:
        if not isinstance(document, dict):
            kind = "list" if isinstance(document, list) else "single value"
            raise ManifestError([f"{path}: a document is a {kind}: it has to be a mapping with apiVersion and kind"])
    return documents


def _documents(text: str) -> Iterator[Any]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            yield _plain(loader, loader.get_node(), "")
    finally:
        loader.dispose()


def _plain(loader: _Loader, node: Any, path: str) -> Any:
    """The value of a node. Raises yaml.MarkedYAMLError for a key that is there twice."""
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN:
        what = f"{path}: a tag such as {node.tag} is of no use"
        raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, f"{path}[{n}]") for n, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        if isinstance(value, str) and re.search(r"[\0\ud800-\udfff]", value):
            what = f"{path}: holds a character that no program can be given: {value!a}"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        return value
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag != _MERGE and key.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"{path}.{key.value}".lstrip(".") + ": is there twice: leave one", problem_mark=key.start_mark
            )
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem=f"{path or 'a key'}: a name has to be text", problem_mark=key.start_mark)
        seen.add(key.value)
    loader.flatten_mapping(node)
    return {key.value: _plain(loader, value, f"{path}.{key.value}".lstrip(".")) for key, value in node.value}


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f", line {mark.line + 1}" if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    if "'\\t'" in problem:
        return "a tab cannot indent YAML: use spaces"
    return problem if ": " in problem else f"this is not YAML: {problem}"
