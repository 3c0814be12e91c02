"""Whether a `newest_good(folder)` finds the newest snapshot that can be trusted, whatever was done to the others.

A snapshot here is a payload, `step-N.pt`, and a manifest, `step-N.json`, with the payload's SHA-256: the engine's
idea in its smallest form.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from course_lib.lab.answers import one_line, short

STEPS = (8, 40, 100)


def make(folder: Path, step: int) -> None:
    """Write the snapshot of a step."""
    payload = f"the state after {step} steps ".encode() * 9
    (folder / f"step-{step}.pt").write_bytes(payload)
    (folder / f"step-{step}.json").write_text(json.dumps({"step": step, "sha256": hashlib.sha256(payload).hexdigest()}))


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Turn one bit of a file around."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def _flipped(folder: Path, step: int) -> None:
    flip(folder / f"step-{step}.pt", 100)


def _cut(folder: Path, step: int) -> None:
    path = folder / f"step-{step}.pt"
    path.write_bytes(path.read_bytes()[:-1])


def _manifest_cut(folder: Path, step: int) -> None:
    path = folder / f"step-{step}.json"
    path.write_bytes(path.read_bytes()[:30])


def _payload_gone(folder: Path, step: int) -> None:
    (folder / f"step-{step}.pt").unlink()


def _manifest_gone(folder: Path, step: int) -> None:
    (folder / f"step-{step}.json").unlink()


def _swapped(folder: Path, step: int) -> None:
    (folder / f"step-{step}.pt").write_bytes((folder / "step-8.pt").read_bytes())


DAMAGE: dict[str, Callable[[Path, int], None]] = {
    "has a bit flipped in its payload": _flipped,
    "has lost the last byte of its payload": _cut,
    "has half a manifest": _manifest_cut,
    "has lost its payload": _payload_gone,
    "has no manifest (its writer died before it)": _manifest_gone,
    "has the payload of step 8": _swapped,
}


def judge(answer: Callable[[Path], Path | None]) -> str | None:
    """None when all is well, else one line that names the case."""
    if not callable(answer):
        return "give the function itself, without calling it"
    with TemporaryDirectory() as name:
        found = answer(Path(name))
        if found is not None:
            return f"in an empty folder it gives {short(found)}; there a job may start afresh: return None"
    cases = {"all three snapshots are good": (dict[int, str](), 100)}
    cases |= {f"step 100 {what}": ({100: what}, 40) for what in DAMAGE}
    cases |= {f"steps 100 and 40: each {what}": ({100: what, 40: what}, 8) for what in list(DAMAGE)[:3]}
    for case, (damage, expected) in cases.items():
        if problem := _judge_case(answer, case, damage, expected):
            return problem
    return _judge_nothing_good(answer)


def _judge_case(answer: Callable[[Path], Path | None], case: str, damage: dict[int, str], expected: int) -> str | None:
    with TemporaryDirectory() as name:
        folder = _folder(Path(name), damage)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        try:
            found = answer(folder)
        except Exception as error:
            return f"{case}: it raises {one_line(error)}, where step {expected} is still good"
        if {path.name: path.read_bytes() for path in folder.iterdir()} != before:
            return f"{case}: it changed the folder; only look"
        if found is None:
            return f"{case}: it gives None, and the job would begin again at step 0"
        if not isinstance(found, Path) or found.suffix != ".pt":
            return f"{case}: it gives {short(found)}; return the path of the payload"
        if found.name != f"step-{expected}.pt":
            why = ": 100 comes before 40 as a text" if not damage else ""
            return f"{case}: it gives {found.name}, not step-{expected}.pt{why}"
    return None


def _judge_nothing_good(answer: Callable[[Path], Path | None]) -> str | None:
    with TemporaryDirectory() as name:
        folder = _folder(Path(name), dict.fromkeys(STEPS, next(iter(DAMAGE))))
        try:
            found = answer(folder)
        except Exception:
            return None
    if found is None:
        return "all three are damaged: it gives None, and a job of three weeks quietly begins again at step 0; raise"
    return f"all three are damaged, and it gives {short(found.name if isinstance(found, Path) else found)}"


def _folder(folder: Path, damage: dict[int, str]) -> Path:
    for step in STEPS:
        make(folder, step)
    for step, what in damage.items():
        DAMAGE[what](folder, step)
    return folder


# --- the solution, and what people write on their way to it --------------------------------------------------------


def _good(payload: Path) -> bool:
    try:
        manifest = json.loads(payload.with_suffix(".json").read_text())
        return bool(hashlib.sha256(payload.read_bytes()).hexdigest() == manifest["sha256"])
    except (OSError, ValueError, KeyError):
        return False


def _step(payload: Path) -> int:
    return int(payload.stem.split("-")[1])


def newest_good(folder: Path) -> Path | None:
    """The solution."""
    payloads = sorted((path.with_suffix(".pt") for path in folder.glob("step-*.json")), key=_step, reverse=True)
    for payload in payloads:
        if _good(payload):
            return payload
    if payloads:
        raise RuntimeError(f"no snapshot in {folder} is good")
    return None


def _by_text(folder: Path) -> Path | None:
    payloads = sorted(folder.glob("step-*.pt"), reverse=True)
    return next(filter(_good, payloads), None)


def _quietly_none(folder: Path) -> Path | None:
    payloads = sorted(folder.glob("step-*.pt"), key=_step, reverse=True)
    return next(filter(_good, payloads), None)


def _newest_only(folder: Path) -> Path | None:
    newest = max(folder.glob("step-*.pt"), key=_step, default=None)
    if newest is not None and not _good(newest):
        raise RuntimeError(f"{newest} is damaged")
    return newest


def _unchecked(folder: Path) -> Path | None:
    return max(folder.glob("step-*.pt"), key=_step, default=None)


def _trusts_manifests(folder: Path) -> Path | None:
    for manifest in sorted(folder.glob("step-*.json"), key=_step, reverse=True):
        payload = manifest.with_suffix(".pt")
        if hashlib.sha256(payload.read_bytes()).hexdigest() == json.loads(manifest.read_text())["sha256"]:
            return payload
    return None


WRONG = (_by_text, _quietly_none, _newest_only, _unchecked, _trusts_manifests)
