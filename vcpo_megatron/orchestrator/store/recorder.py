"""One thread that owns the store, and one transaction for everything that came in while the last one was written.

``Recorder.write``  consumes: an operation on the store    produces: its result, once it is on disk
                    waits for: the transaction it is in    unblocked by: the thread

Operations are carried out in the order of the calls. An fsync takes milliseconds; a hundred trajectories that end
during one share the next.

When the disk is full, nothing is lost: the transaction is tried again until it fits, everyone who waits for it waits
on, and ``paused`` says so, for admission to stop. Operations are therefore functions of the store alone: a second call
of one, after the first was rolled back, does the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ...config.process import NOTE_PREFIX, WARNING_PREFIX
from .schema import StoreFullError
from .store import RolloutStore

_T = TypeVar("_T")


#: Seconds between two attempts to write to a full disk.
RETRY_S = 2.0


class Recorder:
    """Owns the store that ``open_store()`` gives; it is opened, used and closed in one thread.

    ``changed`` is called when ``paused`` has changed.
    """

    def __init__(
        self,
        open_store: Callable[[], RolloutStore],
        *,
        changed: Callable[[], None] = lambda: None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._open_store = open_store
        self._changed = changed
        self._retry_s = retry_s
        self._patient = True
        #: Why nothing can be written now; None when that is not so.
        self.paused: str | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._store: RolloutStore | None = None
        self._waiting: list[tuple[Callable[[RolloutStore], Any], asyncio.Future[Any]]] = []
        self._draining: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._store = await asyncio.get_running_loop().run_in_executor(self._thread, self._open_store)

    def submit(self, operation: Callable[[RolloutStore], _T]) -> asyncio.Future[_T]:
        """The future result of ``operation``, there when it is durable. It is carried out in any case."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.append((operation, future))
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain())
        return future

    async def write(self, operation: Callable[[RolloutStore], _T]) -> _T:
        """Result of ``operation`` after it is durable; it sees all that was handed in before. Carried out even if
        the caller is cancelled meanwhile."""
        return await self.submit(operation)

    def give_up(self) -> None:
        """From now on a full disk is an error for everyone who waits: the run is about to end."""
        self._patient = False

    async def finish(self, reason: str | None) -> None:
        """End every queued group as dropped(reason) after all writes before it, and close the store in any case.
        None: the store is left as it is."""
        self.give_up()
        try:
            if self._store is not None and reason is not None:
                await self.write(lambda store: store.end_run(reason))
        finally:
            if self._store is not None:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
            self._thread.shutdown(wait=True)

    def _opened(self) -> RolloutStore:
        assert self._store is not None, "the recorder is not open"
        return self._store

    async def _drain(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            operations = [operation for operation, _ in batch]
            try:
                results = await self._commit_patiently(operations)
            except Exception as error:  # not handled here: it goes to everyone whose write was in the transaction
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result(result)

    async def _commit_patiently(self, operations: Sequence[Callable[[RolloutStore], Any]]) -> list[Any]:
        loop = asyncio.get_running_loop()
        while True:
            try:
                results = await loop.run_in_executor(self._thread, self._commit, operations)
            except StoreFullError as error:
                if not self._patient:
                    raise
                self._pause(f"generation pauses: {error}; what was sampled waits, nothing is lost")
                await asyncio.sleep(self._retry_s)
            else:
                self._pause(None)
                return results

    def _pause(self, why: str | None) -> None:
        if why == self.paused:
            return
        news = f"{WARNING_PREFIX}{why}" if why else f"{NOTE_PREFIX}the disk takes writes again: generation goes on"
        print(news, flush=True)
        self.paused = why
        self._changed()

    def _commit(self, operations: Sequence[Callable[[RolloutStore], Any]]) -> list[Any]:
        store = self._opened()
        with store.transaction():
            return [operation(store) for operation in operations]
