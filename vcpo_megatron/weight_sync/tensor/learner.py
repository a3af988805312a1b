"""The learner's end of ``rollout.sync`` = "tensor": serialized buckets to the orchestrator, which forwards them.

A bucket is serialized while the one before is forwarded, so that two exist at a time however large the model is.
"""

from __future__ import annotations

import binascii
import io
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...transport.messages import Message, WeightsBucket, WeightsReady
from ...types import PolicyVersion
from ..plan import Stream, next_bucket
from ..sender import Sender, TransferError

#: Buckets that the orchestrator has not taken yet.
_IN_FLIGHT = 2
#: Seconds of one look for the orchestrator's messages.
_LOOK_S = 0.5
#: Bytes of base64 that are made at a time: text of whole triples has no padding inside.
_TRIPLES = 3 << 20


class TensorSender(Sender):
    """``plan`` as in WeightsReady. ``send_message`` carries a message to the orchestrator, ``poll(seconds)`` looks for
    its messages, which may call ``on_taken``; what it raises ends the wait. TransferError when no bucket is taken for
    ``timeout_s`` seconds."""

    def __init__(
        self, plan: list[Any], timeout_s: float, send_message: Callable[[Message], None], poll: Callable[[float], None]
    ) -> None:
        self._plan, self._timeout_s, self._send_message, self._poll = plan, timeout_s, send_message, poll
        self._name = ""
        self._open: set[int] = set()

    def offer(self, version: PolicyVersion, open_stream: object) -> WeightsReady:
        return WeightsReady(version, "tensor", self._plan)

    def send(self, name: str, stream: Stream) -> None:
        self._name, self._open = name, set()
        for number, entries in enumerate(self._plan):
            self._wait_until_fewer_than(_IN_FLIGHT)
            bucket = serialize_bucket(list(next_bucket(stream, entries)))
            self._open.add(number)
            self._send_message(WeightsBucket(name, number, bucket))
            del bucket  # else it would outlive its being taken
        self._wait_until_fewer_than(1)

    def on_taken(self, name: str, number: int) -> None:
        if name == self._name:  # else it is of a request that was given up
            self._open.discard(number)

    def _wait_until_fewer_than(self, count: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while len(self._open) >= count:
            if time.monotonic() > deadline:
                raise TransferError(
                    f"the orchestrator took no bucket of weights for {self._timeout_s:g} s (rollout.sync_timeout_s)"
                )
            self._poll(_LOOK_S)


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
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.contiguous().clone()
