"""Numbers that hosts need of one another while a schedule runs, on gloo groups: log ratios, norms, tied rows.

    main thread --HostCopy--> the exchange's thread: waits for the copy's event, then posts --gloo--> other ranks
    main thread <--Arriving-- a receive that was posted ahead, or a sum: waited for with a deadline

Why not NCCL: a receive that waits on the device for what another stage sends later holds up everything that waits for
the device, and the first message between two ranks holds up the host itself. In a pipeline these waits close to rings
that no rank leaves. Here the device copies and goes on; the main thread never waits for an event, and the one thread
that does posts in the order in which it was asked: the order of the copies on the device, and the same on all ranks of
a group.

The exchange lasts for one run of a schedule (``with``). What its thread fails with ends that run where the main thread
asks next. Every wait ends after ``launch.timeout_s`` and says what was not there, and from whom.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import platform

#: Seconds that the thread may take to end when the run is over.
_GRACE_S = 10.0


class ExchangeError(RuntimeError):
    """A message of hosts did not arrive, or could not be sent."""


class Arriving:
    """A tensor of the host that another rank sends, or that several ranks sum up."""

    def __init__(self, exchange: HostExchange, posted: Future[tuple[dist.Work | None, Tensor]], what: str) -> None:
        self._exchange = exchange
        self._posted = posted
        self._what = what

    def wait(self) -> Tensor:
        """It, once it is there; ExchangeError when it is not within the deadline."""
        return self._exchange.result(self._posted, self._what)


class HostExchange:
    """One rank's messages during one run of a schedule. All methods are the main thread's (autograd's, too)."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sends: list[Arriving] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="host exchange", daemon=True)

    def __enter__(self) -> HostExchange:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Everything was sent, unless the run ends by an error; then the thread, which may wait for a device that does
        not answer, is left to end with the process."""
        try:
            if kind is None:
                for send in self._sends:
                    send.wait()
        finally:
            self._jobs.put(None)
            self._thread.join(_GRACE_S)

    # --- what the main thread asks for --------------------------------------------------------------

    def send(
        self,
        copy: platform.HostCopy,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        what: str,
        part: slice = slice(None),
    ) -> None:
        """Send ``part`` of a copy that has been started to ``ranks``, on ``group``."""
        for rank in ranks:

            def post(rank: int = rank) -> tuple[dist.Work | None, Tensor]:
                message = copy.wait()[part].contiguous()
                return dist.isend(message, rank, group=group), message

            described = f"{what}: {_of(rank)} did not take them"
            self._sends.append(Arriving(self, self._in_thread(post), described))

    def sum(self, copy: platform.HostCopy, group: dist.ProcessGroup, what: str) -> Arriving:
        """Sum a copy that has been started over all ranks of ``group``, each of which asks for its sums in one order.
        Its own memory is used."""

        def post() -> tuple[dist.Work | None, Tensor]:
            total = copy.wait()
            if dist.get_world_size(group) == 1:
                return None, total
            return dist.all_reduce(total, group=group, async_op=True), total

        ranks = dist.get_process_group_ranks(group)
        return Arriving(self, self._in_thread(post), f"{what}: not all of ranks {ranks} have added theirs")

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, rank: int, group: dist.ProcessGroup, what: str
    ) -> Arriving:
        """Post the receive of what ``rank`` sends on ``group``: in the order in which it sends."""
        message = torch.empty(*shape, dtype=dtype)
        posted: Future[tuple[dist.Work | None, Tensor]] = Future()
        posted.set_result((dist.irecv(message, rank, group=group), message))
        return Arriving(self, posted, f"{what}: {_of(rank)} did not send them")

    def result(self, posted: Future[tuple[dist.Work | None, Tensor]], what: str) -> Tensor:
        """For ``Arriving``."""
        deadline = time.monotonic() + self._timeout_s
        try:
            work, message = posted.result(self._timeout_s)
            if work is not None:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except TimeoutError as error:
            late = f"{what} within {self._timeout_s:g} s (launch.timeout_s): this rank's device has not come so far"
            raise ExchangeError(late) from error
        except RuntimeError as error:  # gloo's; a deadline is one of them
            raise ExchangeError(f"{what} within {self._timeout_s:g} s (launch.timeout_s): {error}") from error
        return message

    # --- the thread -----------------------------------------------------------------------------------

    def _in_thread(self, post: Callable[[], tuple[dist.Work | None, Tensor]]) -> Future[Any]:
        """``post`` after all that was asked for before it; not at all when one of those has failed."""
        if self._failure is not None:
            raise ExchangeError(f"the exchange between hosts failed: {self._failure}") from self._failure
        posted: Future[tuple[dist.Work | None, Tensor]] = Future()

        def job() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                posted.set_result(post())
            except Exception as error:  # fault boundary of the thread: whoever asks raises it
                self._failure = error
                posted.set_exception(error)

        self._jobs.put(job)
        return posted

    def _serve(self) -> None:
        platform.bind_thread()
        while (job := self._jobs.get()) is not None:
            job()


def _of(rank: int) -> str:
    return f"rank {rank} (see logs/learner.{rank}.log)"
