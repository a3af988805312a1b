"""The records that travel between processes, frozen, without torch."""

from .records import (
    Batch,
    Group,
    PolicyVersion,
    StepResult,
    Trajectory,
    TrajectoryResult,
    Turn,
    VersionSpan,
    routing_dtype,
)

__all__ = [
    "Batch",
    "Group",
    "PolicyVersion",
    "StepResult",
    "Trajectory",
    "TrajectoryResult",
    "Turn",
    "VersionSpan",
    "routing_dtype",
]
