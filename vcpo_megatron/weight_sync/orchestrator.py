"""One weight update of one wave of servers, from the pause to the first request after it.

    prepare --> pause --> begin --> send --> end --> verify --> continue --> done
       |          |         |        |        |        |           |
       +----------+---------+--------+--------+--------+-----------+--> failed: the server stays paused, without a
                                                                        version; its next update ends this one first,
                                                                        or ``leave`` does, at the end of the run

A group that was just opened is tried with one number first: what keeps NCCL from it (unlike versions, a network that it
cannot use) is then named before any server is paused, unless one of them already serves. A server takes nothing from a
group without a session, for which it would finish its requests: those that serve are tried in their pause.

The whole update has one deadline, the caller's; ``Wave.at`` is the step it had reached. Servers that share what is
sent fail together, and the transport lets nobody hang in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ..rollout.client.http import ServerError
from ..rollout.client.protocol import PauseMode, ProtocolError
from ..run.tasks import run_all
from ..run.text import one_line
from ..transport.messages import Message, WeightsReady
from .disk.orchestrator import DiskTransport
from .distributed.orchestrator import DistributedTransport
from .tensor.orchestrator import TensorTransport
from .verification import ChecksumVerifier
from .wave import FAILURES, Receiver, Send, Transport, Wave, request

#: Seconds that a server has to be resumed when the run ends.
_LEAVE_S = 5.0


class Transports:
    """The transports by their names in ``rollout.sync``. Which one is used says the learner: it alone knows whether it
    has GPUs, which "auto" depends on.

    ``send`` sends to the learner, whose answers come to ``on_message``; ``prefix`` makes names of requests and groups
    unique among runs and attempts; ``timeout_s`` is that of a wave.
    """

    def __init__(self, send: Send, *, prefix: str, timeout_s: float) -> None:
        self._by_name: dict[str, Transport] = {
            "tensor": TensorTransport(send, prefix=prefix, timeout_s=timeout_s),
            "distributed": DistributedTransport(send, prefix=prefix, timeout_s=timeout_s),
            "disk": DiskTransport(),
        }

    def on_message(self, message: Message) -> None:
        """What the learner's sender says, to the transport that waits for it."""
        for transport in self._by_name.values():
            transport.on_message(message)

    def of(self, weights: WeightsReady) -> Transport:
        """The one that ``weights`` are offered by."""
        return self._by_name[weights.transport]


class Updater:
    """Takes waves through the steps. ``transport(weights)`` is the one for these weights; ``verifier`` is None unless
    updates are verified."""

    def __init__(
        self,
        transport: Callable[[WeightsReady], Transport],
        pause_mode: PauseMode,
        verifier: ChecksumVerifier | None = None,
    ) -> None:
        self.transport = transport
        self._pause_mode = pause_mode
        self.verifier = verifier
        self._unfinished: set[Receiver] = set()
        self._paused: set[Receiver] = set()

    async def run(self, wave: Wave[Receiver]) -> None:
        """The whole update; WaveFailed for what fails first. When it is cancelled, by a deadline, nobody hangs
        either."""

        async def abort_unless_done(_: object, error: BaseException | None, __: object) -> None:
            if error is not None:
                await self.transport(wave.weights).abort(str(error) or f"out of time in step {wave.at}")

        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_exit(abort_unless_done)
            await self._steps(wave)

    async def _steps(self, wave: Wave[Receiver]) -> None:
        transport, version = self.transport(wave.weights), str(wave.weights.version)
        await transport.prepare(wave)
        if transport.untried(wave) and all(server.idle for server in wave.servers):
            await self._each(wave, "begin a trial", self._begin)
            await transport.trial(wave)
            await self._each(wave, "end a trial", self._end)
        await self._each(wave, "pause", self._pause)
        if transport.session:
            await self._each(wave, "begin", self._begin)
        if transport.untried(wave):
            await transport.trial(wave)
        wave.at = "send"
        expected = await transport.transfer(wave) or wave.weights.checksums
        if transport.session:
            await self._each(wave, "end", self._end)
        if (verifier := self.verifier) is not None:
            await self._each(
                wave, "verify", lambda server: verifier.check(server.name, server.client, version, expected)
            )
        await self._each(wave, "continue", self._continue)

    async def leave(self, servers: Iterable[Receiver]) -> None:
        """The run ends and ``servers`` go on without it: those that it has paused generate again, as far as they can be
        reached within ``_LEAVE_S`` seconds. What they hold then is no version; who uses them next gives them all
        weights."""

        async def leave(server: Receiver) -> None:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await self._continue(server)
            except (*FAILURES, TimeoutError) as error:
                print(
                    f"{server.name} at {server.client.base_url} is left paused, {one_line(error)}; the next run that "
                    "joins it resumes it",
                    flush=True,
                )

        await asyncio.gather(*(leave(server) for server in servers if server in self._paused))

    async def _pause(self, server: Receiver) -> None:
        self._paused.add(server)  # before it is known: the run may end meanwhile
        await server.client.pause(self._pause_mode)

    async def _continue(self, server: Receiver) -> None:
        await server.client.resume()
        self._paused.discard(server)

    async def _each(
        self, wave: Wave[Receiver], step: str, call: Callable[[Receiver], Coroutine[Any, Any, None]]
    ) -> None:
        wave.at = step
        await run_all(*(request(wave, server, call(server)) for server in wave.servers))

    async def _begin(self, server: Receiver) -> None:
        if server in self._unfinished:  # else some servers refuse to begin
            with contextlib.suppress(ServerError, ProtocolError):  # it says that there is none
                await server.client.end_weight_update()
        self._unfinished.add(server)
        await server.client.begin_weight_update()

    async def _end(self, server: Receiver) -> None:
        await server.client.end_weight_update()
        self._unfinished.discard(server)
