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
from course_lib.lab.pytorchjob.policies import BACKOFF_S
from course_lib.lab.pytorchjob.workdir import ask

_ABOUT = """Run a Kubeflow PyTorchJob on this machine, from its manifest and without Kubernetes.

run FILE      start a process for each pod, with the environment that the training operator 1.9 gives it
env FILE      print that environment
lint FILE     name the traps in the manifest: where, why, and the cure
kill DIR POD  SIGKILL to all processes of a pod of the job that runs in the work directory DIR
delete DIR POD  SIGTERM to it, and SIGKILL after its grace period, as `kubectl delete pod`

run ends with 0 when the job has succeeded, 1 when it has failed, 2 when the manifest is refused, and with 130 or 143
when SIGINT or SIGTERM stopped it; lint with 1 when it has found something."""


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
        sub.add_argument("workdir", type=Path, metavar="DIR")
        sub.add_argument("pod", metavar="POD")
    return parser


def _run_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--workdir", type=Path, metavar="DIR", help="for volumes and logs; by default runs/NAME-OF-JOB")
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


def _run(options: argparse.Namespace) -> int:
    maps = dict(pair.split("=", 1) for pair in options.map if pair.startswith("/") and pair.split("=", 1)[1:])
    if len(maps) < len(options.map):
        raise UsageError("--map takes PATH=FOLDER, where PATH begins with / and is named once")
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
        if asked:
            return 128 + asked[0]
        return 1 if local.phase == "Failed" else 0


def _env(options: argparse.Namespace) -> int:
    for pod, variables in environment(read_job(options.file, options.job)).items():
        print(f"# {pod}")
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
