"""Runs the manifest of a Kubeflow PyTorchJob on this machine: `python -m course_lib.lab.pytorchjob run FILE`."""

from course_lib.lab.pytorchjob.documents import ManifestError as ManifestError
from course_lib.lab.pytorchjob.injected import environment as environment
from course_lib.lab.pytorchjob.job import PyTorchJob as PyTorchJob
from course_lib.lab.pytorchjob.lint import Trap as Trap
from course_lib.lab.pytorchjob.lint import lint as lint
from course_lib.lab.pytorchjob.local import LocalJob as LocalJob
from course_lib.lab.pytorchjob.manifest import read_job as read_job
