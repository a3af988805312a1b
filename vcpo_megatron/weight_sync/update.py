"""One weight update of one wave of servers, from the pause to the first request after it.

    prepare --> pause --> begin --> send --> end --> verify --> continue --> done
       |          |         |        |        |        |           |
       +----------+---------+--------+--------+--------+-----------+--> failed: the server stays paused, without a
                                                                        version; its next update ends this one first

The whole update has one deadline, the caller's; ``Wave.at`` is the step it had reached. Servers that are updated by
one broadcast fail together, and the courier lets nobody hang in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..rollout.client.http import ServerError, ServerUnavailable
from ..rollout.client.protocol import PauseMode, ProtocolError
from ..rollout.fleet.server import Server
from ..run.tasks import run_all
from ..transport.messages import WeightsReady
from .checksums import ChecksumBook, ChecksumError

#: What a server, or its connection, may do wrong during an update.
FAILURES = (ServerError, ServerUnavailable, ProtocolError, ChecksumError)


@dataclass(eq=False)
class Wave:
    """``servers``, in the ``lives`` that they have now, on their way to ``weights``; ``at`` is the step that is being
    done, and ``waits_for`` are those that were asked and have not answered."""

    servers: Sequence[Server]
    weights: WeightsReady
    at: str = "prepare"
    lives: Sequence[int] = field(init=False)
    waits_for: set[Server] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lives = [server.life for server in self.servers]


class WaveFailed(Exception):
    """The first failure of a wave; ``server`` is None when it was the learner's sender."""

    def __init__(self, server: Server | None, cause: Exception) -> None:
        super().__init__(str(cause))
        self.server, self.cause = server, cause


class Courier(Protocol):
    """How the weights of a version come to servers that have begun an update. Failures are WaveFailed."""

    @property
    def session(self) -> bool:
        """Whether servers need begin and end around it."""
        ...

    @property
    def together(self) -> bool:
        """Whether the servers of a wave are updated by one broadcast."""
        ...

    async def prepare(self, wave: Wave) -> None:
        """What can be done while the servers still generate."""
        ...

    async def send(self, wave: Wave) -> dict[str, str]:
        """Everything to every server; checksums of it where they are known only now."""
        ...

    async def failed(self, reason: str) -> None:
        """Let nobody hang in what was begun."""
        ...

    async def release(self, weights: WeightsReady) -> None:
        """These weights will not be sent any more."""
        ...


async def blaming(wave: Wave, server: Server, act: Coroutine[Any, Any, None]) -> None:
    """Run ``act``, for which the wave waits; its failure as WaveFailed of ``server``."""
    wave.waits_for.add(server)
    try:
        await act
    except FAILURES as error:
        raise WaveFailed(server, error) from error
    wave.waits_for.remove(server)  # not when it is cancelled: then it is the one that was late


class Updater:
    """Takes waves through the steps. ``courier(weights)`` is the one for these weights; ``book`` is None unless
    updates are verified."""

    def __init__(
        self, courier: Callable[[WeightsReady], Courier], pause_mode: PauseMode, book: ChecksumBook | None = None
    ) -> None:
        self.courier = courier
        self._pause_mode = pause_mode
        self.book = book
        self._unfinished: set[Server] = set()

    async def run(self, wave: Wave) -> None:
        """The whole update; WaveFailed for what fails first. When it is cancelled, by a deadline, nobody hangs
        either."""
        try:
            await self._steps(wave)
        except BaseException as error:  # not handled here: a deadline, too, must leave no server waiting
            await self.courier(wave.weights).failed(str(error) or f"out of time in step {wave.at}")
            raise

    async def _steps(self, wave: Wave) -> None:
        courier, version = self.courier(wave.weights), str(wave.weights.version)
        await courier.prepare(wave)
        await self._each(wave, "pause", lambda server: server.client.pause(self._pause_mode))
        if courier.session:
            await self._each(wave, "begin", self._begin)
        wave.at = "send"
        expected = await courier.send(wave) or wave.weights.checksums
        if courier.session:
            await self._each(wave, "end", self._end)
        if (book := self.book) is not None:
            await self._each(wave, "verify", lambda server: book.check(server, version, expected))
        await self._each(wave, "continue", lambda server: server.client.resume())

    async def _each(self, wave: Wave, step: str, act: Callable[[Server], Coroutine[Any, Any, None]]) -> None:
        wave.at = step
        await run_all(*(blaming(wave, server, act(server)) for server in wave.servers))

    async def _begin(self, server: Server) -> None:
        if server in self._unfinished:  # else some servers refuse to begin
            with contextlib.suppress(ServerError, ProtocolError):  # it says that there is none
                await server.client.end_weight_update()
        self._unfinished.add(server)
        await server.client.begin_weight_update()

    async def _end(self, server: Server) -> None:
        await server.client.end_weight_update()
        self._unfinished.discard(server)
