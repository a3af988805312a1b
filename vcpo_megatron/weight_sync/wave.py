"""A wave: servers that are updated to one version together. And what brings the weights to them: a ``Transport``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from ..rollout.client.http import ServerClient, ServerError, ServerUnavailable
from ..rollout.client.protocol import ProtocolError
from ..transport.messages import Message, WeightsReady
from .verification import ChecksumError

_T = TypeVar("_T")

#: What a server, or its connection, may do wrong during an update.
FAILURES = (ServerError, ServerUnavailable, ProtocolError, ChecksumError)

#: Sends a message to the learner.
Send = Callable[[Message], Coroutine[Any, Any, None]]


class Receiver(Protocol):
    """What an update needs of a server. ``incarnation`` counts its processes: another one has joined no group."""

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def idle(self) -> bool:
        """Whether it generates nothing, and so needs no pause."""
        ...

    @property
    def client(self) -> ServerClient: ...


_R_co = TypeVar("_R_co", bound=Receiver, covariant=True)


@dataclass(eq=False)
class Wave(Generic[_R_co]):
    """``servers``, in the ``incarnations`` that they have now, on their way to ``weights``; ``at`` is the step that is
    being done, ``waits_for`` are those that were asked and have not answered, and ``receiving`` those of them that are
    in a broadcast."""

    servers: Sequence[_R_co]
    weights: WeightsReady
    at: str = "prepare"
    incarnations: Sequence[int] = field(init=False)
    waits_for: set[_R_co] = field(default_factory=set)
    receiving: set[_R_co] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.incarnations = [server.incarnation for server in self.servers]


class WaveFailed(Exception):
    """The first failure of a wave; ``server`` is None when it was the learner's sender."""

    def __init__(self, server: Receiver | None, cause: Exception) -> None:
        super().__init__(str(cause))
        self.server, self.cause = server, cause


class SenderLost(RuntimeError):
    """The learner cannot send; the message says why."""


class Transport(Protocol):
    """How the weights of a version come to servers that have begun an update. Failures are WaveFailed."""

    @property
    def session(self) -> bool:
        """Whether servers need begin and end around it."""
        ...

    @property
    def together(self) -> bool:
        """Whether the servers of a wave share what is sent, and so fail together."""
        ...

    @property
    def strands(self) -> bool:
        """Whether a server that is in what was given up does not notice, and has to be replaced."""
        ...

    def on_message(self, message: Message) -> None:
        """What the learner's sender says; an answer to a request that was given up is dropped."""
        ...

    async def prepare(self, wave: Wave[Receiver]) -> None:
        """What can be done while the servers still generate."""
        ...

    def untried(self, wave: Wave[Receiver]) -> bool:
        """Whether nothing has come to the wave's servers yet by what they share."""
        ...

    async def trial(self, wave: Wave[Receiver]) -> None:
        """The least that can be sent, to every server; before the first transfer by what is untried."""
        ...

    async def transfer(self, wave: Wave[Receiver]) -> dict[str, str]:
        """Everything to every server; checksums of it where they are known only now."""
        ...

    async def abort(self, reason: str) -> None:
        """Let nobody hang in what was begun."""
        ...

    async def release(self, weights: WeightsReady) -> None:
        """These weights will not be sent any more."""
        ...


async def request(wave: Wave[Receiver], server: Receiver, call: Coroutine[Any, Any, None]) -> None:
    """Await ``call`` to ``server``, for which the wave waits; its failure as WaveFailed of ``server``."""
    wave.waits_for.add(server)
    try:
        await call
    except FAILURES as error:
        raise WaveFailed(server, error) from error
    wave.waits_for.remove(server)  # not when it is cancelled: then it is the one that was late


async def sender_answer(answer: Awaitable[_T], timeout_s: float) -> _T:
    """What the learner's sender answers; WaveFailed, of no server, after half the time of a wave. Else that would run
    out, and the server be replaced for it."""
    try:
        async with asyncio.timeout(timeout_s / 2):
            return await answer
    except TimeoutError:
        lost = SenderLost(
            f"weight sender did not respond within {timeout_s / 2:g} s (rollout.sync_timeout_s / 2); see "
            "logs/learner.0.log"
        )
        raise WaveFailed(None, lost) from None
