"""What a learner takes to production: training that survives the death of its processes.

It needs torch, numpy and the standard library, and imports nothing of the rest of the course.
"""

from course_lib.engine.entry import run
from course_lib.engine.errors import NonFiniteError, PeerLost, Preempted, SnapshotError, UsageError
from course_lib.engine.evaluate import evaluate
from course_lib.engine.order import Plan, Position
from course_lib.engine.runlog import RunLog, read_events
from course_lib.engine.snapshots import SnapshotStore
from course_lib.engine.state import Best, TrainState
from course_lib.engine.trainer import Trainer
from course_lib.engine.world import World, open_world

__all__ = [
    "Best",
    "NonFiniteError",
    "PeerLost",
    "Plan",
    "Position",
    "Preempted",
    "RunLog",
    "SnapshotError",
    "SnapshotStore",
    "TrainState",
    "Trainer",
    "UsageError",
    "World",
    "evaluate",
    "open_world",
    "read_events",
    "run",
]
