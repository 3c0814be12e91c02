"""A PyTorchJob as the operator sees it: validated, and with the defaults filled in."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

RestartPolicy = Literal["Always", "OnFailure", "Never", "ExitCode"]
Kind = Literal["Master", "Worker"]

GRACE_S = 30  # terminationGracePeriodSeconds by default
# Kinds of volumes whose content all pods share, wherever they run; the others live with the pod or with its node.
SHARED = ("persistentVolumeClaim", "nfs", "csi", "cephfs", "glusterfs", "azureFile")


@dataclass(frozen=True)
class Mount:
    """A volume in a container: `kind` is the volume's source, say `emptyDir`, `claim` the name that identifies it."""

    path: str
    volume: str
    kind: str
    claim: str
    sub_path: str = ""
    memory: bool = False
    sub_path_expr: str = ""
    ignored: tuple[str, ...] = ()  # fields that nothing here acts on


@dataclass(frozen=True)
class Source:
    """What `valueFrom` names in a variable's place: `kind` is its field, `what` the key there, or the pod's field."""

    kind: str
    what: str


@dataclass(frozen=True)
class Container:
    """The container `pytorch`; `where` is its path in the manifest, `env` what the manifest itself sets.

    Without a `command` the image's own begins, with `args` behind it. `env_from` are the objects of `envFrom`.
    """

    where: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[tuple[str, str | Source], ...]
    working_dir: str | None
    port: int
    mounts: tuple[Mount, ...]
    env_from: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return self.command + self.args

    def placed_words(self) -> Iterator[tuple[str, str]]:
        """(its path in the manifest, the word) of each."""
        for name, words in (("command", self.command), ("args", self.args)):
            for number, word in enumerate(words):
                yield f"{self.where}.{name}[{number}]", word

    @property
    def words_at(self) -> str:
        """The path of the words that are given last."""
        return f"{self.where}.{'args' if self.args else 'command'}"

    def variable(self, name: str) -> str | None:
        """What the manifest sets a variable to, "" where it does not; None where only a cluster knows."""
        value = dict(self.env).get(name, None if self.env_from else "")
        return value if isinstance(value, str) else None


@dataclass(frozen=True)
class Replica:
    """One of `pytorchReplicaSpecs`."""

    kind: Kind
    replicas: int
    restart_policy: RestartPolicy
    container: Container
    grace_s: int
    where: str


@dataclass(frozen=True)
class Elastic:
    """`elasticPolicy`; None is a field that is not there."""

    min_replicas: int
    max_replicas: int
    backend: str
    port: int | None
    host: str | None
    id: str | None
    conf: tuple[tuple[str, str], ...]
    standalone: bool
    max_restarts: int | None
    nproc_per_node: int | None


@dataclass(frozen=True, order=True)
class Pod:
    """The name and place of a pod; pods of one job sort as the operator numbers them."""

    rank: int  # 0 is the master, or the first worker where there is no master
    name: str = field(compare=False)
    kind: Kind = field(compare=False)
    index: int = field(compare=False)


@dataclass(frozen=True)
class PyTorchJob:
    """A job; `ignored` says in a line each what this machine does not do about the manifest.

    `generated` is what `generateName` gives: the cluster makes the name's end, in whose place `name` has xxxxx.
    """

    name: str
    replicas: tuple[Replica, ...]
    nproc_per_node: str | None
    elastic: Elastic | None
    clean_pod_policy: Literal["All", "Running", "None"]
    backoff_limit: int | None
    deadline_s: int | None
    suspend: bool
    given: frozenset[str] = frozenset()  # of runPolicy
    ignored: tuple[str, ...] = ()
    namespace: str = "default"
    generated: str = ""

    def replica_of(self, pod: Pod) -> Replica:
        """The replicas that a pod of this job is one of."""
        return next(replica for replica in self.replicas if replica.kind == pod.kind)

    def replica(self, kind: Kind) -> Replica | None:
        """The replicas of a kind, if the job has such."""
        return next((replica for replica in self.replicas if replica.kind == kind), None)

    @property
    def pods(self) -> tuple[Pod, ...]:
        """All pods, by name `JOB-master-0`, `JOB-worker-0`, …"""
        names = [
            (r.kind, n)
            for kind in ("Master", "Worker")
            for r in self.replicas
            if r.kind == kind
            for n in range(r.replicas)
        ]
        return tuple(Pod(rank, f"{self.name}-{kind.lower()}-{n}", kind, n) for rank, (kind, n) in enumerate(names))
