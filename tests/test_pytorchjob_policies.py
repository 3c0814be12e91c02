"""restartPolicy, backoffLimit, deadlines and conditions, as release 1.9 of the training operator has them.

The sources are those that `course_lib.lab.pytorchjob.policies` names. The jobs' containers are shell commands.
"""

import signal
from pathlib import Path
from typing import Any, get_args

import pytest
from pytorchjob_tools import Ran, job, replica

from course_lib.lab.processes import kernel_mark, marked
from course_lib.lab.pytorchjob.__main__ import exit_code
from course_lib.lab.pytorchjob.policies import Condition, PodState, backoff_s, past_backoff_limit, verdict

# Fails with the code the first `n` times that it runs in this job (a claim keeps the count), and then succeeds.
FLAKY = "echo run; test -e /c/{n} && exit 0; touch /c/$(ls /c | wc -l | tr -d ' '); {end}"
CLAIM: dict[str, Any] = {
    "container": {"volumeMounts": [{"name": "c", "mountPath": "/c"}]},
    "volumes": [{"name": "c", "persistentVolumeClaim": {"claimName": "count"}}],
}


def flaky(times: int, end: str, policy: str) -> dict[str, Any]:
    return replica(FLAKY.format(n=times - 1, end=end), 1, policy, **CLAIM)


@pytest.mark.parametrize(
    ("policy", "end", "times", "limit", "phase", "runs", "restarts"),
    [
        # OnFailure: the kubelet starts it again in the same pod, whatever the code.
        ("OnFailure", "exit 1", 2, None, "Succeeded", 3, 2),
        ("OnFailure", "kill -9 $$$$", 1, None, "Succeeded", 2, 1),
        # backoffLimit: the job fails when so many restarts have been made; 0 is as 1.
        ("OnFailure", "exit 1", 2, 3, "Succeeded", 3, 2),
        ("OnFailure", "sleep 0.3; exit 1", 9, 2, "Failed", 3, 2),
        ("OnFailure", "sleep 0.3; exit 1", 9, 0, "Failed", 2, 1),
        # Never: the first failure is the job's.
        ("Never", "exit 1", 1, None, "Failed", 1, 0),
        ("Never", "exit 143", 1, 5, "Failed", 1, 0),
        # ExitCode: from 128 on a new pod, whose restarts begin at 0: the limit does not see them, unless it is 0.
        ("ExitCode", "exit 1", 1, None, "Failed", 1, 0),
        ("ExitCode", "exit 127", 1, 5, "Failed", 1, 0),
        ("ExitCode", "exit 128", 1, None, "Succeeded", 2, 0),
        ("ExitCode", "exit 143", 3, 1, "Succeeded", 4, 0),
        ("ExitCode", "kill -9 $$$$", 1, None, "Succeeded", 2, 0),
        ("ExitCode", "exit 143", 1, 0, "Failed", 1, 0),
        # Always: also after a success, so that only the limit ends it.
        ("Always", "exit 0", 9, 2, "Failed", 3, 2),
    ],
)
def test_restart_policies(
    policy: str, end: str, times: int, limit: int | None, phase: str, runs: int, restarts: int, tmp_path: Path
) -> None:
    run_policy = {} if limit is None else {"backoffLimit": limit}
    ran = Ran(tmp_path, job(tmp_path, run_policy, master=flaky(times, end, policy)))
    said = ran.said("demo-master-0")
    # The job fails while the container of the last restart still runs, perhaps before it has said anything.
    assert (ran.phase, ran.restarts["demo-master-0"]) == (phase, restarts), ran.lines
    assert len(said) == runs or (phase == "Failed" and len(said) == runs - 1), ran.lines


def test_conditions_of_a_restart_in_the_pod_and_of_a_new_pod(tmp_path: Path) -> None:
    """While the kubelet starts a container again the job runs; Restarting is when the operator makes a new pod."""
    for number, (policy, between) in enumerate((("OnFailure", []), ("ExitCode", ["Restarting", "Running"]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        ran = Ran(folder, job(folder, master=flaky(1, "exit 130", policy)))
        assert ran.history == ["Created", "Running", *between, "Succeeded"]


def test_the_master_decides_and_cleaning_ends_the_others(tmp_path: Path) -> None:
    for clean, said in (("Running", "cleanPodPolicy Running"), ("All", "cleanPodPolicy All")):
        workers = replica("sleep 60", 2, terminationGracePeriodSeconds=0)
        folder = tmp_path / clean
        folder.mkdir()
        policy = {"cleanPodPolicy": clean}
        ran = Ran(folder, job(folder, policy, master=replica("sleep 0.5"), worker=workers))
        assert ran.phase == "Succeeded"
        assert sum(said in line for line in ran.lines) == 2, ran.lines


def test_without_cleaning_the_others_come_to_their_end(tmp_path: Path) -> None:
    ran = Ran(tmp_path, job(tmp_path, master=replica("sleep 0.3"), worker=replica("sleep 1; echo end", 1)))
    assert (ran.phase, ran.said("demo-worker-0")) == ("Succeeded", ["end"])


def test_a_worker_that_fails_for_good_fails_the_job(tmp_path: Path) -> None:
    worker = replica("exit 3", 1, "Never")
    ran = Ran(tmp_path, job(tmp_path, master=replica("sleep 60", terminationGracePeriodSeconds=0), worker=worker))
    assert ran.phase == "Failed" and ran.history == ["Created", "Running", "Failed"]


def test_a_deadline(tmp_path: Path) -> None:
    slow = replica("sleep 60", terminationGracePeriodSeconds=0)
    late = Ran(tmp_path, job(tmp_path, {"activeDeadlineSeconds": 1}, master=slow))
    assert late.phase == "Failed" and any("longer than 1 s" in line for line in late.lines)


@pytest.mark.parametrize("phase", [None, *get_args(Condition)])
def test_only_a_job_that_has_succeeded_ends_with_0(phase: Any) -> None:
    """However late a signal came; one that came before the end is the reason of it."""
    ended = phase is not None
    assert exit_code(phase, None) == (0 if phase == "Succeeded" else 1)
    assert exit_code(phase, signal.SIGINT) == (exit_code(phase, None) if ended else 130)


def test_a_command_that_is_not_there_ends_with_128(tmp_path: Path) -> None:
    """As Kubernetes reports it (StartError); for ExitCode that is a code to try again."""
    master = replica("true", policy="Never", container={"command": ["no-such-program"]})
    ran = Ran(tmp_path, job(tmp_path, master=master))
    assert ran.phase == "Failed" and "no program no-such-program" in ran.said("demo-master-0")[0]
    assert any("exit code 128" in line for line in ran.lines)
    (tmp_path / "odd").write_bytes(b"\x7fELF")
    (tmp_path / "odd").chmod(0o755)
    odd = Ran(tmp_path, job(tmp_path, master=replica("", policy="Never", container={"command": [f"{tmp_path}/odd"]})))
    assert odd.phase == "Failed" and any("cannot be started" in line and "format" in line for line in odd.lines)


def test_what_identifies_a_pod_stays_and_what_belongs_to_it_does_not(tmp_path: Path) -> None:
    """A restart in the pod keeps its emptyDir; a new pod begins with an empty one; a claim is there for all."""
    mounts = {"volumeMounts": [{"name": "own", "mountPath": "/own"}, {"name": "c", "mountPath": "/c"}]}
    volumes = [{"name": "own", "emptyDir": {}}, *CLAIM["volumes"]]
    script = (
        "echo $(ls /own | wc -l) $(ls /c | wc -l); test $(ls /c | wc -l) = 2 && exit 0; touch /own/x /c/$$$$; exit 200"
    )
    for policy, own in (("OnFailure", ["0 0", "1 1", "1 2"]), ("ExitCode", ["0 0", "0 1", "0 2"])):
        folder = tmp_path / policy
        folder.mkdir()
        ran = Ran(folder, job(folder, master=replica(script, 1, policy, container=mounts, volumes=volumes)))
        assert ran.said("demo-master-0") == own


def test_what_a_container_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    script = "test -e /c/x && exit 0; touch /c/x; sleep 777 & exit 1"
    ran = Ran(tmp_path, job(tmp_path, master=replica(script, **CLAIM)))
    assert ran.phase == "Succeeded" and ran.restarts["demo-master-0"] == 1
    assert [p for p in marked(kernel_mark()) if "777" in p.command] == []


def test_the_kubelets_back_off() -> None:
    """At once, then 10 s, 20 s, … up to 300 s (kubernetes.io, "Container restarts")."""
    assert [backoff_s(n) for n in range(1, 9)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert [backoff_s(n, 0.5) for n in (1, 2, 3)] == [0, 0.5, 1]


def pod(kind: str, phase: Any, policy: Any = "OnFailure", **more: Any) -> PodState:
    return PodState(kind, phase, policy, **more)


@pytest.mark.parametrize(
    ("elastic", "phases", "expected"),
    [
        (False, ["Succeeded", "Running"], "Running"),
        (False, ["Succeeded", "Succeeded"], "Succeeded"),
        (True, ["Running", "Succeeded"], "Succeeded"),
        (False, ["Running", "Pending"], "Running"),
        (False, ["Pending", "Pending"], None),
    ],
)
def test_without_a_master_the_workers_decide(
    elastic: bool, phases: list[str], expected: str | None, tmp_path: Path
) -> None:
    """All of them, or with an elasticPolicy any (pytorchjob_controller.go, UpdateJobStatus)."""
    made = job(tmp_path, worker=replica("true", 2), **({"elasticPolicy": {}} if elastic else {}))
    found = verdict(made, [pod("Worker", phase) for phase in phases])
    assert (found and found[0]) == expected


def test_a_pod_that_is_deleted_restarts_the_job_unless_its_policy_is_never(tmp_path: Path) -> None:
    """pkg/core/status.go counts a pod that is being deleted as failed."""
    made = job(tmp_path, master=replica("true"), worker=replica("true", 2))
    for policy, expected in (("OnFailure", "Restarting"), ("ExitCode", "Restarting"), ("Never", "Failed")):
        found = verdict(made, [pod("Master", "Running"), pod("Worker", "Running", policy, deleted=True)])
        assert found is not None and found[0] == expected


def test_the_limit_counts_the_restarts_of_all_pods_that_run(tmp_path: Path) -> None:
    made = job(tmp_path, {"backoffLimit": 3}, master=replica("true"), worker=replica("true", 2))
    one, two = pod("Master", "Running", restarts=1), pod("Worker", "Running", restarts=1)
    assert not past_backoff_limit(made, [one, two])
    assert past_backoff_limit(made, [one, two, two])
    ended = pod("Worker", "Succeeded", restarts=9)
    never = pod("Worker", "Running", "Never", restarts=9)
    assert not past_backoff_limit(made, [one, ended, never])
