"""Messages as frames: a msgpack header, then raw little-endian buffers (arrays, bytes); no torch."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import islice
from typing import Any

import msgpack
import numpy as np

from ..run.text import ESCAPED
from ..types import Batch, Group, PolicyVersion, StepResult, TrajectoryResult
from ..types.codec import pack_array, pack_trajectories, unpack_array, unpack_trajectories
from .messages import ControlError, Message

_KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}


def _pack_batch(batch: Batch, buffers: list[Any]) -> dict[str, Any]:
    members = [trajectory for group in batch.groups for trajectory in group.trajectories]
    return {
        "step": batch.step,
        "groups": [[group.group_id, group.prompt_id, len(group.trajectories)] for group in batch.groups],
        "trajectories": pack_trajectories(members, buffers),
    }


def _unpack_batch(packed: dict[str, Any], buffers: list[Any]) -> Batch:
    members = iter(unpack_trajectories(packed["trajectories"], buffers))
    groups = (Group(group_id, prompt, tuple(islice(members, size))) for group_id, prompt, size in packed["groups"])
    return Batch(packed["step"], tuple(groups))


def _pack_value(value: Any, buffers: list[Any]) -> Any:
    match value:
        case PolicyVersion():
            return str(value)
        case np.ndarray():
            return pack_array(value, buffers)
        case Batch():
            return _pack_batch(value, buffers)
        case StepResult():
            results = [list(asdict(result).values()) for result in value.trajectories]
            return [value.step, str(value.version), value.skipped, dict(value.metrics), results]
        case bytes():
            buffers.append(value)
            return len(buffers) - 1
        case _:
            return value


def _unpack_value(kind: str, value: Any, frames: list[Any]) -> Any:
    match kind:
        case "PolicyVersion":
            return PolicyVersion.parse(value)
        case "np.ndarray":
            return unpack_array(value, frames)
        case "Batch":
            return _unpack_batch(value, frames)
        case "StepResult":
            step, version, skipped, metrics, results = value
            trajectories = tuple(TrajectoryResult(*result) for result in results)
            return StepResult(step, PolicyVersion.parse(version), skipped, metrics, trajectories)
        case "bytes":
            return bytes(frames[value])
        case _:
            return value


def encode(message: Message) -> list[Any]:
    """Frames of one message: header first."""
    buffers: list[Any] = []
    body = {f.name: _pack_value(getattr(message, f.name), buffers) for f in fields(message)}
    return [msgpack.packb({"kind": type(message).__name__, "body": body}, unicode_errors=ESCAPED), *buffers]


def decode(frames: list[Any]) -> Message:
    """Inverse of ``encode``; ControlError when the frames are no known message."""
    try:
        header = msgpack.unpackb(bytes(frames[0]), strict_map_key=False)
        kind = _KINDS[header["kind"]]
        values = {f.name: _unpack_value(str(f.type), header["body"][f.name], frames[1:]) for f in fields(kind)}
        return kind(**values)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ControlError(f"malformed control message ({type(error).__name__}: {error})") from error
