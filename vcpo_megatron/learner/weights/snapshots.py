"""Copies of this rank's shards on the host, one set a version, so that training goes on while they are sent.

The stall of a step is this copy. Its memory is kept and used again: fresh pages would make the copy twice as slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...models.shape import ModelShape
from ...types import PolicyVersion
from ...weight_sync.plan import Stream
from ..megatron import platform
from ..megatron.parallel import Parallel
from .gather import WeightGatherer


class SnapshotError(RuntimeError):
    """Too many versions are held and none was given back in time."""


class Snapshots:
    """What ``weight_sync.learner`` sends (its ``WeightSource``): the shards that ``gatherer`` takes from this rank.

    ``take`` is the main thread's, the rest the sender's.
    """

    def __init__(self, gatherer: WeightGatherer, parallel: Parallel, shape: ModelShape) -> None:
        self.rank, self.world_size, self.device = parallel.rank, parallel.world_size, platform.device()
        self.shape = shape
        self._gatherer = gatherer
        self._held: dict[PolicyVersion, dict[str, torch.Tensor]] = {}
        self._free: list[dict[str, torch.Tensor]] = []
        self._changed = threading.Condition()

    def outline(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every Hugging Face tensor, in the order of ``stream``."""
        return self._gatherer.outline()

    def take(self, version: PolicyVersion, at_most: int, timeout_s: float, check: Callable[[], None]) -> None:
        """Copy the shards as ``version``; SnapshotError when ``at_most`` older sets are held and none is given back in
        time.

        ``check`` is called while it waits; what it raises ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._held) >= at_most:
                check()
                if time.monotonic() > deadline:
                    held = ", ".join(map(str, self._held))
                    raise SnapshotError(
                        f"the weights of versions {held} are still to be sent after {timeout_s:g} s "
                        "(launch.timeout_s + rollout.sync_timeout_s): the orchestrator did not take them over"
                    )
                self._changed.wait(0.2)
            copies = self._free.pop() if self._free else {}
        for name, tensor in self._gatherer.shards().items():
            if name not in copies:
                copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        with self._changed:
            self._held[version] = copies
            self._changed.notify_all()

    def stream(self, version: PolicyVersion, timeout_s: float, group: dist.ProcessGroup | None) -> Stream:
        """(HF name, CPU tensor) of ``version`` on rank 0, nothing elsewhere: ``WeightGatherer.stream`` over the copies,
        which this rank may still be making; SnapshotError when they do not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._held, timeout_s):
                raise SnapshotError(f"this rank has not copied version {version} within {timeout_s:g} s")
            copies = self._held[version]
        return self._gatherer.stream(lambda name: copies[name], group)

    def release(self, version: PolicyVersion) -> None:
        """Give a set back; nothing when it is not held."""
        with self._changed:
            copies = self._held.pop(version, None)
            if copies is not None:
                self._free.append(copies)
                self._changed.notify_all()
