"""Buckets as text, as SGLang reads them."""

from __future__ import annotations

import base64
import pickle

import pytest
import torch

from vcpo_megatron.weight_sync.tensor.serialized import serialize_bucket


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 1000, (3 << 20) // 4 + 1, 5 << 20])
def test_a_bucket_is_base64_of_a_pickled_list(size: int) -> None:
    tensors = [("a", torch.arange(size, dtype=torch.float32)), ("b", torch.ones(3, dtype=torch.bfloat16))]
    text = serialize_bucket(tensors)
    found = pickle.loads(base64.b64decode(text, validate=True))
    assert [name for name, _ in found] == ["a", "b"]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, tensors, strict=True))


def test_a_part_of_a_tensor_does_not_carry_the_whole() -> None:
    whole = torch.arange(300_000, dtype=torch.float32).reshape(3, 100_000)
    text = serialize_bucket([("row", whole[1]), ("column", whole[:, 7])])
    assert len(text) < 2 * whole[1].nbytes
    found = dict(pickle.loads(base64.b64decode(text)))
    assert torch.equal(found["row"], whole[1]) and found["column"].tolist() == [7.0, 100_007.0, 200_007.0]
