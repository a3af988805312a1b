"""The records that travel between processes, frozen, without torch."""

from .records import (
    Batch,
    Group,
    LearnerRecord,
    PolicyVersion,
    StepResult,
    Trajectory,
    TrajectoryResult,
    Turn,
    VersionSpan,
    routing_dtype,
)
from .rewards import has_variance

__all__ = [
    "Batch",
    "Group",
    "PolicyVersion",
    "LearnerRecord",
    "StepResult",
    "Trajectory",
    "TrajectoryResult",
    "Turn",
    "VersionSpan",
    "has_variance",
    "routing_dtype",
]
