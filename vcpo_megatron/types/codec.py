"""The one encoding of trajectories, for messages and for the rollout store; no torch.

A msgpack header says what there is, raw little-endian buffers hold the arrays, and the header refers to them by number.
Per-token arrays of several trajectories are concatenated, one buffer a kind; the loss mask takes one bit a token. A
message sends header and buffers as frames (``transport.frames``), the store keeps them as one blob (``to_blob``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from .records import LearnerRecord, PolicyVersion, Trajectory, Turn, VersionSpan

#: Of the header of a blob, before it.
_LENGTH = struct.Struct("<I")


def pack_array(array: np.ndarray, buffers: list[Any]) -> list[Any]:
    """What a header holds of ``array``: number of its buffer, which is appended, dtype and shape."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    buffers.append(little.tobytes())
    return [len(buffers) - 1, little.dtype.str, list(little.shape)]


def unpack_array(packed: Sequence[Any], buffers: Sequence[Any]) -> np.ndarray:
    """Inverse of ``pack_array``; the array shares the memory of its buffer."""
    index, dtype, shape = packed
    array = np.frombuffer(buffers[index], dtype=dtype).reshape(shape)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def pack_trajectories(trajectories: Sequence[Trajectory], buffers: list[Any], *, extras: bool = True) -> list[Any]:
    """What a header holds of ``trajectories``, in their order; ``extras``: with what the store keeps apart, the experts
    that their tokens went to and the learner's own log-probs."""
    routed = [t.routed_experts for t in trajectories if t.routed_experts is not None] if extras else []
    recorded = [t.recorded.logprobs for t in trajectories if t.recorded is not None] if extras else []

    def joined(name: str, dtype: Any) -> np.ndarray:
        arrays = [getattr(trajectory, name) for trajectory in trajectories]
        return np.concatenate(arrays) if arrays else np.zeros(0, dtype)

    return [  # without names: a short trajectory would be half names
        [_head(t, extras) for t in trajectories],
        pack_array(joined("tokens", np.int32), buffers),
        pack_array(np.packbits(joined("loss_mask", np.bool_)), buffers),
        pack_array(joined("behavior_logprobs", np.float32), buffers),
        pack_array(np.concatenate(routed), buffers) if routed else None,
        pack_array(np.concatenate(recorded), buffers) if recorded else None,
    ]


def unpack_trajectories(packed: Sequence[Any], buffers: Sequence[Any]) -> list[Trajectory]:
    """Inverse of ``pack_trajectories``."""
    heads, *arrays = packed
    tokens, bits, logprobs, experts, recorded = (
        None if array is None else unpack_array(array, buffers) for array in arrays
    )
    assert tokens is not None and bits is not None and logprobs is not None
    mask = np.unpackbits(bits, count=len(tokens)).view(np.bool_)
    position = routed = scored = 0
    found = []
    for group_id, sample_index, prompt_id, prompt_length, length, turns, reward, info, is_routed, version in heads:
        cut = slice(position, position + length)
        position = cut.stop
        own, learner = None, None
        if is_routed:
            assert experts is not None
            own, routed = experts[routed : routed + length], routed + length
        if version is not None:
            assert recorded is not None
            learner = LearnerRecord(PolicyVersion(*version), recorded[scored : scored + length])
            scored += length
        found.append(
            Trajectory(
                group_id=group_id,
                sample_index=sample_index,
                prompt_id=prompt_id,
                prompt_length=prompt_length,
                tokens=tokens[cut],
                loss_mask=mask[cut],
                behavior_logprobs=logprobs[cut],
                turns=tuple(Turn(start, end, reason, unpack_spans(spans)) for start, end, reason, spans in turns),
                reward=reward,
                info=info,
                routed_experts=own,
                recorded=learner,
            )
        )
    return found


def _head(trajectory: Trajectory, extras: bool) -> list[Any]:
    """Everything of one trajectory but its arrays; whether it has those that are ``extras``."""
    recorded = trajectory.recorded if extras else None
    return [
        trajectory.group_id,
        trajectory.sample_index,
        trajectory.prompt_id,
        trajectory.prompt_length,
        len(trajectory.tokens),
        [[turn.start, turn.end, turn.finish_reason, pack_spans(turn.spans)] for turn in trajectory.turns],
        float(trajectory.reward),
        {name: float(value) for name, value in trajectory.info.items()},
        extras and trajectory.routed_experts is not None,
        None if recorded is None else list(recorded.version),
    ]


def pack_spans(spans: Sequence[VersionSpan]) -> list[list[Any]]:
    """[start, end, attempt, number, run] of each span."""
    return [[span.start, span.end, *span.version] for span in spans]


def unpack_spans(packed: Sequence[Sequence[Any]]) -> tuple[VersionSpan, ...]:
    """Inverse of ``pack_spans``."""
    return tuple(VersionSpan(start, end, PolicyVersion(*version)) for start, end, *version in packed)


def to_blob(header: Any, buffers: Sequence[Any]) -> bytes:
    """Header and buffers as one string of bytes."""
    # A lone surrogate, in a name that an environment gave, is no UTF-8: it is written as Python escapes it.
    head = msgpack.packb([[len(buffer) for buffer in buffers], header], unicode_errors="backslashreplace")
    return b"".join([_LENGTH.pack(len(head)), head, *buffers])


def from_blob(blob: bytes) -> tuple[Any, list[memoryview]]:
    """Inverse of ``to_blob``: header and buffers, whose memory may be written (torch wants it so) and is no one else's.

    The blob has to be whole: whoever keeps it keeps a checksum.
    """
    data = memoryview(bytearray(blob))
    position = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    lengths, header = msgpack.unpackb(data[_LENGTH.size : position], strict_map_key=False)
    buffers = []
    for length in lengths:
        buffers.append(data[position : position + length])
        position += length
    return header, buffers
