"""The house rules as functions: each reads one source and returns what is wrong with it, a line a finding."""

import ast
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

Function = ast.FunctionDef | ast.AsyncFunctionDef

# What a layer of course_lib may import of our own packages; and the engine, of other people's.
OURS = ("course_lib", "scripts", "tests", "notebooks")
LAYERS = {
    "engine": ("course_lib.engine",),
    "workloads": ("course_lib.engine", "course_lib.workloads"),
    "lab": ("course_lib.engine", "course_lib.workloads", "course_lib.lab"),
}
ENGINE_NEEDS = {"torch", "numpy", *sys.stdlib_module_names}

# A port that is written down can be taken. Port 0 asks for a free one. Quotes, commas and brackets may stand
# between an option and its value: code passes them as separate strings.
_BETWEEN = r"[\s'\",=:\])]*"
FIXED_PORT = re.compile(
    rf"\b29500\b|(?:master|rdzv)[-_]port{_BETWEEN}[1-9]\d*|rdzv[-_]endpoint{_BETWEEN}[\w.$-]*:[1-9]\d*"
    r"|tcp://[\w.$-]*:[1-9]\d*|TCPStore\([^,()]*,\s*[1-9]\d*",
    re.IGNORECASE,
)
PRIVATE_PATH = re.compile(r"(?<![\w.~}$-])/(?:work|root|tmp|home)/")


def notebook_code(text: str) -> str:
    """The code cells of a notebook as one Python source; `!` and `%` lines become calls, as in IPython."""
    transform = TransformerManager().transform_cell  # type: ignore[no-untyped-call]
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(transform("".join(cell["source"])) for cell in cells)


def python_source(path: Path) -> str:
    """The Python in a .py or .ipynb file."""
    text = path.read_text(encoding="utf-8")
    return notebook_code(text) if path.suffix == ".ipynb" else text


def docstring(node: ast.AST) -> ast.Expr | None:
    """The docstring's node, if the module, class or function begins with one."""
    body = getattr(node, "body", None)
    if isinstance(node, ast.Module | ast.ClassDef | Function) and body and isinstance(body[0], ast.Expr):
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return body[0]
    return None


def code_only(source: str) -> str:
    """The source without comments and docstrings, in which prose may name what code may not use."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (text := docstring(node)) is not None:
            text.value = ast.Constant(None)
    return ast.unparse(tree)


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import in a module of `package`, also of import_module("…")."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from course_lib import lab` imports course_lib.lab
            names = [f"{module}.{a.name}" for a in node.names] if module in OURS or not node.module else [module]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "import_module", "importlib.import_module"):
                yield node.lineno, str(node.args[0].value)


def import_findings(source: str, package: str, script_names: frozenset[str] = frozenset()) -> list[str]:
    """Imports that point the wrong way. `package` is the one the module is in, say `course_lib.engine`."""
    layer = package.split(".")[1] if "." in package else "engine"
    found = []
    for line, name in imports(source, package):
        top = name.split(".")[0]
        ours = top in OURS or top in script_names
        allowed = any(name == good or name.startswith(good + ".") for good in LAYERS[layer])
        if ours and not allowed:
            found.append(f"{line}: {layer} imports {name}")
        if layer == "engine" and not ours and top not in ENGINE_NEEDS:
            found.append(f"{line}: the engine imports {name}, which is not torch, numpy or the standard library")
    return found


def size_findings(source: str, file_limit: int = 250, function_limit: int = 40) -> list[str]:
    """A file that reaches its limit in lines, and each function that does so without its docstring."""
    lines = len(source.splitlines())
    found = [f"1: {lines} lines, not under {file_limit}"] if lines >= file_limit else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            length = span(node) - (span(text) if (text := docstring(node)) else 0)
            if length >= function_limit:
                found.append(f"{node.lineno}: {node.name} has {length} lines, not under {function_limit}")
    return found


def code_lines(source: str) -> int:
    """The lines that hold code: neither blank, nor comment, nor docstring, so that explaining costs nothing."""
    tree = ast.parse(source)
    texts = {line for node in ast.walk(tree) if (text := docstring(node)) for line in _lines(text)}
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    lines = {n for token in tokens if token.type not in skip for n in range(token.start[0], token.end[0] + 1)}
    return len(lines - texts)


def _lines(node: ast.Expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def span(node: Function | ast.Expr) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def torch_load_findings(source: str) -> list[str]:
    """Calls of torch.load, under whatever name, that do not spell out map_location and weights_only=True."""
    tree = ast.parse(source)
    names = {"torch.load", "torch.serialization.load"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {f"{a.asname}.load" for a in node.names if a.asname and f"{a.name}.load" in names}
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" in names}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            given = {word.arg: word.value for word in node.keywords}
            safe = given.get("weights_only")
            if "map_location" not in given:
                found.append(f"{node.lineno}: torch.load without map_location")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                found.append(f"{node.lineno}: torch.load without weights_only=True")
    return found


def port_findings(text: str) -> list[str]:
    """Ports that are written down in code (give it `code_only` text of a Python file)."""
    return [f"fixed port: {match.group()}" for match in FIXED_PORT.finditer(text)]


def path_findings(text: str) -> list[str]:
    """Absolute paths that exist on one machine only."""
    return [f"{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if PRIVATE_PATH.search(line)]
