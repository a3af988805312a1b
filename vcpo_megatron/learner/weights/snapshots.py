"""Copies of this rank's shards on the host, one set a version, so that training goes on while they are sent.

The stall of a step is this copy. Its memory is kept and used again: fresh pages would make the copy twice as slow. How
many sets there are is the transport's (``weight_sync.sender``): one, or two and one more where evaluations run beside
training. Of these two are pinned, where there is a GPU: a version that is held for an evaluation is not copied often.
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

#: Sets of page-locked memory, which the machine has little of and can move nowhere else.
PINNED_SETS = 2


class _Copies:
    """One set: the copies by Megatron name, made when they are first asked for."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.tensors: dict[str, torch.Tensor] = {}

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Where ``tensor`` is copied to."""
        if name not in self.tensors:
            pinned = self.pinned and tensor.is_cuda
            self.tensors[name] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        return self.tensors[name]


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
        self._held: dict[PolicyVersion, _Copies] = {}
        self._free: list[_Copies] = []
        self._made = 0
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
            copies = self._next_free()
        for name, tensor in self._gatherer.shards().items():
            copies.of(name, tensor).copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        with self._changed:
            self._held[version] = copies
            self._changed.notify_all()

    def _next_free(self) -> _Copies:
        """A set that holds no version, a pinned one where there is any."""
        if not self._free:
            self._made += 1
            return _Copies(pinned=self._made <= PINNED_SETS)
        self._free.sort(key=lambda copies: copies.pinned)
        return self._free.pop()

    def stream(self, version: PolicyVersion, timeout_s: float, group: dist.ProcessGroup | None) -> Stream:
        """(HF name, CPU tensor) of ``version`` on rank 0, nothing elsewhere: ``WeightGatherer.stream`` over the copies,
        which this rank may still be making; SnapshotError when they do not come."""
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._held, timeout_s):
                raise SnapshotError(f"this rank has not copied version {version} within {timeout_s:g} s")
            copies = self._held[version]
        return self._gatherer.stream(lambda name: copies.tensors[name], group)

    def release(self, version: PolicyVersion) -> None:
        """Give a set back; nothing when it is not held."""
        with self._changed:
            copies = self._held.pop(version, None)
            if copies is not None:
                self._free.append(copies)
                self._changed.notify_all()
