"""Rank 0's side of ``rollout.sync`` = "tensor": buckets as text to the orchestrator, which forwards them.

A bucket is serialized while the one before is forwarded, so that two exist at a time however large the model is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...transport.messages import Message, WeightsBucket
from ..plan import Stream, next_bucket
from .serialized import serialize_bucket

#: Buckets that the orchestrator has not taken yet.
_ON_THEIR_WAY = 2
#: Seconds of one look for the orchestrator's messages.
_LOOK_S = 0.5


class NotTaken(RuntimeError):
    """The orchestrator took no bucket in time."""


class TextSender:
    """``plan`` as in GroupSender. ``send`` carries a message to the orchestrator, ``poll(seconds)`` looks for its
    messages, which may call ``taken``; what it raises ends the wait."""

    def __init__(
        self, plan: list[Any], timeout_s: float, send: Callable[[Message], None], poll: Callable[[float], None]
    ) -> None:
        self.plan, self._timeout_s, self._send, self._poll = plan, timeout_s, send, poll
        self._name = ""
        self._open: set[int] = set()

    def send(self, name: str, stream: Stream) -> None:
        """Every bucket of ``stream`` for the request ``name``. NotTaken when the orchestrator is silent; what ``poll``
        raises goes through."""
        self._name, self._open = name, set()
        for number, entries in enumerate(self.plan):
            self._wait_until_fewer_than(_ON_THEIR_WAY)
            bucket = serialize_bucket(list(next_bucket(stream, entries)))
            self._open.add(number)
            self._send(WeightsBucket(name, number, bucket))
            del bucket  # else it would outlive its being taken
        self._wait_until_fewer_than(1)

    def taken(self, name: str, number: int) -> None:
        """The orchestrator says so; of a request that was given up it is too late."""
        if name == self._name:
            self._open.discard(number)

    def _wait_until_fewer_than(self, count: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while len(self._open) >= count:
            if time.monotonic() > deadline:
                raise NotTaken(
                    f"the orchestrator took no bucket of weights for {self._timeout_s:g} s (rollout.sync_timeout_s)"
                )
            self._poll(_LOOK_S)
