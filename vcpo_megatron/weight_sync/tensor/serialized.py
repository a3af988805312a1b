"""Tensors on their way to a rollout server: cut into buckets, and serialized as SGLang takes them over HTTP."""

from __future__ import annotations

import binascii
import io
import pickle
from collections.abc import Sequence

import torch

#: Bytes of base64 that are made at a time: text of whole triples has no padding inside.
_TRIPLES = 3 << 20


class _Base64(io.RawIOBase):
    """Writes what it is given as base64 text, so that the bytes themselves are never held as one."""

    def __init__(self) -> None:
        self._text, self._rest = io.BytesIO(), b""

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if self._rest:
            head = min(len(view), 3 - len(self._rest))
            self._rest += bytes(view[:head])
            if len(self._rest) < 3:
                return len(view)
            self._text.write(binascii.b2a_base64(self._rest, newline=False))
        else:
            head = 0
        whole = len(view) - (len(view) - head) % 3
        for at in range(head, whole, _TRIPLES):
            self._text.write(binascii.b2a_base64(view[at : min(at + _TRIPLES, whole)], newline=False))
        self._rest = bytes(view[whole:])
        return len(view)

    def text(self) -> bytes:
        self._text.write(binascii.b2a_base64(self._rest, newline=False))
        return self._text.getvalue()


def serialize_bucket(tensors: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    """base64 of a pickled [(name, CPU tensor)]: one element of ``serialized_named_tensors``."""
    sink = _Base64()
    pickle.Pickler(sink).dump([(name, _whole(tensor.detach().cpu())) for name, tensor in tensors])
    return sink.text()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in a storage that holds nothing else: pickle writes the storage."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.contiguous().clone()
