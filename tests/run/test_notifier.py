"""Waiting for a condition that another task brings about."""

from __future__ import annotations

import asyncio

import pytest

from vcpo_megatron.run.notifier import Notifier


def test_every_waiter_looks_again_after_a_notification_and_none_is_missed() -> None:
    async def scenario() -> None:
        notifier, values = Notifier(), []
        waiters = [
            asyncio.create_task(notifier.until(lambda least=least: len(values) if len(values) >= least else None))
            for least in (1, 3)
        ]
        for value in range(3):
            await asyncio.sleep(0)
            values.append(value)
            notifier.notify()
        assert await asyncio.wait_for(asyncio.gather(*waiters), 5.0) == [1, 3]
        assert notifier.count == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_cancellation_that_comes_with_a_notification_is_not_lost(turns: int) -> None:
    """``turns`` of the event loop after it."""

    async def forever(notifier: Notifier) -> None:
        while True:
            await notifier.wait(5.0)

    async def scenario() -> None:
        notifier = Notifier()
        waiter = asyncio.create_task(forever(notifier))
        await asyncio.sleep(0.01)
        notifier.notify()
        for _ in range(turns):
            await asyncio.sleep(0)
        waiter.cancel()
        _, running = await asyncio.wait([waiter], timeout=1.0)
        assert not running

    asyncio.run(scenario())


def test_a_wait_ends_in_time() -> None:
    async def scenario() -> None:
        notifier = Notifier()
        await notifier.wait(0.01)
        with pytest.raises(TimeoutError):
            await notifier.until(lambda: None, 0.01)
        assert await notifier.until(lambda: 0, 0.0) == 0  # anything but None, and without a wait

    asyncio.run(scenario())
