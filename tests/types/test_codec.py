"""One encoding of trajectories: every bit comes back, from frames and from a blob."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.transport.samples import BATCH, RECORDED, ROUTED, same
from vcpo_megatron.types import PolicyVersion, Trajectory, VersionSpan
from vcpo_megatron.types.codec import (
    from_blob,
    pack_array,
    pack_spans,
    pack_trajectories,
    to_blob,
    unpack_array,
    unpack_spans,
    unpack_trajectories,
)

MEMBERS = [
    trajectory for batch in (BATCH, ROUTED, RECORDED) for group in batch.groups for trajectory in group.trajectories
]


def through_blob(members: list[Trajectory], **how: Any) -> list[Trajectory]:
    buffers: list[Any] = []
    header = pack_trajectories(members, buffers, **how)
    return unpack_trajectories(*from_blob(to_blob(header, buffers)))


@pytest.mark.parametrize("members", [[], MEMBERS[:1], MEMBERS], ids=len)
def test_trajectories_come_back_bit_for_bit(members: list[Trajectory]) -> None:
    assert same(through_blob(members), members)


def test_experts_and_the_learners_logprobs_may_be_kept_elsewhere() -> None:
    bare = [replace(member, routed_experts=None, recorded=None) for member in MEMBERS]
    assert same(through_blob(MEMBERS, extras=False), bare)


def test_what_was_read_from_a_blob_may_be_written() -> None:
    """torch.from_numpy warns about arrays that are not."""
    (first, *_) = through_blob(MEMBERS)
    for array in (first.tokens, first.loss_mask, first.behavior_logprobs):
        assert array.flags.writeable


@pytest.mark.parametrize("dtype", [">i4", "<f8", "u1", "?"])
@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3, 2)])
def test_arrays_travel_little_endian(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    buffers: list[Any] = []
    packed = msgpack.unpackb(msgpack.packb(pack_array(array[::-1], buffers)))
    assert bytes(buffers[0]) == array[::-1].astype(array.dtype.newbyteorder("<")).tobytes()
    found = unpack_array(packed, buffers)
    assert found.dtype == array.dtype.newbyteorder("=") and np.array_equal(found, array[::-1])


def test_spans() -> None:
    spans = (VersionSpan(0, 2, PolicyVersion(1, 40)), VersionSpan(2, 3, PolicyVersion(2, 41, "3f9a21c0")))
    assert (
        pack_spans(spans) == [[0, 2, 1, 40, ""], [2, 3, 2, 41, "3f9a21c0"]] and unpack_spans(pack_spans(spans)) == spans
    )


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import vcpo_megatron.types.codec"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
