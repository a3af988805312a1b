"""One message of every kind, and a comparison that misses nothing."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from vcpo_megatron.transport.messages import (
    AbortStep,
    BatchReady,
    BucketTaken,
    Checkpoint,
    CheckpointDone,
    Error,
    GroupOpened,
    GroupsScored,
    Heartbeat,
    Hello,
    Loaded,
    OpenGroup,
    Probe,
    ProbeResult,
    ReleaseWeights,
    ScoreGroups,
    SendingFailed,
    SendWeights,
    StepAborted,
    StepDone,
    Stop,
    StopSending,
    SyncDone,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from vcpo_megatron.types import (
    Batch,
    Group,
    PolicyVersion,
    StepResult,
    Trajectory,
    TrajectoryResult,
    Turn,
    VersionSpan,
)

TOKEN = "secret"


def trajectory(group: int, sample: int, tokens: list[int], mask: list[bool], logprobs: list[float]) -> Trajectory:
    start = mask.index(True)
    end = len(mask)
    return Trajectory(
        group_id=group,
        sample_index=sample,
        prompt_id=f"prompt-{group}",
        prompt_length=start,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.bool_),
        behavior_logprobs=np.array(logprobs, np.float32),
        turns=(
            Turn(
                start,
                end,
                "length",
                (
                    VersionSpan(start, start + 1, PolicyVersion(1, 16)),
                    VersionSpan(start + 1, end, PolicyVersion(2, 17)),
                ),
            ),
        ),
        reward=0.5,
        info={"format": 1.0, "correct": 0.0},
    )


T, F = True, False
BATCH = Batch(
    step=17,
    groups=(
        Group(
            3,
            "prompt-3",
            (
                trajectory(3, 0, [1, 2, 3, 4], [F, F, T, T], [0.0, 0.0, -0.25, -1.5]),
                trajectory(3, 1, [7, 151935, 2147483647], [F, T, T], [0.0, -1e-7, -60.0]),
            ),
        ),
        Group(9, "prompt-9", (trajectory(9, 0, [5, 6, 7, 8, 9], [F, T, T, F, T], [0.0, -1.0, -2.0, 0.0, -3.0]),)),
    ),
)

EXPERTS = np.arange(2 * 3 * 2, dtype=np.uint16).reshape(2, 3, 2)
#: Of three trajectories the second has a record of its experts.
ROUTED = Batch(
    step=18,
    groups=(
        Group(
            4,
            "prompt-4",
            (
                trajectory(4, 0, [1, 2, 3], [F, T, T], [0.0, -0.25, -1.5]),
                replace(trajectory(4, 1, [7, 8], [F, T], [0.0, -1e-7]), routed_experts=EXPERTS),
                trajectory(4, 2, [1, 2], [F, T], [0.0, -0.25]),
            ),
        ),
    ),
)

#: The first group of ``ROUTED``, and one that the learner has scored.
RECORDED = Batch(
    18,
    (
        ROUTED.groups[0],
        BATCH.groups[0].with_recorded(PolicyVersion(2, 18, "3f9a21c0"), -np.arange(7, dtype=np.float32)),
    ),
)

MESSAGES: list[Any] = [
    Hello(TOKEN, PolicyVersion(2, 40), 4),
    Loaded(PolicyVersion(2, 40)),
    WeightsReady(PolicyVersion(1, 3), "tensor", [[["a", "float32", [2, 3]]], [["b", "bfloat16", []]]]),
    WeightsReady(PolicyVersion(1, 0), "disk", path="/run/weights/1.0", checksums={"a": "00ff"}),
    SyncDone(PolicyVersion(10, 123456)),
    Probe(np.array([1, 2, 3, 2147483647], np.int32)),
    Probe(np.zeros(0, np.int32)),
    ProbeResult(np.array([-0.5, -1e-30, -np.inf], np.float32)),
    BatchReady(BATCH),
    BatchReady(ROUTED),
    BatchReady(Batch(0, ())),
    ScoreGroups(RECORDED),
    GroupsScored(PolicyVersion(2, 18), np.array([0.0, -0.5, -1e-30], np.float32)),
    AbortStep(7),
    StepAborted(7),
    StepDone(
        StepResult(
            step=17,
            version=PolicyVersion(1, 18),
            skipped="non-finite step",
            metrics={"loss": -0.125, "ess/ratio": math.inf},
            trajectories=(TrajectoryResult(3, 0, -0.5, 0.6065, 2.5, 0.25), TrajectoryResult(3, 1, 9.0, 8.0, 0.0, 0.25)),
        )
    ),
    StepDone(StepResult(0, PolicyVersion(1, 1), "", {}, ()), weights_follow=False),
    Checkpoint(20, {"cursor": 12, "open": [1, 2], "nested": {"a": None, "b": [True, 0.5, "x"]}}),
    CheckpointDone(20, 1.75),
    Stop("done"),
    Error("learner rank 1", "out of memory: 3 GiB asked for"),
    Heartbeat("learner rank 0", "waits for a batch (step 3)"),
    OpenGroup("vcpo-1", 3),
    GroupOpened("vcpo-1", "10.0.0.1", 4711, "gloo"),
    SendWeights("vcpo-1", PolicyVersion(2, 7)),
    WeightsBucket("vcpo-1", 2, b"first\x00bucket" + b"\xff" * 100_000),
    WeightsBucket("vcpo-1", 3, b""),
    BucketTaken("vcpo-1", 2),
    WeightsSent("vcpo-1", PolicyVersion(2, 7), {"a.weight": "00ff"}),
    StopSending("server 1 refused"),
    SendingFailed("g-1", "connection reset"),
    ReleaseWeights(PolicyVersion(2, 6)),
]


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, dtype and order, arrays and tuples included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)
