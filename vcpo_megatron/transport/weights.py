"""Tensors on their way to a rollout server: cut into buckets, and serialized as SGLang takes them over HTTP."""

from __future__ import annotations

import base64
import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping

import torch

from .groups import dtype_name


def serialize_bucket(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """base64 of a pickled [(name, CPU tensor)]: one element of ``serialized_named_tensors``."""
    owned = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in tensors]
    return base64.b64encode(pickle.dumps(owned))


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int
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


def plan_buckets(outline: Mapping[str, tuple[tuple[int, ...], torch.dtype]], limit: int) -> list[list[list[object]]]:
    """How ``buckets`` will cut tensors of these shapes and dtypes: [name, dtype, shape] of each tensor of each bucket.

    A tensor must begin at a multiple of its size: another dtype begins another bucket.
    """
    plan: list[list[list[object]]] = []
    for dtype, run in itertools.groupby(outline.items(), key=lambda item: item[1][1]):
        blanks = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, (shape, _) in run)
        for bucket in buckets(blanks, limit):
            plan.append([[name, dtype_name(dtype), list(tensor.shape)] for name, tensor in bucket])
    return plan
