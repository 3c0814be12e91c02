"""Snapshots that are whole or not there, checked before use, and fenced by generation."""

from course_lib.engine.snapshots.agreement import Restored as Restored
from course_lib.engine.snapshots.agreement import claim_generation as claim_generation
from course_lib.engine.snapshots.agreement import find_snapshot as find_snapshot
from course_lib.engine.snapshots.draft import Draft as Draft
from course_lib.engine.snapshots.draft import cpu_model as cpu_model
from course_lib.engine.snapshots.draft import gpu_model as gpu_model
from course_lib.engine.snapshots.heartbeat import Heartbeat as Heartbeat
from course_lib.engine.snapshots.records import BadSnapshot as BadSnapshot
from course_lib.engine.snapshots.records import Claim as Claim
from course_lib.engine.snapshots.records import Manifest as Manifest
from course_lib.engine.snapshots.store import SnapshotStore as SnapshotStore
from course_lib.engine.snapshots.store import open_payload as open_payload
