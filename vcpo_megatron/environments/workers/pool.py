"""Worker processes that an environment runs in, as one ``EnvironmentClient``.

``start``       starts all workers; waits until each has made the environment, ``start_timeout_s`` at most
``supervise``   consumes: ends of workers     produces: their replacements
                waits for: time, or the end of a worker
``stop``        gives every episode up; workers end by themselves, or are killed after ``GRACE_S``

An episode lives in one worker, the one with the fewest. All workers make the same environment from the same arguments:
that they agree on its fingerprint and its held-out prompts is checked, and so an example is found by its index in any
of them. A worker that dies, or computes beyond the deadline of one of its episodes, costs the episodes that it has: the
one that it was busy with is to blame, the others are not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...run.notifier import Notifier
from ...run.tasks import RunError, cancel, run_all
from ..base import EnvironmentSetupError
from ..client import EpisodeFailure
from .episodes import Conversation, RemoteEnvironment, Tally, described
from .setup import WorkerSetup
from .worker import EnvironmentWorker, WorkerStartError

#: How often workers are looked at.
LOOK_S = 0.25
#: Seconds that workers get to end by themselves.
GRACE_S = 5.0
#: A worker that cannot be replaced in so many tries ends the run.
_TRIES = 3
_RETRY_S = 1.0
#: So many workers that ended, nobody knows why, without one episode that came to its end in between: nothing works.
_MOST_ENDS = 10


class WorkerPool(RemoteEnvironment):
    """``workers`` processes that serve the environment of ``setup``; ``log(index)`` is where the output of one goes.

    Make it in the event loop of the main thread, which its workers end with. ``start`` it, ``supervise`` it, ``stop``
    it: ``async with`` does the first and the last."""

    def __init__(self, setup: WorkerSetup, *, workers: int, start_timeout_s: float, log: Callable[[int], Path]) -> None:
        self._setup, self._count = setup, workers
        self._start_timeout_s = start_timeout_s
        self._log = log
        self._changes = Notifier()
        self._workers: dict[int, EnvironmentWorker] = {}  # those that are ready
        self._starting: set[EnvironmentWorker] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._said: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self._stopping = False
        self._tally = Tally()
        self._outcomes_then = 0
        self._ends_in_a_row = 0

    # --- beginning and end --------------------------------------------------------------------

    async def __aenter__(self) -> WorkerPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all workers. EnvironmentSetupError when the environment cannot be made, whatever the reason; nothing
        is left running then."""
        try:
            await run_all(*(self._start(index) for index in range(self._count)))
        except BaseException as error:
            await self.stop()
            if isinstance(error, WorkerStartError):
                raise EnvironmentSetupError(str(error)) from error
            if isinstance(error, OSError):
                raise EnvironmentSetupError(f"environment workers cannot be started: {error}") from error
            raise

    async def _start(self, index: int) -> None:
        worker = EnvironmentWorker(index, self._setup, self._log(index), self._tally, self._ended)
        self._starting.add(worker)
        self._agree(await worker.make(self._start_timeout_s))
        self._starting.discard(worker)
        self._workers[index] = worker
        self._changes.notify()

    def _agree(self, said: dict[str, Any]) -> None:
        """Take over what the first worker said of the environment; EnvironmentSetupError when another one differs."""
        if self._said is None:
            self._said = said
            self.description = described(said)
        for key, value in self._said.items():
            if said[key] != value:
                values = "" if key == "heldout" else f" ({value!r} and {said[key]!r})"
                raise EnvironmentSetupError(
                    f"environment {said['name']}: two worker processes made environments that differ in {key}{values}; "
                    "make it from its arguments alone, without random numbers, times or process ids, and keep its "
                    "files unchanged during a run"
                )

    async def stop(self) -> None:
        """End all workers, within ``GRACE_S`` seconds or by force; it may be called twice."""
        self._stopping = True
        await cancel(*self._replacing)
        workers = [*self._workers.values(), *self._starting]
        self._workers.clear()
        self._starting.clear()
        for worker in workers:
            worker.tell_to_stop()
        deadline = time.monotonic() + GRACE_S
        await asyncio.gather(*(worker.stopped(deadline) for worker in workers))

    # --- what a run asks ----------------------------------------------------------------------

    async def _place(self) -> Conversation:
        """The worker with the fewest episodes, one that is not busy with a single one if there is any."""

        def choose() -> EnvironmentWorker | None:
            return min(self._workers.values(), key=lambda w: (w.busy, len(w.conversation.open)), default=None)

        worker = choose()
        if worker is None:  # all of them are being replaced
            try:
                worker = await self._changes.until(choose, _TRIES * (self._start_timeout_s + _RETRY_S))
            except TimeoutError:
                raise EpisodeFailure("no environment worker is there to run it", "none") from None
        return worker.conversation

    # --- replacing workers --------------------------------------------------------------------

    async def supervise(self) -> None:
        """See ``EnvironmentClient``."""
        while True:
            if self._error is not None:
                raise self._error
            for worker in list(self._workers.values()):
                worker.look()
            await self._changes.wait(LOOK_S)

    def _ended(self, worker: EnvironmentWorker) -> None:
        """A worker's process has ended: settle what it had, and start another one."""
        if self._stopping:
            return
        del self._workers[worker.index]
        line, known = worker.settle()
        worker.release()
        print(f"{line}; another one takes its place", flush=True)
        if self._tally.outcomes > self._outcomes_then:
            self._ends_in_a_row = 0
        self._outcomes_then = self._tally.outcomes
        self._ends_in_a_row += not known
        if self._ends_in_a_row >= _MOST_ENDS:
            self._fail(
                RunError(
                    f"{_MOST_ENDS} environment workers ended one after the other before any episode was done, the "
                    f"last: {line}"
                )
            )
        task = asyncio.create_task(self._replace(worker.index))
        self._replacing.add(task)
        task.add_done_callback(self._replaced)
        self._changes.notify()

    def _replaced(self, task: asyncio.Task[None]) -> None:
        self._replacing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """``supervise`` raises it."""
        self._error = self._error or error
        self._changes.notify()

    async def _replace(self, index: int) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._start(index)
            except (WorkerStartError, EnvironmentSetupError, OSError) as error:
                await self._drop_starting(index)
                if attempt == _TRIES:
                    raise RunError(f"an environment worker cannot be replaced, {_TRIES} tries: {error}") from error
            await asyncio.sleep(_RETRY_S)

    async def _drop_starting(self, index: int) -> None:
        for worker in [worker for worker in self._starting if worker.index == index]:
            self._starting.discard(worker)
            worker.tell_to_stop()
            await worker.stopped(time.monotonic())
