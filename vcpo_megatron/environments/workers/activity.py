"""What a worker is doing at this moment, in a page of memory that its parent reads: also when the worker computes
without an end, and after it has died.

The worker writes before it enters a user's code and after it has left it, and the time every half second while its
event loop turns. Times are of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

#: Phases of a job, in the order of their numbers in the page.
PHASES = ("", "the factory", "train_example", "heldout", "episode", "reset", "reference", "decode", "step", "close")
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}

_TICK = struct.Struct("<d")
_CALL = struct.Struct("<QQd")
_CALL_AT = 8
_NOTHING = _CALL.pack(0, 0, 0.0)


@dataclass(frozen=True)
class Doing:
    """``tick``: when the event loop turned last. ``job`` is in ``phase`` and may stay until ``deadline``; 0: no code of
    a user is known to run."""

    tick: float
    job: int
    phase: str
    deadline: float


class Activity:
    """The page. The worker has one end, its parent the other."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.tick()

    @classmethod
    def create(cls) -> tuple[Activity, int]:
        """A new page, and its file descriptor for the worker, which the caller closes."""
        descriptor = os.memfd_create("vcpo-environment")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return cls(mmap.mmap(descriptor, mmap.PAGESIZE)), descriptor

    @classmethod
    def opened(cls, descriptor: int) -> Activity:
        """The page that the parent made; its descriptor is closed."""
        memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        return cls(memory)

    def tick(self) -> None:
        _TICK.pack_into(self._memory, 0, time.monotonic())

    def enter(self, job: int, phase: str, deadline: float) -> None:
        """A user's code runs from now on."""
        _CALL.pack_into(self._memory, _CALL_AT, job, _NUMBERS[phase], deadline)

    def leave(self) -> None:
        """It has given control back."""
        self._memory[_CALL_AT : _CALL_AT + _CALL.size] = _NOTHING

    def read(self) -> Doing:
        (tick,) = _TICK.unpack_from(self._memory, 0)
        job, phase, deadline = _CALL.unpack_from(self._memory, _CALL_AT)
        return Doing(tick, job, PHASES[phase] if phase < len(PHASES) else "", deadline)

    def close(self) -> None:
        self._memory.close()
