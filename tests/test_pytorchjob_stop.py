"""The command: its pods' places and names, how they are ended, by whom, and that nothing of them is left."""

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import GRACE, Running, launch, leftovers, running
from pytorchjob_tools import LIMIT_S, Ran, job, manifest, replica, write

from course_lib.engine import UsageError
from course_lib.lab.netns import Namespaces
from course_lib.lab.pytorchjob import LocalJob, ManifestError, places, ports, read_job
from course_lib.lab.pytorchjob.__main__ import main

COMMAND = [sys.executable, "-m", "course_lib.lab.pytorchjob"]
# Training, as far as a stop is concerned: it takes a second to save when it is told to.
TRAIN = (
    "import signal,sys,time\n"
    "def save(*_):\n"
    "    time.sleep(1); print('saved', flush=True); sys.exit(143)\n"
    "signal.signal(signal.SIGTERM, save); print('trains', flush=True); time.sleep(100)"
)
EXEC = {"container": {"command": ["python", "-c", TRAIN]}}
SHELL = {"container": {"command": ["sh", "-c", f'python -c "{TRAIN}"; true']}}


@pytest.fixture(scope="module")
def namespaces() -> None:
    try:
        Namespaces("a").close()
    except UsageError as error:
        pytest.skip(str(error))


@contextmanager
def started(folder: Path, document: dict[str, Any], *options: str) -> Iterator[Running]:
    """The command `run` on a manifest, with the work directory folder/work."""
    file = write(folder, document)
    words = [*COMMAND, "run", str(file), "--workdir", str(folder / "work"), "--backoff-base", "0.1", *options]
    with running(words, LIMIT_S) as process:
        yield process


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code and the output of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        try:
            main([str(word) for word in words])
        except UsageError as error:  # which `engine.run` turns into this
            print(error, file=sys.stderr)
            sys.exit(2)
    said = capsys.readouterr()
    return int(ended.value.code or 0), (said.out + said.err).strip()


def wait_for(process: Running, text: str, times: int = 1) -> None:
    deadline = time.monotonic() + LIMIT_S
    while process.output().count(text) < times:
        assert process.popen.poll() is None and time.monotonic() < deadline, process.output()
        time.sleep(0.05)


def test_each_pod_has_a_name_an_address_and_a_process_1_of_its_own(namespaces: None, tmp_path: Path) -> None:
    script = (
        "echo $$$$ $(hostname) $(getent ahostsv4 $MASTER_ADDR | head -1) $(hostname -I) $POD $IP;"
        "ls /proc | grep -c '^[0-9]'"
    )
    paths = (("POD", "metadata.name"), ("IP", "status.podIP"))
    env = {"env": [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in paths]}
    pods = {"master": replica(f"{script}; sleep 1", container=env), "worker": replica(script, 2, container=env)}
    ran = Ran(tmp_path, job(tmp_path, **pods), isolated=True)
    assert ran.phase == "Succeeded"
    for number, pod in enumerate(("demo-master-0", "demo-worker-0", "demo-worker-1")):
        said, processes = ran.said(pod)
        address = f"10.77.0.{2 + number}"
        assert said.split() == ["1", pod, "10.77.0.2", "STREAM", "demo-master-0", address, pod, address]
        assert int(processes) <= 4


@pytest.mark.parametrize("options", [(), ("--plain",)], ids=["namespaces", "plain"])
def test_a_stop_reaches_process_1_and_what_a_shell_hides_is_killed(
    options: Sequence[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """G7: the shell form never hears of it, whichever way a shell takes SIGTERM; the exec form saves."""
    if not options:
        request.getfixturevalue("namespaces")
    pods = {"master": replica("", **EXEC), "worker": replica("", terminationGracePeriodSeconds=2, **SHELL)}
    with started(tmp_path, manifest(**pods), *options) as process:
        wait_for(process, "| trains", 2)
        os.kill(process.pid, signal.SIGTERM)
        done = process.wait()
    assert done.returncode == 143, done.tail()
    assert re.findall(r"(\S+) +\| saved", done.output) == ["demo-master-0"]
    assert "demo-master-0: container ended with exit code 143" in done.output
    assert ("demo-worker-0: the grace period is over" in done.output) == (not options)


def test_ctrl_c_twice_ends_a_pod_that_does_not_listen(tmp_path: Path) -> None:
    deaf = replica("trap '' TERM; echo trains; while :; do sleep 0.2; done")
    with started(tmp_path, manifest(master=deaf), "--plain") as process:
        wait_for(process, "| trains")
        os.kill(process.pid, signal.SIGINT)
        wait_for(process, "stopping")
        os.kill(process.pid, signal.SIGINT)
        done = process.wait()
    assert done.returncode == 130, done.tail()


def test_a_stop_after_the_success_changes_nothing_of_it(tmp_path: Path) -> None:
    worker = replica("trap '' TERM; while :; do sleep 0.2; done", terminationGracePeriodSeconds=3)
    pods = manifest({"cleanPodPolicy": "Running"}, master=replica("sleep 0.3"), worker=worker)
    with started(tmp_path, pods, "--plain") as process:
        wait_for(process, "is deleted")
        os.kill(process.pid, signal.SIGINT)
        done = process.wait()
    assert done.returncode == 0 and "the job had succeeded before it was stopped" in done.output, done.tail()


def test_jobs_without_namespaces_that_share_a_port_are_refused(tmp_path: Path) -> None:
    """Their pods would mix: the second job's agents would meet the first one's."""
    made = job(tmp_path, master=replica("true"), worker=replica("true"))
    options: dict[str, Any] = {"isolated": False, "say": lambda line: None}
    (port,) = ports.meeting_ports(made)
    with LocalJob(made, tmp_path / "first", **options):
        for _ in range(2):  # what is refused lets go of its own directory
            with pytest.raises(UsageError, match=f"^port {port} is taken"):
                LocalJob(made, tmp_path / "second", **options)
        LocalJob(job(tmp_path, master=replica("true")), tmp_path / "second", **options).close()  # another port
    with socket.create_server(("127.0.0.2", port)), pytest.raises(UsageError, match=f"^port {port} is taken"):
        LocalJob(made, tmp_path / "second", **options)
    LocalJob(made, tmp_path / "second", **options).close()


@pytest.mark.parametrize(
    ("kinds", "command", "found"),
    [
        ("mw", ["python", "train.py"], {4321}),
        ("w", ["python", "train.py"], set()),
        ("mw", ["torchrun", "--rdzv-endpoint=$(MASTER_ADDR):99", "t.py"], {4321, 99}),
        ("w", ["torchrun", "--rdzv_endpoint", "demo-worker-0:99", "t.py"], {99}),
        ("w", ["torchrun", "--rdzv_endpoint", "demo-worker-0", "t.py"], {29400}),
        ("w", ["torchrun", "--rdzv_endpoint", "etcd:2379", "t.py"], set()),
        ("mw", ["sh", "-c", "torchrun --master_port=98 --rdzv-endpoint $MASTER_ADDR:97 t.py"], {4321, 98, 97}),
    ],
)
def test_where_the_pods_of_a_job_meet(kinds: str, command: list[str], found: set[int], tmp_path: Path) -> None:
    port = {"ports": [{"name": "pytorchjob-port", "containerPort": 4321}]}
    each = replica("", container={"command": command} | port)
    pods = {name: each for name in ("master", "worker") if name[0] in kinds}
    assert ports.meeting_ports(job(tmp_path, **pods)) == found
    if kinds == "w":
        assert ports.meeting_ports(job(tmp_path, elasticPolicy={}, **pods)) == found | {4321}


@pytest.mark.parametrize("name", ["logs", "volumes", "pods", "requests", "pods.json/x"])
def test_a_work_directory_with_something_else_in_a_place_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mounts = [{"name": "own", "mountPath": "/own"}, {"name": "c", "mountPath": "/c"}]
    volumes = [{"name": "own", "emptyDir": {}}, {"name": "c", "persistentVolumeClaim": {"claimName": "c"}}]
    made = manifest(master=replica("true", container={"volumeMounts": mounts}, volumes=volumes))
    path = tmp_path / "work" / name
    path.parent.mkdir(parents=True)
    path.touch()
    words = ("run", write(tmp_path, made), "--workdir", tmp_path / "work", "--plain")
    code, said = ask(capsys, *words)
    lines = [line for line in said.splitlines() if "cannot be used" in line]
    assert code == 2 and len(lines) == 1 and f"work/{name.split('/')[0]}" in lines[0] and "Traceback" not in said


def test_a_record_that_cannot_be_written_costs_a_line(tmp_path: Path) -> None:
    lines: list[str] = []
    made = job(tmp_path, master=replica("sleep 0.3; exit 1", policy="OnFailure"), worker=replica("sleep 0.3"))
    with LocalJob(made, tmp_path / "work", isolated=False, backoff_base_s=0, say=lines.append) as local:
        (tmp_path / "work" / "pods.json").mkdir()
        local.start()
        while local.restarts("demo-master-0") < 2:
            assert local.wait(0.1) is None
    assert sum("pods.json cannot be written" in line for line in lines) == 1
    assert [path for path in (tmp_path / "work").iterdir() if path.name.startswith(".pods")] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--map", "/=here"), "--map /=here"),
        (("--map", "//=here"), "below /"),
        (("--map", "/a="), "takes PATH=FOLDER"),
        (("--map", "/a=x", "--map", "/a/=y"), "named once"),
        (("--workdir", ""), "name a folder"),
    ],
)
def test_options_that_mean_nothing(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = ask(capsys, "run", write(tmp_path, manifest(master=replica("true"))), *words)
    assert code == 2 and said in output and len(output.splitlines()) == 1


@pytest.mark.parametrize("options", [(), ("--plain",)], ids=["namespaces", "plain"])
def test_a_runner_that_is_killed_leaves_nothing(
    options: Sequence[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not options:
        request.getfixturevalue("namespaces")
    with started(tmp_path, manifest(master=replica("", **EXEC), worker=replica("", 2, **SHELL)), *options) as process:
        wait_for(process, "| trains", 3)
        assert len(process.processes()) > 3
        os.kill(process.pid, signal.SIGKILL)
        process.popen.wait(LIMIT_S)
        deadline = time.monotonic() + 4 * GRACE
        while leftovers(process.mark, process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert leftovers(process.mark, process.pid) == []
    ports.hold(ports.meeting_ports(read_job(tmp_path / "job.yaml")), []).close()  # nor is its port taken any more


def test_kill_and_delete_from_another_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed, the container starts again in its pod; deleted, the pod may save and is replaced by a new one."""
    worker = replica("", policy="ExitCode", **EXEC)
    pods = manifest(master=replica("", **EXEC), worker=worker)
    with started(tmp_path, pods, "--plain") as process:
        wait_for(process, "| trains", 2)
        work = tmp_path / "work"
        before = json.loads((work / "pods.json").read_text())
        assert set(before) == {"demo-master-0", "demo-worker-0"}
        assert before["demo-master-0"]["restarts"] == 0 and Path(f"/proc/{before['demo-master-0']['pid']}").exists()
        assert ask(capsys, "kill", work, "demo-master-0") == (0, "")
        wait_for(process, "| trains", 3)
        assert ask(capsys, "delete", work, "demo-worker-0") == (0, "")
        wait_for(process, "| trains", 4)
        after = json.loads((work / "pods.json").read_text())
        assert after["demo-master-0"]["restarts"] == 1 and after["demo-worker-0"]["restarts"] == 0
        code, said = ask(capsys, "kill", work, "demo-worker-7")
        assert code == 2 and "demo-worker-7" in said and len(said.splitlines()) == 1
        code, said = ask(capsys, "run", tmp_path / "job.yaml", "--workdir", work)
        assert code == 2 and "another job runs in" in said and len(said.splitlines()) == 1
        os.kill(process.pid, signal.SIGTERM)
        done = process.wait()
    assert "demo-master-0: container ended with exit code 137 (SIGKILL); restartPolicy OnFailure" in done.output
    assert "demo-worker-0 | saved" in done.output and "demo-worker-0: a new pod takes its place" in done.output
    assert "Restarting (PyTorchJobRestarting)" in done.output
    code, said = ask(capsys, "kill", tmp_path / "work", "demo-master-0")
    assert code == 2 and "no job runs" in said


def test_lines_of_several_pods_stay_whole(tmp_path: Path) -> None:
    script = "i=0; while [ $i -lt 300 ]; do printf 'line %s ' $i; printf '%0100d\\n' $i; i=$((i+1)); done; printf end"
    ran = Ran(tmp_path, job(tmp_path, worker=replica(script, 3)))
    for pod in ("demo-worker-0", "demo-worker-1", "demo-worker-2"):
        assert ran.said(pod) == [f"line {n} {n:0100d}" for n in range(300)] + ["end"]


def test_a_reader_that_leaves_ends_the_job(tmp_path: Path) -> None:
    file = write(tmp_path, manifest(master=replica("while :; do echo again; sleep 0.05; done")))
    words = [*COMMAND, "run", str(file), "--workdir", str(tmp_path / "work"), "--plain"]
    done = launch(["sh", "-c", '"$@" | head -4', "sh", *words], LIMIT_S)
    assert done.returncode == 0 and "Traceback" not in done.output


def test_the_images_paths_are_folders_here(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hello.py").write_text("import os, sys; print(os.getcwd(), sys.argv[1], os.environ['DATA'])")
    command = ["python", "/image/hello.py", "--to=/data/out"]
    container = {
        "command": command,
        "workingDir": "/image",
        "env": [{"name": "DATA", "value": "/data:/database"}],
        "volumeMounts": [{"name": "d", "mountPath": "/data", "subPath": "sub"}],
    }
    volumes = [{"name": "d", "persistentVolumeClaim": {"claimName": "set"}}]
    made = job(tmp_path, master=replica("", container=container, volumes=volumes))
    with pytest.raises(ManifestError, match="workingDir: /image is not on this machine: --map /image=HERE"):
        Ran(tmp_path, made)
    container.pop("workingDir")
    again = job(tmp_path, master=replica("", container=container, volumes=volumes))
    with pytest.raises(ManifestError, match=r"command\[1\]: /image/hello.py is not on this machine"):
        Ran(tmp_path, again, maps={"/other": str(tmp_path)})
    assert not (tmp_path / "work").exists()
    ran = Ran(tmp_path, made, maps={"/image": str(tmp_path / "code")})
    here = tmp_path / "work" / "volumes" / "set" / "sub"
    assert ran.said("demo-master-0") == [f"{tmp_path}/code --to={here}/out {here}:/database"]


def test_without_namespaces_it_says_so_and_names_are_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(names: str) -> None:
        raise UsageError("no user namespaces")

    monkeypatch.setattr(places, "Namespaces", refuse)
    script = "echo $(MASTER_ADDR):$(MASTER_PORT) $PET_LOCAL_ADDR demo-master-0.other my-demo-master-0"
    made = job(tmp_path, master=replica(f"{script}; sleep 1"), worker=replica(script))
    ran = Ran(tmp_path, made, isolated=None)
    (line,) = [line for line in ran.lines if "no user namespaces" in line]
    assert "names are replaced by addresses" in line
    (port,) = ports.meeting_ports(made)
    assert ran.said("demo-worker-0")[0].split()[:2] == [f"127.0.0.2:{port}", "127.0.0.3"]
    assert ran.said("demo-worker-0")[0].endswith("demo-master-0.other my-demo-master-0")
    folder = tmp_path / "own"
    with pytest.raises(UsageError, match="no user namespaces"):
        Ran(folder, made, isolated=True)
