"""Group commit: order, sharing of transactions, errors."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vcpo_megatron.orchestrator.store.recorder import Recorder
from vcpo_megatron.orchestrator.store.schema import StoreError
from vcpo_megatron.orchestrator.store.store import RolloutStore

pytestmark = pytest.mark.timeout(30)


def test_writes_that_come_together_share_a_transaction_in_order(tmp_path: Path) -> None:
    transactions: list[int] = []
    seen: list[int] = []

    class CountingStore(RolloutStore):
        @contextlib.contextmanager
        def transaction(self) -> Iterator[None]:
            if not self._in_transaction:
                transactions.append(len(seen))
            with super().transaction():
                yield

    async def main() -> list[int]:
        recorder = Recorder(lambda: CountingStore(tmp_path / "rollouts.sqlite"))
        await recorder.open()

        writes, may_end = threading.Event(), threading.Event()

        def number(i: int) -> int:
            writes.set()
            may_end.wait(10)
            seen.append(i)
            return 10 * i

        first = recorder.submit(lambda store: number(0))
        await asyncio.to_thread(writes.wait, 10)
        rest = [recorder.submit(lambda store, i=i: number(i)) for i in range(1, 6)]  # type: ignore[misc]
        may_end.set()
        results = list(await asyncio.gather(first, *rest))
        await recorder.finish("run ended")
        return results

    assert asyncio.run(asyncio.wait_for(main(), 25)) == [0, 10, 20, 30, 40, 50]
    assert seen == list(range(6))
    assert transactions == [0, 1, 6]  # the first, the five together, the end


def test_an_error_in_a_transaction_reaches_everyone_in_it(tmp_path: Path) -> None:
    async def main() -> list[Any]:
        recorder = Recorder(lambda: RolloutStore(tmp_path / "rollouts.sqlite"))
        await recorder.open()
        good = recorder.submit(lambda store: store.counts())
        bad = recorder.submit(lambda store: store.drop(99, "x"))
        found = await asyncio.gather(good, bad, return_exceptions=True)
        await recorder.finish("run ended")
        return list(found)

    good, bad = asyncio.run(asyncio.wait_for(main(), 10))
    assert isinstance(bad, StoreError) and "group 99 was never admitted" in str(bad)
    assert good is bad  # nothing of the transaction is on disk, so nobody may believe it is
