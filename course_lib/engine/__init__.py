"""What a learner takes to production: training that survives the death of its processes.

It needs torch, numpy and the standard library, and imports nothing of the rest of the course.
"""

from course_lib.engine.entry import run as run
from course_lib.engine.errors import NonFiniteError as NonFiniteError
from course_lib.engine.errors import PeerLost as PeerLost
from course_lib.engine.errors import Preempted as Preempted
from course_lib.engine.errors import SnapshotError as SnapshotError
from course_lib.engine.errors import UsageError as UsageError
from course_lib.engine.evaluate import evaluate as evaluate
from course_lib.engine.order import Plan as Plan
from course_lib.engine.order import Position as Position
from course_lib.engine.runlog import RunLog as RunLog
from course_lib.engine.runlog import read_events as read_events
from course_lib.engine.snapshots import SnapshotStore as SnapshotStore
from course_lib.engine.state import Best as Best
from course_lib.engine.state import TrainState as TrainState
from course_lib.engine.trainer import Trainer as Trainer
from course_lib.engine.world import World as World
from course_lib.engine.world import open_world as open_world
