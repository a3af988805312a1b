"""Messages as frames: a msgpack header, then raw little-endian buffers (arrays, bytes); no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack
import numpy as np

from ..types import Batch, Group, PolicyVersion, StepResult, Trajectory, TrajectoryResult, Turn, VersionSpan
from .messages import ControlError, Message

_KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}


@dataclass
class _Buffers:
    frames: list[Any] = field(default_factory=list)

    def put(self, value: Any) -> int:
        self.frames.append(value)
        return len(self.frames) - 1


def _pack_array(array: np.ndarray, buffers: _Buffers) -> list[Any]:
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return [buffers.put(little.tobytes()), little.dtype.str, list(little.shape)]


def _unpack_array(packed: list[Any], frames: list[Any]) -> np.ndarray:
    index, dtype, shape = packed
    array = np.frombuffer(frames[index], dtype=dtype).reshape(shape)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _pack_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "sample": trajectory.sample_index,
        "prompt_length": trajectory.prompt_length,
        "length": len(trajectory.tokens),
        "turns": [
            [turn.start, turn.end, turn.finish_reason, [[s.start, s.end, str(s.version)] for s in turn.spans]]
            for turn in trajectory.turns
        ],
        "reward": trajectory.reward,
        "info": dict(trajectory.info),
        "routed": trajectory.routed_experts is not None,
    }


def _pack_batch(batch: Batch, buffers: _Buffers) -> dict[str, Any]:
    """Per-token arrays of all trajectories go as concatenated buffers, one a kind."""
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    routed = [t.routed_experts for t in trajectories if t.routed_experts is not None]

    def joined(name: str, dtype: Any) -> list[Any]:
        arrays = [getattr(trajectory, name) for trajectory in trajectories]
        return _pack_array(np.concatenate(arrays) if arrays else np.zeros(0, dtype), buffers)

    return {
        "step": batch.step,
        "groups": [[g.group_id, g.prompt_id, [_pack_trajectory(t) for t in g.trajectories]] for g in batch.groups],
        "tokens": joined("tokens", np.int32),
        "loss_mask": joined("loss_mask", np.bool_),
        "behavior_logprobs": joined("behavior_logprobs", np.float32),
        "routed_experts": _pack_array(np.concatenate(routed), buffers) if routed else None,
    }


def _unpack_turns(rows: list[Any]) -> tuple[Turn, ...]:
    return tuple(
        Turn(start, end, reason, tuple(VersionSpan(a, b, PolicyVersion.parse(v)) for a, b, v in spans))
        for start, end, reason, spans in rows
    )


def _unpack_batch(packed: dict[str, Any], frames: list[Any]) -> Batch:
    names = ("tokens", "loss_mask", "behavior_logprobs")
    arrays = {name: _unpack_array(packed[name], frames) for name in names}
    experts = None if packed["routed_experts"] is None else _unpack_array(packed["routed_experts"], frames)
    position = routed = 0
    groups = []
    for group_id, prompt_id, rows in packed["groups"]:
        members = []
        for row in rows:
            cut = slice(position, position + row["length"])
            position = cut.stop
            own = None
            if row["routed"]:
                assert experts is not None
                own, routed = experts[routed : routed + row["length"]], routed + row["length"]
            members.append(
                Trajectory(
                    group_id=group_id,
                    sample_index=row["sample"],
                    prompt_id=prompt_id,
                    prompt_length=row["prompt_length"],
                    turns=_unpack_turns(row["turns"]),
                    reward=row["reward"],
                    info=row["info"],
                    routed_experts=own,
                    **{name: arrays[name][cut] for name in names},
                )
            )
        groups.append(Group(group_id, prompt_id, tuple(members)))
    return Batch(packed["step"], tuple(groups))


def _pack_value(value: Any, buffers: _Buffers) -> Any:
    match value:
        case PolicyVersion():
            return str(value)
        case np.ndarray():
            return _pack_array(value, buffers)
        case Batch():
            return _pack_batch(value, buffers)
        case StepResult():
            rows = [list(asdict(row).values()) for row in value.trajectories]
            return [value.step, str(value.version), value.skipped, dict(value.metrics), rows]
        case bytes():
            return buffers.put(value)
        case _:
            return value


def _unpack_value(kind: str, value: Any, frames: list[Any]) -> Any:
    match kind:
        case "PolicyVersion":
            return PolicyVersion.parse(value)
        case "np.ndarray":
            return _unpack_array(value, frames)
        case "Batch":
            return _unpack_batch(value, frames)
        case "StepResult":
            step, version, skipped, metrics, rows = value
            results = tuple(TrajectoryResult(*row) for row in rows)
            return StepResult(step, PolicyVersion.parse(version), skipped, metrics, results)
        case "bytes":
            return bytes(frames[value])
        case _:
            return value


def encode(message: Message) -> list[Any]:
    """Frames of one message: header first."""
    buffers = _Buffers()
    body = {f.name: _pack_value(getattr(message, f.name), buffers) for f in fields(message)}
    return [msgpack.packb({"kind": type(message).__name__, "body": body}), *buffers.frames]


def decode(frames: list[Any]) -> Message:
    """Inverse of ``encode``; ControlError when the frames are no known message."""
    try:
        header = msgpack.unpackb(bytes(frames[0]), strict_map_key=False)
        kind = _KINDS[header["kind"]]
        values = {f.name: _unpack_value(str(f.type), header["body"][f.name], frames[1:]) for f in fields(kind)}
        return kind(**values)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ControlError(f"malformed control message ({type(error).__name__}: {error})") from error
