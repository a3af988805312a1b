"""How a trajectory is written to a row of ``samples`` and read back, with a checksum over all of it."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...types import PolicyVersion, Trajectory, Turn, VersionSpan
from .schema import StoreError

COLUMNS = (
    "group_id",
    "sample_index",
    "prompt_length",
    "tokens",
    "loss_mask",
    "behavior_logprobs",
    "turns",
    "reward",
    "info",
    "checksum",
)

#: Of one token in the column ``tokens``.
TOKEN_BYTES = 4

ROUTING_COLUMNS = ("group_id", "sample_index", "bytes_each", "layers", "top_k", "experts", "checksum")


def problem_of(trajectory: Trajectory) -> str | None:
    """Why ``trajectory`` cannot be trained on, and so is not stored; None when it can."""
    if not trajectory.versions or not trajectory.num_sampled:
        return "holds no sampled token"
    if not math.isfinite(trajectory.reward):
        return f"has reward {trajectory.reward}"
    if not np.isfinite(trajectory.behavior_logprobs).all():
        return "holds a log-prob that is not finite"
    for name, value in trajectory.info.items():
        if not isinstance(value, int | float | np.number):
            return f"has info {name} = {value!r}, which is no number"
    return None


def to_row(trajectory: Trajectory) -> tuple[Any, ...]:
    """Values of ``COLUMNS``: arrays as little-endian int32 and float32, the mask one bit a token."""
    turns = [
        [turn.start, turn.end, turn.finish_reason, [[s.start, s.end, str(s.version)] for s in turn.spans]]
        for turn in trajectory.turns
    ]
    values = (
        trajectory.group_id,
        trajectory.sample_index,
        trajectory.prompt_length,
        trajectory.tokens.astype(f"<i{TOKEN_BYTES}").tobytes(),
        np.packbits(trajectory.loss_mask).tobytes(),
        trajectory.behavior_logprobs.astype("<f4").tobytes(),
        json.dumps(turns, separators=(",", ":")),
        float(trajectory.reward),
        json.dumps({key: float(value) for key, value in trajectory.info.items()}, separators=(",", ":")),
    )
    return (*values, _checksum(values))


def from_row(row: Mapping[str, Any] | Any, prompt_id: str, where: str, experts: np.ndarray | None = None) -> Trajectory:
    """Inverse of ``to_row``, with the ``experts`` that were kept beside it; StoreError naming the trajectory and
    ``where`` when a bit has changed."""
    values = tuple(row[name] for name in COLUMNS[:-1])
    if _checksum(values) != row["checksum"]:
        raise StoreError(
            f"trajectory {values[0]}/{values[1]} in {where} is damaged: its checksum does not match; "
            "restore the file from a copy or start a new run"
        )
    group_id, sample_index, prompt_length, tokens, mask, logprobs, turns, reward, info = values
    ids = np.frombuffer(tokens, f"<i{TOKEN_BYTES}").astype(np.int32)
    return Trajectory(
        group_id=group_id,
        sample_index=sample_index,
        prompt_id=prompt_id,
        prompt_length=prompt_length,
        tokens=ids,
        loss_mask=np.unpackbits(np.frombuffer(mask, np.uint8), count=len(ids)).astype(np.bool_),
        behavior_logprobs=np.frombuffer(logprobs, "<f4").astype(np.float32),
        turns=tuple(
            Turn(start, end, reason, tuple(VersionSpan(a, b, PolicyVersion.parse(v)) for a, b, v in spans))
            for start, end, reason, spans in json.loads(turns)
        ),
        reward=reward,
        info=json.loads(info),
        routed_experts=experts,
    )


def routing_row(trajectory: Trajectory) -> tuple[Any, ...] | None:
    """Values of ``ROUTING_COLUMNS``, little-endian; None where no experts were recorded."""
    experts = trajectory.routed_experts
    if experts is None:
        return None
    _, layers, top_k = experts.shape
    data = experts.astype(experts.dtype.newbyteorder("<"), copy=False).tobytes()
    values = (trajectory.group_id, trajectory.sample_index, experts.dtype.itemsize, layers, top_k, data)
    return (*values, _checksum(values))


def experts_of(row: Mapping[str, Any] | Any, where: str) -> np.ndarray:
    """Inverse of ``routing_row``; StoreError naming the trajectory and ``where`` when a bit has changed."""
    values = tuple(row[name] for name in ROUTING_COLUMNS[:-1])
    if _checksum(values) != row["checksum"]:
        raise StoreError(
            f"routed experts of trajectory {values[0]}/{values[1]} in {where} are damaged: their checksum does not "
            "match; restore the file from a copy or start a new run"
        )
    bytes_each, layers, top_k, data = values[2:]
    experts = np.frombuffer(data, f"<u{bytes_each}").reshape(-1, layers, top_k)
    return experts.astype(experts.dtype.newbyteorder("="), copy=False)


def _checksum(values: tuple[Any, ...]) -> int:
    """CRC-32 over all values, each preceded by its length so that no two rows share a byte string."""
    crc = 0
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), crc))
    return crc
