"""Ledgers whose writes are durable at once, without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from vcpo_megatron.orchestrator.store.store import RolloutStore

_LOOP = asyncio.new_event_loop()  # futures need one; nothing ever waits


def done(result: Any) -> asyncio.Future[Any]:
    future = _LOOP.create_future()
    future.set_result(result)
    return future


class NoStore:
    """Takes every write and keeps nothing."""

    def submit(self, operation: Callable[[RolloutStore], Any]) -> asyncio.Future[Any]:
        return done(True)


class AtOnce:
    """Carries out every write in ``store`` as it is handed in."""

    def __init__(self, store: RolloutStore) -> None:
        self.store = store

    def submit(self, operation: Callable[[RolloutStore], Any]) -> asyncio.Future[Any]:
        return done(operation(self.store))


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")
