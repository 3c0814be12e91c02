"""Manifests to look at and to change: without their comments, with a word replaced, and what the change costs."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from course_lib.engine import UsageError
from course_lib.lab.pytorchjob import PyTorchJob, lint, read_job

MANIFEST = Path("scripts/cluster/pytorchjob.yaml")
Change = tuple[str, str]  # what stands in the file, and what shall stand there


def bare(path: Path | str) -> str:
    """A manifest without its comments and empty lines; what is in quotes stays."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    kept = [re.sub(r"(^|\s)#(?=\s|$).*$", "", line).rstrip() for line in lines]
    text = "\n".join(line for line in kept if line.strip())
    if list(yaml.safe_load_all(text)) != list(yaml.safe_load_all("\n".join(lines))):
        raise UsageError(f"{path}: a # in it is no comment, so it cannot be shown without comments")
    return text


def changed(out: Path | str, *changes: Change, source: Path | str = MANIFEST) -> Path:
    """Write to `out` the manifest `source` with each change made wherever it fits; a number sign fits any number.

    Raises UsageError for a change that fits nowhere: it would leave the manifest as it was.
    """
    text = Path(source).read_text(encoding="utf-8")
    for old, new in changes:
        pattern = re.escape(old).replace(r"\#", r"\d+")
        text, count = re.subn(pattern, lambda _, new=new: new, text)  # type: ignore[misc]
        if not count:
            raise UsageError(f"{source}: there is no {old!r} in it to be replaced")
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def job_with(*changes: Change, source: Path | str = MANIFEST) -> PyTorchJob:
    """The job that a changed manifest describes; nothing is left on the disk."""
    with TemporaryDirectory() as folder:
        return read_job(changed(Path(folder) / "job.yaml", *changes, source=source))


def trap(name: str, *changes: Change, source: Path | str = MANIFEST) -> str:
    """The trap that the changes bring in: its name and the field that it is in, and below why it is one.

    Raises UsageError when they don't, or when the manifest has it anyway.
    """
    found = next((trap for trap in lint(job_with(*changes, source=source)) if trap.name == name), None)
    if found is None or any(trap.name == name for trap in lint(read_job(source))):
        raise UsageError(f"the trap {name} is not what these changes make of {source}")
    return f"{found.name} · {found.path.split('.')[-1]}\n    {found.why}"
