"""Copies of this rank's shards on the host, one set a version, so that training goes on while they are sent.

The stall of a step is this copy. Its memory is kept and used again: fresh pages would make the copy twice as slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from ...types import PolicyVersion


class SnapshotError(RuntimeError):
    """Too many versions are held and none was given back in time."""


class Snapshots:
    """At most ``limit`` sets of copies of ``shards()``. ``take`` is the main thread's, the rest the sender's."""

    def __init__(self, shards: Callable[[], Mapping[str, torch.Tensor]], limit: int) -> None:
        self._shards = shards
        self._limit = limit
        self._held: dict[PolicyVersion, dict[str, torch.Tensor]] = {}
        self._free: list[dict[str, torch.Tensor]] = []
        self._changed = threading.Condition()

    def take(self, version: PolicyVersion, timeout_s: float, check: Callable[[], None]) -> None:
        """Copy the shards as ``version``; SnapshotError when no older set is given back in time.

        ``check`` is called while it waits; what it raises ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._held) >= self._limit:
                check()
                if time.monotonic() > deadline:
                    held = ", ".join(map(str, self._held))
                    raise SnapshotError(
                        f"the weights of versions {held} are still to be sent after {timeout_s:g} s "
                        "(launch.timeout_s + rollout.sync_timeout_s): the orchestrator did not take them over"
                    )
                self._changed.wait(0.2)
            copies = self._free.pop() if self._free else {}
        for name, tensor in self._shards().items():
            if name not in copies:
                copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        with self._changed:
            self._held[version] = copies
            self._changed.notify_all()

    def get(self, version: PolicyVersion, timeout_s: float) -> Mapping[str, torch.Tensor]:
        """The copies of ``version``, which this rank may still be making; SnapshotError when they do not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._held, timeout_s):
                raise SnapshotError(f"this rank has not copied version {version} within {timeout_s:g} s")
            return self._held[version]

    def release(self, version: PolicyVersion) -> None:
        """Give a set back; nothing when it is not held."""
        with self._changed:
            copies = self._held.pop(version, None)
            if copies is not None:
                self._free.append(copies)
                self._changed.notify_all()
