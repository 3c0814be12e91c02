"""Snapshots that are whole or not there, checked before use, and fenced by generation."""

from course_lib.engine.snapshots.agreement import Restored, claim_generation, find_snapshot
from course_lib.engine.snapshots.heartbeat import Heartbeat
from course_lib.engine.snapshots.records import BadSnapshot, Claim, Manifest
from course_lib.engine.snapshots.store import SnapshotStore, cpu_model, open_payload

__all__ = [
    "BadSnapshot",
    "Claim",
    "Heartbeat",
    "Manifest",
    "Restored",
    "SnapshotStore",
    "claim_generation",
    "cpu_model",
    "find_snapshot",
    "open_payload",
]
