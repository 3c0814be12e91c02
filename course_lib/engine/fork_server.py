"""Imported by the fork server of `course_lib.engine.warm`, and by nothing else."""

from course_lib.engine.warm import serve

serve()
