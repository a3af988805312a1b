"""Tensors on their way to a rollout server: buckets as SGLang's ``update_weights_from_tensor`` takes them."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator

import torch

#: Bytes of tensors in one bucket, unless a single tensor is larger.
BUCKET_BYTES = 256 << 20


def serialize_bucket(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """base64 of a pickled [(name, CPU tensor)]: one element of ``serialized_named_tensors``."""
    owned = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in tensors]
    return base64.b64encode(pickle.dumps(owned))


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Cut a stream of named tensors into runs of at most ``limit`` bytes (a larger tensor goes alone)."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
