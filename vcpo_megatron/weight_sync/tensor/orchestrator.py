"""The orchestrator's end of ``rollout.sync`` = "tensor".

The learner serializes one bucket after the other; each is forwarded over HTTP to all servers of a wave, and makes room
for another one when all have it.
"""

from __future__ import annotations

import asyncio
import itertools

from ...run.tasks import RunError, run_all
from ...transport.messages import (
    BucketTaken,
    Message,
    ReleaseWeights,
    SendingFailed,
    SendWeights,
    StopSending,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from ..wave import Receiver, Send, SenderLost, Wave, WaveFailed, request, sender_answer


class TensorTransport:
    """Arguments as in ``weight_sync.orchestrator.Transports``."""

    session, together, strands = True, True, False

    def __init__(self, send: Send, *, prefix: str, timeout_s: float) -> None:
        self._send, self._prefix, self._timeout_s = send, prefix, timeout_s
        self._numbers = itertools.count(1)
        self._name = ""
        self._inbox: asyncio.Queue[WeightsBucket | WeightsSent | SendingFailed] = asyncio.Queue()

    def on_message(self, message: Message) -> None:
        match message:
            case WeightsBucket(name) | WeightsSent(name) | SendingFailed(name) if name == self._name:
                self._inbox.put_nowait(message)

    async def prepare(self, wave: Wave[Receiver]) -> None:
        """RunError for a joined server of several ranks, which only it knows of."""
        for server in wave.servers:
            if (ranks := server.client.info.ranks) > 1:
                raise RunError(
                    f"{server.name} at {server.client.base_url} has {ranks} tensor-parallel ranks, and weights go by "
                    'rollout.sync = "tensor" to servers of one; set it to "distributed" or "disk"'
                )

    def untried(self, wave: Wave[Receiver]) -> bool:
        """Servers share no group here."""
        return False

    async def trial(self, wave: Wave[Receiver]) -> None:
        pass

    async def transfer(self, wave: Wave[Receiver]) -> dict[str, str]:
        weights, name = wave.weights, f"{self._prefix}-{next(self._numbers)}"
        self._name, self._inbox = name, asyncio.Queue()
        try:
            await self._send(SendWeights(name, weights.version))
            while True:
                match await sender_answer(self._inbox.get(), self._timeout_s):
                    case WeightsBucket(_, number, data):
                        wave.at = f"bucket {number + 1} of {len(weights.plan)}"
                        await run_all(*(request(wave, server, _load(server, data, wave)) for server in wave.servers))
                        await self._send(BucketTaken(name, number))
                        del data  # else two would be held while the next one comes
                    case WeightsSent(_, _, checksums):
                        return checksums
                    case SendingFailed(_, reason):
                        raise WaveFailed(None, SenderLost(reason))
        finally:
            self._name, self._inbox = "", asyncio.Queue()

    async def abort(self, reason: str) -> None:
        """The learner may wait for room for another bucket."""
        await self._send(StopSending(reason))

    async def release(self, weights: WeightsReady) -> None:
        await self._send(ReleaseWeights(weights.version))


async def _load(server: Receiver, data: bytes, wave: Wave[Receiver]) -> None:
    await server.client.update_weights_from_tensor(data, str(wave.weights.version), flush_cache=False)
