"""The orchestrator's end of ``rollout.sync`` = "disk": the learner wrote a folder; each server reads it."""

from __future__ import annotations

import asyncio
import shutil

from ...run.tasks import run_all
from ...transport.messages import Message, WeightsReady
from ..wave import Receiver, Wave, request


class DiskTransport:
    session, together, strands = False, False, False

    def on_message(self, message: Message) -> None:
        pass

    async def prepare(self, wave: Wave[Receiver]) -> None:
        pass

    def untried(self, wave: Wave[Receiver]) -> bool:
        """Servers share no group here."""
        return False

    async def trial(self, wave: Wave[Receiver]) -> None:
        pass

    async def transfer(self, wave: Wave[Receiver]) -> dict[str, str]:
        weights = wave.weights
        wave.at = f"read {weights.path}"
        version = str(weights.version)
        await run_all(
            *(
                request(wave, server, server.client.update_weights_from_disk(weights.path, version, flush_cache=False))
                for server in wave.servers
            )
        )
        return {}

    async def abort(self, reason: str) -> None:
        pass

    async def release(self, weights: WeightsReady) -> None:
        await asyncio.to_thread(shutil.rmtree, weights.path, ignore_errors=True)
