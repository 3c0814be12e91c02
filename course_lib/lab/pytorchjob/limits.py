"""What a cluster would take and this runner cannot do: `run` refuses it, while `lint` and `env` go on."""

from collections.abc import Iterator, Mapping

from course_lib.lab.pytorchjob.containers import not_here
from course_lib.lab.pytorchjob.injected import pod_fields, value_of
from course_lib.lab.pytorchjob.job import Container, PyTorchJob, Source
from course_lib.lab.pytorchjob.references import known_elsewhere


def limits(job: PyTorchJob, maps: Mapping[str, str]) -> list[str]:
    """A line for each, with its path and what to change."""
    found = []
    if job.suspend:
        found.append("spec.runPolicy.suspend: is true, so that nothing starts: set it to false, to run it here")
    if job.generated:
        found.append("metadata.generateName: leaves the name to a cluster: give metadata.name, to run it here")
    fields = pod_fields(job, job.pods[0], "here")
    for replica in job.replicas:
        found += _container(replica.container, fields)
    return [*found, *known_elsewhere(job), *not_here(job, maps)]


def _container(container: Container, fields: Mapping[str, str]) -> Iterator[str]:
    where = container.where
    if not container.command:
        yield f"{where}.command: is missing: what the image starts by itself is not known here, so write it out"
    for number, (_, value) in enumerate(container.env):
        if isinstance(value, Source) and value_of(value, fields) is None:
            what = f"{value.kind} {value.what} needs a cluster: give a value instead, to run it here"
            yield f"{where}.env[{number}].valueFrom: {what}"
    for number, mount in enumerate(container.mounts):
        if mount.sub_path_expr:
            cure = "is not resolved here: give a subPath, to run it here"
            yield f"{where}.volumeMounts[{number}].subPathExpr: {mount.sub_path_expr} {cure}"
