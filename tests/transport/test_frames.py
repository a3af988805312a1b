"""Messages keep every value and type as frames."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.transport.samples import BATCH, MESSAGES, same
from vcpo_megatron.transport import messages
from vcpo_megatron.transport.frames import decode, encode
from vcpo_megatron.transport.messages import (
    BatchReady,
    ControlError,
    Probe,
    StepDone,
)
from vcpo_megatron.types import (
    PolicyVersion,
    StepResult,
    TrajectoryResult,
)


def test_same_tells_apart() -> None:
    """The comparison that the tests below rest on."""
    assert same(np.float32([0.0]), np.float32([0.0])) and not same(np.float32([0.0]), np.float32([-0.0]))
    assert not same(np.zeros(2, np.int32), np.zeros(2, np.int64)) and not same((1,), [1])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip_through_bytes(message: Any) -> None:
    frames = [bytes(frame) for frame in encode(message)]
    assert same(decode(frames), message)


def test_every_kind_of_message_is_tested() -> None:
    assert {type(message) for message in MESSAGES} == set(messages.Message.__args__)


def test_nan_survives() -> None:
    result = TrajectoryResult(1, 0, math.nan, 1.0, math.nan, 0.0)
    message = StepDone(StepResult(0, PolicyVersion(1, 1), "", {"loss": math.nan}, (result,)))
    got = decode(encode(message)).result  # type: ignore[union-attr]
    assert math.isnan(got.metrics["loss"]) and math.isnan(got.trajectories[0].log_ratio)
    assert math.isnan(got.trajectories[0].grad_norm) and got.trajectories[0].weight == 1.0


def test_arrays_travel_as_raw_little_endian_buffers() -> None:
    header, buffer = encode(Probe(np.array([1, 258], ">i4")))
    assert bytes(buffer) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert msgpack.unpackb(header)["kind"] == "Probe"
    _, *buffers = encode(BatchReady(BATCH))
    assert [len(bytes(frame)) for frame in buffers] == [12 * 4, 2, 12 * 4]  # the mask takes one bit a token
    assert bytes(buffers[0])[:8] == b"\x01\x00\x00\x00\x02\x00\x00\x00"


def test_non_contiguous_arrays() -> None:
    tokens = np.arange(10, dtype=np.int32)[::3]
    assert decode(encode(Probe(tokens))).tokens.tolist() == [0, 3, 6, 9]  # type: ignore[union-attr]


def test_unknown_message_is_named() -> None:
    with pytest.raises(ControlError, match="'Launch'"):
        decode([msgpack.packb({"kind": "Launch", "body": {}})])
