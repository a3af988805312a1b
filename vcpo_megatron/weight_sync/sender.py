"""What the learner's end of each transport has in common: ``Sender``. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..transport.messages import GroupOpened, WeightsReady
from ..types import PolicyVersion
from .plan import Stream

if TYPE_CHECKING:
    from .expected_checksums import CheckedStream


class TransferError(RuntimeError):
    """What was asked for could not be sent, and may be asked for again; the message says why."""


class Sender:
    """Rank 0's end of one transport. It raises TransferError, and whatever the look for messages that it makes while it
    waits raises."""

    #: Versions held in memory: the newest, and beside it the one that is sent, or the next one while it is copied. One
    #: that an evaluation holds comes on top.
    held = 2
    #: Whether a version need not be held once the orchestrator knows of it.
    stored = False

    def start(self) -> None:
        """Make ready what the first version needs."""

    def offer(self, version: PolicyVersion, open_stream: Callable[[], CheckedStream]) -> WeightsReady:
        """Make it so that ``version`` can be had."""
        raise NotImplementedError

    def open_group(self, name: str, world_size: int) -> GroupOpened:
        """Begin to wait for the servers of group ``name``."""
        raise TransferError(f"group {name} was asked for, and this transport has none")

    def send(self, name: str, stream: Stream) -> None:
        """Every bucket of ``stream`` for the request, or to the group, ``name``."""
        raise TransferError(f"weights were asked for as {name}, and this transport sends none")

    def on_taken(self, name: str, number: int) -> None:
        """The orchestrator has taken bucket ``number`` of request ``name``."""

    def abort(self) -> None:
        """End what was given up, and every group."""

    def kill(self) -> None:
        """End everything that was started."""
