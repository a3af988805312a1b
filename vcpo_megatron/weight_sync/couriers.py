"""The three ways of weights to the servers, ``rollout.sync``: each a ``Courier``.

tensor       the learner serializes one bucket after the other; each is forwarded over HTTP to all servers of a wave,
             and makes room for another one when all have it
disk         the learner wrote a folder; each server reads it
distributed  servers join a group of the learner's broadcaster once, and it broadcasts every bucket to all of a wave.
             Only the orchestrator speaks to the servers: it says which bucket comes next while the learner sends.
             A group belongs to its servers' processes; after any failure all groups are closed and opened anew, under
             names that were never used.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ..rollout.fleet.server import Server
from ..run.tasks import RunError, run_all
from ..run.text import one_line
from ..transport.messages import (
    BucketTaken,
    GroupOpened,
    Message,
    OpenGroup,
    ReleaseWeights,
    SendingFailed,
    SendWeights,
    StopSending,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from .update import FAILURES, Courier, Wave, WaveFailed, blaming

_T = TypeVar("_T")

#: Seconds that a server gets to leave a group that is closed.
_LEAVE_S = 5.0

Tell = Callable[[Message], Coroutine[Any, Any, None]]


class SenderLost(RuntimeError):
    """The learner cannot send; the message says why."""


async def _in_time(answer: Awaitable[_T], timeout_s: float) -> _T:
    """What the learner's sender answers; WaveFailed, of no server, when it is silent for half the time of a wave. Else
    that would run out, and the server be replaced for it."""
    try:
        async with asyncio.timeout(timeout_s / 2):
            return await answer
    except TimeoutError:
        lost = SenderLost(
            f"the learner's sender of weights is silent for {timeout_s / 2:g} s (half of rollout.sync_timeout_s), see "
            "the logs of the learner"
        )
        raise WaveFailed(None, lost) from None


class TensorCourier:
    """``tell`` sends to the learner, whose answers come to ``heard``; ``prefix`` makes names of requests unique."""

    session, together = True, True

    def __init__(self, tell: Tell, *, prefix: str, timeout_s: float) -> None:
        self._tell, self._prefix, self._timeout_s = tell, prefix, timeout_s
        self._numbers = itertools.count(1)
        self._name = ""
        self._inbox: asyncio.Queue[WeightsBucket | WeightsSent | SendingFailed] = asyncio.Queue()

    def heard(self, message: Message) -> None:
        """An answer of the learner's sender; one to a request that was given up is dropped."""
        match message:
            case WeightsBucket(name) | WeightsSent(name) | SendingFailed(name) if name == self._name:
                self._inbox.put_nowait(message)

    async def prepare(self, wave: Wave) -> None:
        """RunError for a joined server of several ranks, which only it knows of."""
        for server in wave.servers:
            if (ranks := server.client.info.ranks) > 1:
                raise RunError(
                    f"{server.name} at {server.client.base_url} has {ranks} tensor-parallel ranks, and weights go by "
                    'rollout.sync = "tensor" to servers of one; set it to "distributed" or "disk"'
                )

    async def send(self, wave: Wave) -> dict[str, str]:
        weights, name = wave.weights, f"{self._prefix}-{next(self._numbers)}"
        self._name, self._inbox = name, asyncio.Queue()
        try:
            await self._tell(SendWeights(name, weights.version))
            while True:
                match await _in_time(self._inbox.get(), self._timeout_s):
                    case WeightsBucket(_, number, text):
                        wave.at = f"bucket {number + 1} of {len(weights.plan)}"
                        await run_all(*(blaming(wave, server, _load(server, text, wave)) for server in wave.servers))
                        await self._tell(BucketTaken(name, number))
                        del text  # else two would be held while the next one comes
                    case WeightsSent(_, _, checksums):
                        return checksums
                    case SendingFailed(_, reason):
                        raise WaveFailed(None, SenderLost(reason))
        finally:
            self._name, self._inbox = "", asyncio.Queue()

    async def failed(self, reason: str) -> None:
        """The learner may wait for room for another bucket."""
        await self._tell(StopSending(reason))

    async def release(self, weights: WeightsReady) -> None:
        await self._tell(ReleaseWeights(weights.version))


async def _load(server: Server, text: bytes, wave: Wave) -> None:
    await server.client.update_weights_from_tensor(text, str(wave.weights.version), flush_cache=False)


class DiskCourier:
    session, together = False, False

    async def prepare(self, wave: Wave) -> None:
        pass

    async def send(self, wave: Wave) -> dict[str, str]:
        weights = wave.weights
        wave.at = f"read {weights.path}"
        version = str(weights.version)
        await run_all(
            *(
                blaming(wave, server, server.client.update_weights_from_disk(weights.path, version, flush_cache=False))
                for server in wave.servers
            )
        )
        return {}

    async def failed(self, reason: str) -> None:
        pass

    async def release(self, weights: WeightsReady) -> None:
        await asyncio.to_thread(shutil.rmtree, weights.path, ignore_errors=True)


class GroupCourier:
    """``tell`` sends to the learner, whose answers come to ``heard``. ``prefix`` makes names of groups unique among
    runs and attempts. The ranks of a group are the learner's, then those of the first server, of the second, ..."""

    session, together = True, True

    def __init__(self, tell: Tell, *, prefix: str, timeout_s: float) -> None:
        self._tell, self._prefix, self._timeout_s = tell, prefix, timeout_s
        self._numbers = itertools.count(1)
        self._groups: dict[tuple[tuple[int, int], ...], str] = {}
        self._members: dict[str, Sequence[Server]] = {}
        self._opened: asyncio.Future[GroupOpened] | None = None
        self._sent: asyncio.Future[WeightsSent] | None = None

    def heard(self, message: Message) -> None:
        """An answer of the learner's sender; one to a question that was given up is dropped."""
        match message:
            case GroupOpened() if self._opened is not None and not self._opened.done():
                if message.name in self._members:
                    self._opened.set_result(message)
            case WeightsSent() if self._sent is not None and not self._sent.done():
                if message.name in self._members:
                    self._sent.set_result(message)
            case SendingFailed(name) if name in self._members:
                for future in (self._opened, self._sent):
                    if future is not None and not future.done():
                        future.set_exception(SenderLost(message.reason))

    async def prepare(self, wave: Wave) -> None:
        """Have the wave's group, opening it when it is new or a server's process is."""
        servers = wave.servers
        key = _key(servers)
        if key in self._groups:
            return
        if any(known != _key(self._members[name]) for known, name in self._groups.items()):
            await self.failed("a server was restarted")
        name = f"{self._prefix}-{next(self._numbers)}"
        *offsets, size = itertools.accumulate((server.client.info.ranks for server in servers), initial=1)
        self._members[name] = servers
        self._opened = asyncio.get_running_loop().create_future()
        await self._tell(OpenGroup(name, size))
        opened = await _in_time(self._answer(self._opened), self._timeout_s)
        await run_all(
            *(
                blaming(
                    wave,
                    server,
                    server.client.init_weights_update_group(
                        opened.address, opened.port, offset, size, name, opened.backend
                    ),
                )
                for server, offset in zip(servers, offsets, strict=True)
            )
        )
        self._groups[key] = name

    async def send(self, wave: Wave) -> dict[str, str]:
        name = self._groups.get(_key(wave.servers))
        if name is None:
            raise WaveFailed(None, SenderLost("a server was restarted meanwhile"))
        self._sent = asyncio.get_running_loop().create_future()
        await self._tell(SendWeights(name, wave.weights.version))
        *_, sent = await run_all(
            *(blaming(wave, server, self._buckets(wave, server, name)) for server in wave.servers),
            self._answer(self._sent),
        )
        assert isinstance(sent, WeightsSent)
        return sent.checksums

    async def _buckets(self, wave: Wave, server: Server, name: str) -> None:
        weights = wave.weights
        for number, entries in enumerate(weights.plan, 1):
            wave.at = f"bucket {number} of {len(weights.plan)}"
            await server.client.update_weights_from_distributed(entries, name, str(weights.version), flush_cache=False)

    @staticmethod
    async def _answer(future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        except SenderLost as error:
            raise WaveFailed(None, error) from error

    async def failed(self, reason: str) -> None:
        """Close every group: the learner kills its broadcaster, so servers that wait in a broadcast see it go."""
        members, self._members, self._groups = self._members, {}, {}
        await self._tell(StopSending(reason))

        async def leave(server: Server, name: str) -> None:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await server.client.destroy_weights_update_group(name)
            except (*FAILURES, TimeoutError) as error:  # it has died, or the group has: nothing to leave any more
                print(f"{server.name} did not leave group {name}: {one_line(error)}", flush=True)

        await asyncio.gather(*(leave(server, name) for name, servers in members.items() for server in servers))

    async def release(self, weights: WeightsReady) -> None:
        await self._tell(ReleaseWeights(weights.version))


def _key(servers: Sequence[Server]) -> tuple[tuple[int, int], ...]:
    """The processes behind ``servers``."""
    return tuple((server.index, server.life) for server in servers)


class Couriers:
    """The courier for what the learner offers: it alone knows whether it has GPUs, which ``rollout.sync`` = "auto"
    depends on. Arguments as in GroupCourier."""

    def __init__(self, tell: Tell, *, prefix: str, timeout_s: float) -> None:
        self._texts = TensorCourier(tell, prefix=prefix, timeout_s=timeout_s)
        self._groups = GroupCourier(tell, prefix=prefix, timeout_s=timeout_s)
        self._ways: dict[str, Courier] = {"tensor": self._texts, "disk": DiskCourier(), "distributed": self._groups}

    def heard(self, message: Message) -> None:
        """What the learner's sender says, to whom it concerns."""
        self._texts.heard(message)
        self._groups.heard(message)

    def __call__(self, weights: WeightsReady) -> Courier:
        return self._ways[weights.way]
