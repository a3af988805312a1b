"""The engine's thread, and how the HTTP side talks to it.

    consumes   commands (functions to run between two steps) and weight updates, both with a future
    produces   results of those futures, and of requests when their last sequence ended
    waits for  a command, when nothing can be stepped
    unblocked  by the inbox; every command is one put

The HTTP loop never touches the model, the scheduler or the cache: it calls ``call``, ``update`` and
``generate``. An exception in the thread is the engine's end: everybody who waits is told, and
``on_failure`` is called once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...run.text import one_line
from .errors import ModelError, RequestError
from .scheduler import Scheduler
from .sequence import SequenceState

log = logging.getLogger(__name__)


class EngineFailed(RuntimeError):
    """The engine's thread ended; the message says why. Answered as HTTP 500."""


class _Request:
    """Sequences that are answered together."""

    def __init__(self, sequences: Sequence[SequenceState], future: asyncio.Future[Any]) -> None:
        self.sequences = list(sequences)
        self.future = future
        self.remaining = len(self.sequences)


class Engine:
    """Runs ``scheduler`` in a thread of its own. Public methods are called from the event loop's thread."""

    def __init__(self, scheduler: Scheduler, on_failure: Callable[[], None]) -> None:
        self.scheduler = scheduler
        self.failure = ""
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._updates: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._requests: dict[SequenceState, _Request] = {}
        self._waiters: set[asyncio.Future[Any]] = set()  # of the event loop's thread
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------ event loop's side

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self.failure

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs ``function`` between two steps and returns its result, or raises its RequestError."""
        return await self._send(lambda future: lambda: self._settle(future, function))

    async def update(self, function: Callable[[], Any]) -> Any:
        """Like ``call``, once weights may change: while paused, or when the running sequences have ended."""
        return await self._send(lambda future: lambda: self._updates.append((function, future)))

    async def generate(self, sequences: Sequence[SequenceState]) -> Sequence[SequenceState]:
        """Returns ``sequences`` when all have ended; aborts them when the caller is cancelled."""

        def submission(future: asyncio.Future[Any]) -> Callable[[], None]:
            return lambda: self._submit(_Request(sequences, future))

        try:
            return await self._send(submission)
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._abandon(sequences))
            raise

    async def stop(self, timeout_s: float) -> None:
        """Aborts what runs, answers it, and ends the thread."""

        def stop() -> None:
            self.scheduler.abort(None, "the server is shutting down")
            self._stopping = True

        self._inbox.put(stop)
        await asyncio.to_thread(self._thread.join, timeout_s)

    async def _send(self, command: Callable[[asyncio.Future[Any]], Callable[[], None]]) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiters.add(future)
        future.add_done_callback(self._waiters.discard)
        if self.failure:
            raise EngineFailed(self.failure)
        self._inbox.put(command(future))
        return await future

    def _fail_waiters(self) -> None:
        for future in list(self._waiters):
            if not future.done():
                future.set_exception(EngineFailed(self.failure))
        self._on_failure()

    # ------------------------------------------------------------ engine's thread

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_commands()
                    self._apply_updates()
                    if self.scheduler.runnable:
                        self.scheduler.step()
                    self._deliver()
        except Exception as error:  # fault boundary of the engine: whatever it was, nobody may wait for ever
            log.error("engine failed", exc_info=True)
            self.failure = f"the engine failed: {type(error).__name__}: {one_line(error)}"
            self._loop.call_soon_threadsafe(self._fail_waiters)

    def _take_commands(self) -> None:
        if not (self.scheduler.runnable or (self._updates and self.scheduler.can_update)):
            self._inbox.get()()
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            command()

    def _apply_updates(self) -> None:
        while self._updates and self.scheduler.can_update:
            function, future = self._updates.popleft()
            self._settle(future, function)
        self.scheduler.held = bool(self._updates)

    def _submit(self, request: _Request) -> None:
        def submit() -> None:
            self.scheduler.submit(request.sequences)
            for sequence in request.sequences:
                self._requests[sequence] = request

        self._settle(request.future, submit, only_errors=True)

    def _abandon(self, sequences: Sequence[SequenceState]) -> None:
        # Only those that still run: the id of an ended one may be in use again.
        rids = {sequence.rid for sequence in sequences if sequence in self._requests}
        if rids:
            self.scheduler.abort(rids, "the client went away")

    def _deliver(self) -> None:
        ended, self.scheduler.ended = self.scheduler.ended, []
        for sequence in ended:
            sequence.ended = time.monotonic()
            request = self._requests.pop(sequence)
            request.remaining -= 1
            if not request.remaining:
                self._resolve(request.future, request.sequences, None)

    def _settle(self, future: asyncio.Future[Any], function: Callable[[], Any], only_errors: bool = False) -> None:
        try:
            result = function()
        except (RequestError, ModelError) as error:  # the mistake of the caller, who is told
            self._resolve(future, None, error)
        else:
            if not only_errors:
                self._resolve(future, result, None)

    def _resolve(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        def resolve() -> None:
            if future.done():  # cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(resolve)
