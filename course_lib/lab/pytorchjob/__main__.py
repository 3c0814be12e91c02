"""The commands: run, env, lint, kill and delete."""

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from course_lib.engine import UsageError, run
from course_lib.lab.launch import runs_directory
from course_lib.lab.pytorchjob import LocalJob, ManifestError, environment, lint, read_job
from course_lib.lab.pytorchjob.injected import unknown
from course_lib.lab.pytorchjob.policies import BACKOFF_S, Condition
from course_lib.lab.pytorchjob.workdir import ask

_ABOUT = """Run a Kubeflow PyTorchJob on this machine, from its manifest and without Kubernetes.

run FILE      start a process for each pod, with the environment that the training operator 1.9 gives it
env FILE      print that environment
lint FILE     name the traps in the manifest: where, why, and the cure
kill DIR POD  SIGKILL to all processes of a pod of the job that runs in the work directory DIR
delete DIR POD  SIGTERM to it, and SIGKILL after its grace period, as `kubectl delete pod`

run ends with 0 when the job has succeeded, 1 when it has failed, 2 when the manifest is refused, and with 130 or 143
when SIGINT or SIGTERM stopped it before; lint with 1 when it has found something."""


class _Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help explains)")


def main(argv: list[str] | None = None) -> None:
    """Do what the command line says; a manifest's mistakes are said one a line, with the path of the field."""
    options = _parser().parse_args(argv)
    try:
        code = {"run": _run, "env": _env, "lint": _lint, "kill": _ask, "delete": _ask}[options.verb](options)
    except ManifestError as error:
        for line in error.findings:
            print(f"error: {line}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("python -m course_lib.lab.pytorchjob", description=_ABOUT, formatter_class=raw)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in ("run", "env", "lint"):
        sub = verbs.add_parser(verb)
        sub.add_argument("file", type=Path, metavar="FILE", help="the manifest")
        sub.add_argument("--job", metavar="NAME", help="which job of a file that has several; by default the first")
        if verb == "run":
            _run_options(sub)
    for verb in ("kill", "delete"):
        sub = verbs.add_parser(verb)
        sub.add_argument("workdir", type=_folder, metavar="DIR")
        sub.add_argument("pod", metavar="POD")
    return parser


def _run_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--workdir", type=_folder, metavar="DIR", help="for volumes and logs; by default runs/NAME-OF-JOB")
    sub.add_argument(
        "--map", action="append", default=[], metavar="PATH=FOLDER", help="what the image has at PATH is in FOLDER here"
    )
    sub.add_argument(
        "--backoff-base",
        type=float,
        default=BACKOFF_S,
        metavar="SECONDS",
        help=f"before the second restart of a container; each later one waits twice as long ({BACKOFF_S:g})",
    )
    sub.add_argument("--plain", action="store_true", help="no namespaces: pods share the network and the process table")


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a folder")
    return Path(text)


def _maps(pairs: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        path, _, folder = pair.partition("=")
        path = path.rstrip("/")
        if not path.startswith("/") or not folder or path in found:
            raise UsageError(
                f"--map {pair}: takes PATH=FOLDER, where PATH is a path of the image below / and named once"
            )
        found[path] = folder
    return found


def exit_code(phase: Condition | None, stopped_by: int | None) -> int:
    """0 for a job that has succeeded, also when it was stopped while its last pods ended; 128 and the signal's number
    for one that a signal stopped before its end; 1 for every other."""
    if phase is None and stopped_by is not None:
        return 128 + stopped_by
    return 0 if phase == "Succeeded" else 1


def _run(options: argparse.Namespace) -> int:
    maps = _maps(options.map)
    if not options.backoff_base >= 0:
        raise UsageError("--backoff-base is a number of seconds, 0 or more")
    job = read_job(options.file, options.job)
    asked: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        asked.append(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, note)
    workdir = options.workdir or runs_directory() / job.name
    isolated = False if options.plain else None
    with LocalJob(job, workdir, maps=maps, backoff_base_s=options.backoff_base, isolated=isolated) as local:
        local.start()
        print(f"local    | process {os.getpid()} runs the job; its logs and volumes are in {local.workdir}", flush=True)
        stops = 0
        while not local.done:
            if stops < len(asked):
                print("local    | stopping: SIGTERM to each pod, SIGKILL after its grace period", flush=True)
                local.stop()
                stops = len(asked)
            local.wait(limit_s=0.1)
        if asked and local.phase is not None:
            print(f"local    | the job had {local.phase.lower()} before it was stopped", flush=True)
        return exit_code(local.phase, asked[0] if asked else None)


def _env(options: argparse.Namespace) -> int:
    job = read_job(options.file, options.job)
    if job.generated:
        print(f"# xxxxx stands for what the cluster puts behind {job.generated}\n")
    for pod, variables in zip(job.pods, environment(job).values(), strict=True):
        print(f"# {pod.name}")
        if others := unknown(job, pod):
            print(f"# only a cluster knows {', '.join(others)}")
        for name, value in sorted(variables.items()):
            print(f"{name}={value}")
        print()
    return 0


def _lint(options: argparse.Namespace) -> int:
    traps = lint(read_job(options.file, options.job))
    for trap in traps:
        print(f"{trap.path}: {trap.why}\n    cure: {trap.cure}")
    return 1 if traps else 0


def _ask(options: argparse.Namespace) -> int:
    ask(options.workdir, options.verb, options.pod)
    return 0


if __name__ == "__main__":
    run(main)
