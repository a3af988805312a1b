"""Waiting for a condition that other tasks of the event loop bring about."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Notifier:
    """Wakes everyone who waits for something to change; each then looks at its own condition again.

    Used in one event loop: nothing is missed, because between a look and the wait no other task runs.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        #: Notifier so far.
        self.count = 0

    def notify(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float = math.inf) -> None:
        """Return after the next ``notify`` or after ``timeout_s`` seconds."""
        event = self._event
        # Not asyncio.wait_for, which in Python 3.11 loses a cancellation that comes together with the event.
        try:
            async with asyncio.timeout(None if math.isinf(timeout_s) else max(0.0, timeout_s)):
                await event.wait()
        except TimeoutError:
            pass

    async def until(self, look: Callable[[], _T | None], timeout_s: float = math.inf) -> _T:
        """The first result of ``look`` that is not None; TimeoutError after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (found := look()) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError
            await self.wait(deadline - time.monotonic())
        return found
