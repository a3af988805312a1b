"""Running several loops as one: the first error ends all of them, and comes out as itself."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

_CANCEL_S = 10.0


async def run_beside(main: Coroutine[Any, Any, _T], *others: Coroutine[Any, Any, object]) -> _T:
    """Run ``main`` to its end while ``others`` run; its result. Whoever raises first ends all, and its exception
    is raised as it is (not in a group). ``others`` are cancelled when ``main`` is done; one that returns is fine."""
    task = asyncio.ensure_future(main)
    tasks = [task, *(asyncio.ensure_future(other) for other in others)]
    try:
        waiting = set(tasks)
        while not task.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        return task.result()
    finally:
        await cancel(*tasks)


async def run_all(*loops: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run ``loops`` to their ends and return their results; the first error ends all and is raised as it is: of several
    that come together that of the earliest in ``loops``."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        return [task.result() for task in tasks]
    finally:
        await cancel(*tasks)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait until it has ended; results and errors of it are dropped.

    A task that ignores its cancellation (an environment that swallows it) is left behind after 10 s, and said.
    """
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        _, stuck = await asyncio.wait(running, timeout=_CANCEL_S)
        for task in stuck:
            print(f"a task does not end within {_CANCEL_S:g} s of its cancellation: {task}", flush=True)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # mark as seen: it was raised already, or another one was


class RunError(RuntimeError):
    """The run cannot go on; the message is one line for the user."""


class StopRequest:
    """Set once, by a signal: the run ends with a checkpoint, ``grace_s`` seconds later if it can.

    Half of that time is for the step in progress, the rest for the checkpoint.
    """

    def __init__(self, grace_s: float = math.inf) -> None:
        self.reason: str | None = None
        self.grace_s = grace_s
        self._made_at = math.inf
        self._event = asyncio.Event()

    @property
    def made(self) -> bool:
        return self.reason is not None

    def make(self, reason: str) -> None:
        if self.reason is None:
            self.reason, self._made_at = reason, time.monotonic()
            self._event.set()

    async def wait(self) -> None:
        """Returns when it is made."""
        await self._event.wait()

    async def unless_made(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether ``work`` came to its end before the stop was made; else it is cancelled."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            await cancel(task, stop)

    def seconds_for_step(self) -> float:
        """Seconds that a step in progress still has after the stop was asked for."""
        return max(0.0, self._made_at + self.grace_s / 2 - time.monotonic())
