"""The learner's end of ``rollout.sync`` = "distributed": buckets into the broadcaster's memory, and away.

The first thing that goes through a group is the number that it is tried with (``TRIAL``); what it is does not matter.
After a failure, or when the orchestrator closes the groups, a broadcaster that is in any is killed: its servers see
their connections close. The next ``open_group`` starts another one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...rollout.client.protocol import TRIAL
from ...transport.messages import GroupOpened, WeightsReady
from ...types import PolicyVersion
from ..plan import Stream, next_bucket
from ..sender import Sender
from ..wire import flat_size
from .broadcaster import Broadcaster


class DistributedSender(Sender):
    """``plan`` as in WeightsReady. ``address`` is where servers find this host. ``poll`` is called while it waits; what
    it raises ends the wait."""

    def __init__(
        self, plan: list[Any], backend: str, timeout_s: float, log: Path, poll: Callable[[], None], address: str
    ) -> None:
        self._address = address
        self._plan, self._backend, self._timeout_s, self._log, self._poll = plan, backend, timeout_s, log, poll
        self._broadcaster: Broadcaster | None = None

    def start(self) -> None:
        """Start the broadcaster ahead of the first group."""
        if self._broadcaster is None:
            slot = max(flat_size(entries) for entries in self._plan)
            self._broadcaster = Broadcaster(slot, self._backend, self._timeout_s, self._log)

    def offer(self, version: PolicyVersion, open_stream: object) -> WeightsReady:
        return WeightsReady(version, "distributed", self._plan)

    def open_group(self, name: str, world_size: int) -> GroupOpened:
        self.start()
        assert self._broadcaster is not None
        port = self._broadcaster.open(name, world_size, self._poll)
        self._broadcaster.broadcast(name, 0, flat_size(TRIAL))  # before the first bucket, in the slot of that one
        return GroupOpened(name, self._address, port, self._backend)

    def send(self, name: str, stream: Stream) -> None:
        if self._broadcaster is None:  # closed since this was asked for
            return
        for number, entries in enumerate(self._plan):
            slot, at = self._broadcaster.slot(number, self._poll), 0
            for _, tensor in next_bucket(stream, entries):
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                slot[at : at + flat.numel()].copy_(flat)
                at += flat.numel()
            self._broadcaster.broadcast(name, number, at)
        self._broadcaster.finish(self._poll)

    def abort(self) -> None:
        """End every group, also in the middle of a broadcast. A broadcaster that starts is in none, and is kept: if it
        takes longer than an update may wait for it, none would ever be there."""
        if self._broadcaster is not None and not self._broadcaster.starting:
            self.kill()

    def kill(self) -> None:
        """End the broadcaster, and every group with it."""
        if self._broadcaster is not None:
            self._broadcaster.kill()
            self._broadcaster = None
