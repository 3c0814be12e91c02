"""What a manifest says of a pod: its container `pytorch`, its volumes, and what a laptop does not do about the rest.

The field names are Kubernetes' (core/v1, as the CRD of the training operator 1.9 has them).
"""

import re
from collections.abc import Iterator

from course_lib.lab.pytorchjob.fields import Fields
from course_lib.lab.pytorchjob.job import GRACE_S, Container, Mount, Source

_CONTAINER, _PORT_NAME, _PORT = "pytorch", "pytorchjob-port", 23456
_POD_IGNORED = [
    "activeDeadlineSeconds",
    "affinity",
    "automountServiceAccountToken",
    "dnsConfig",
    "dnsPolicy",
    "enableServiceLinks",
    "ephemeralContainers",
    "hostAliases",
    "hostIPC",
    "hostNetwork",
    "hostPID",
    "hostUsers",
    "hostname",
    "hostnameOverride",
    "imagePullSecrets",
    "initContainers",
    "nodeName",
    "nodeSelector",
    "os",
    "overhead",
    "preemptionPolicy",
    "priority",
    "priorityClassName",
    "readinessGates",
    "resourceClaims",
    "resources",
    "restartPolicy",
    "runtimeClassName",
    "schedulerName",
    "schedulingGates",
    "schedulingGroup",
    "securityContext",
    "serviceAccount",
    "serviceAccountName",
    "setHostnameAsFQDN",
    "shareProcessNamespace",
    "subdomain",
    "tolerations",
    "topologySpreadConstraints",
]
_CONTAINER_IGNORED = [
    "envFrom",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "livenessProbe",
    "readinessProbe",
    "resizePolicy",
    "resources",
    "restartPolicy",
    "restartPolicyRules",
    "securityContext",
    "startupProbe",
    "stdin",
    "stdinOnce",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "tty",
    "volumeDevices",
]
_SOURCES = [
    "awsElasticBlockStore",
    "azureDisk",
    "azureFile",
    "cephfs",
    "cinder",
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "fc",
    "flexVolume",
    "flocker",
    "gcePersistentDisk",
    "gitRepo",
    "glusterfs",
    "hostPath",
    "image",
    "iscsi",
    "nfs",
    "persistentVolumeClaim",
    "photonPersistentDisk",
    "portworxVolume",
    "projected",
    "quobyte",
    "rbd",
    "scaleIO",
    "secret",
    "storageos",
    "vsphereVolume",
]
_CONTENT = ("configMap", "secret", "projected", "downwardAPI", "image", "gitRepo")  # volumes that come with content
# What identifies a value: in `valueFrom` by its source, in `envFrom` an object.
_VALUES = {
    "fieldRef": "fieldPath",
    "secretKeyRef": "key",
    "configMapKeyRef": "key",
    "resourceFieldRef": "resource",
    "fileKeyRef": "key",
}
_MOUNT_IGNORED = ("readOnly", "recursiveReadOnly", "mountPropagation")
_WHICH = {"persistentVolumeClaim": "claimName", "hostPath": "path", "nfs": "path"}  # what identifies a volume


def read_template(template: Fields, there: bool) -> tuple[Container, int, list[str]]:
    """(the container, the grace period in seconds, what is ignored) of a replica's pod template."""
    template.only(("metadata", "spec"))
    spec = template.object("spec", required=there)
    spec.only(("containers", "volumes", "terminationGracePeriodSeconds"), _POD_IGNORED)
    grace_s = spec.number("terminationGracePeriodSeconds", GRACE_S)
    volumes = {volume.volume: volume for volume in _volumes(spec)}
    containers = list(spec.objects("containers"))
    names = [container.text("name", required=True) for container in containers]
    if "spec" in template and not containers:
        spec.wrong("containers", "is missing: it needs a container called pytorch")
    elif containers and _CONTAINER not in names and None not in names:
        spec.wrong("containers", f"one has to be called {_CONTAINER}; there is {', '.join(map(str, names))}")
    for name in {name for name in names if names.count(name) > 1}:
        spec.wrong("containers", f"two are called {name}")
    read = [_container(container, volumes) for container in containers]
    at = names.index(_CONTAINER) if _CONTAINER in names else 0
    ignored = [f"{field} of the pod" for field in _POD_IGNORED if field in spec]
    ignored += [f"container {name}" for name in names if name not in (_CONTAINER, None)]
    if containers:
        ignored += [field for field in _CONTAINER_IGNORED if field in containers[at]]
        ignored += [f"{field} of the mount {m.volume}" for m in read[at].mounts for field in m.ignored]
        ignored += [
            f"content of the {m.kind} {m.volume}, whose folder is empty" for m in read[at].mounts if m.kind in _CONTENT
        ]
    empty = Container(spec.at("containers[0]"), (), (), (), None, _PORT, ())
    return read[at] if read else empty, GRACE_S if grace_s is None else grace_s, ignored


def _container(given: Fields, volumes: dict[str, Mount]) -> Container:
    handled = ("name", "command", "args", "env", "workingDir", "ports", "volumeMounts")
    given.only(handled, _CONTAINER_IGNORED)
    given.text("image", required=True)
    return Container(
        where=given.path,
        command=given.strings("command"),
        args=given.strings("args"),
        env=tuple(_env(given)),
        working_dir=given.text("workingDir"),
        port=_port(given),
        mounts=tuple(_mounts(given, volumes)),
        env_from=tuple(_env_from(given)),
    )


def _env(given: Fields) -> Iterator[tuple[str, str | Source]]:
    for entry in given.objects("env"):
        entry.only(("name", "value", "valueFrom"))
        name = entry.text("name", required=True)
        if name is not None and ("=" in name or not name.isprintable()):
            entry.wrong("name", f"{name!r} cannot be the name of a variable")
        value = entry.text("value", "") or ""
        if "valueFrom" in entry and value:
            entry.wrong("valueFrom", "stands beside a value: leave one")
        if name:
            yield name, _source(entry.object("valueFrom")) if "valueFrom" in entry else value


def _source(given: Fields) -> Source:
    given.only(tuple(_VALUES))
    kinds = [kind for kind in _VALUES if kind in given]
    if len(kinds) != 1:
        given.findings.append(f"{given.path}: needs one of {', '.join(_VALUES)}")
    kind = kinds[0] if kinds else "fieldRef"
    return Source(kind, given.object(kind, required=bool(kinds)).text(_VALUES[kind], required=bool(kinds)) or "")


def _env_from(given: Fields) -> Iterator[str]:
    for entry in given.objects("envFrom"):
        entry.only(("prefix", "configMapRef", "secretRef"))
        kinds = [kind for kind in ("configMapRef", "secretRef") if kind in entry]
        if len(kinds) != 1:
            entry.findings.append(f"{entry.path}: needs a configMapRef or a secretRef")
        for kind in kinds[:1]:
            yield f"{kind} {entry.object(kind).text('name', required=True)}"


def _port(given: Fields) -> int:
    found = _PORT
    for entry in given.objects("ports"):
        entry.only(("name", "containerPort", "hostPort", "hostIP", "protocol"))
        port = entry.number("containerPort", low=1, high=2**16 - 1)
        if "containerPort" not in entry:
            entry.wrong("containerPort", "is missing")
        if entry.text("name") == _PORT_NAME and port is not None:
            found = port
    return found


def _volumes(spec: Fields) -> Iterator[Mount]:
    seen: set[str] = set()
    for entry in spec.objects("volumes"):
        entry.only(("name",), _SOURCES)
        name = entry.text("name", required=True)
        sources = [source for source in _SOURCES if source in entry.values]
        if len(sources) != 1:
            said = " and ".join(sources) if sources else "none"
            entry.findings.append(f"{entry.path}: needs one kind of volume, such as emptyDir; it has {said}")
        if name in seen:
            entry.wrong("name", f"another volume is called {name}")
        if name:
            seen.add(name)
            kind = sources[0] if sources else "emptyDir"
            source = entry.object(kind)
            which = source.text(_WHICH[kind], required=True) if kind in _WHICH and sources else None
            memory = source.values.get("medium") == "Memory"
            yield Mount("", name, kind, re.sub(r"[^\w.-]+", "-", which or name).strip("-"), memory=memory)


def _mounts(given: Fields, volumes: dict[str, Mount]) -> Iterator[Mount]:
    seen: set[str] = set()
    for entry in given.objects("volumeMounts"):
        entry.only(("name", "mountPath", "mountPropagation", "readOnly", "recursiveReadOnly", "subPath", "subPathExpr"))
        name, path = entry.text("name", required=True), entry.text("mountPath", required=True)
        sub_path, expression = entry.text("subPath", "") or "", entry.text("subPathExpr", "") or ""
        if path is not None and not path.startswith("/"):
            entry.wrong("mountPath", f"has to be an absolute path, not {path!r}")
        if sub_path.startswith("/") or ".." in sub_path.split("/"):
            entry.wrong("subPath", f"has to stay in the volume, not {sub_path!r}")
        if sub_path and expression:
            entry.wrong("subPathExpr", "stands beside a subPath: leave one")
        if path in seen:
            entry.wrong("mountPath", f"{path} is there twice")
        if name is not None and name not in volumes:
            entry.wrong("name", f"there is no volume called {name} in this pod")
        if path and name in volumes:
            seen.add(path)
            volume = volumes[name]
            where = path.rstrip("/") or "/"
            unused = tuple(field for field in _MOUNT_IGNORED if entry.values.get(field))
            yield Mount(where, name, volume.kind, volume.claim, sub_path, volume.memory, expression, unused)
