"""The orchestrator's end of ``rollout.sync`` = "distributed".

Servers join a group of the learner's broadcaster once, and it broadcasts every bucket to all of a wave. Only the
orchestrator speaks to the servers: it says which bucket comes next while the learner sends. A group belongs to its
servers' processes; after any failure all groups are closed and opened anew, under names that were never used.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from ...config.checks.servers import TESTED_NCCL, TESTED_SGLANG
from ...rollout.client.http import ServerError
from ...rollout.client.protocol import TRIAL, ProtocolError
from ...run.tasks import RunError, run_all
from ...run.text import one_line
from ...transport.messages import (
    GroupOpened,
    Message,
    OpenGroup,
    ReleaseWeights,
    SendingFailed,
    SendWeights,
    StopSending,
    WeightsReady,
    WeightsSent,
)
from ..wave import FAILURES, Receiver, Send, SenderLost, Wave, WaveFailed, request, sender_answer

#: What to do where NCCL cannot be used between learner and servers.
_OTHER_WAYS = 'make both environments as docs/gpu.md has it, or set rollout.sync = "disk", or "tensor" for one rank'
#: Seconds that a server gets to leave a group that is closed.
_LEAVE_S = 5.0


class GroupRefused(RuntimeError):
    """A server cannot be in a group with the learner; the message goes on from its name, in words."""


class DistributedTransport:
    """Arguments as in ``weight_sync.orchestrator.Transports``. The ranks of a group are the learner's, then those of
    the first server, of the second, ..."""

    session, together = True, True

    def __init__(self, send: Send, *, prefix: str, timeout_s: float) -> None:
        self._send, self._prefix, self._timeout_s = send, prefix, timeout_s
        self._numbers = itertools.count(1)
        self._groups: dict[tuple[tuple[int, int], ...], str] = {}
        self._members: dict[str, Sequence[Receiver]] = {}
        self._untried: set[str] = set()
        self._backend = "gloo"
        self._opened: asyncio.Future[GroupOpened] | None = None
        self._sent: asyncio.Future[WeightsSent] | None = None

    def on_message(self, message: Message) -> None:
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

    async def prepare(self, wave: Wave[Receiver]) -> None:
        """Have the wave's group, opening it when it is new or a server's process is; RunError for a joined server that
        NCCL cannot serve."""
        servers = wave.servers
        key = _processes(servers)
        if key in self._groups:
            return
        if any(known != _processes(self._members[name]) for known, name in self._groups.items()):
            await self.abort("a server was restarted")
        name = f"{self._prefix}-{next(self._numbers)}"
        *offsets, size = itertools.accumulate((server.client.info.ranks for server in servers), initial=1)
        self._members[name] = servers
        self._opened = asyncio.get_running_loop().create_future()
        await self._send(OpenGroup(name, size))
        opened = await sender_answer(self._answer(self._opened), self._timeout_s)
        self._backend = opened.backend
        for server in servers:
            if opened.backend == "nccl" and not server.client.info.on_gpus:
                raise RunError(
                    f"{server.name} at {server.client.base_url} runs on CPUs, and the learner's weights go by NCCL, "
                    'which needs GPUs at both ends; set rollout.sync = "tensor" or "disk"'
                )
        await run_all(
            *(
                request(
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
        self._untried.add(name)

    @property
    def strands(self) -> bool:
        """A killed sender closes gloo's connections. Over NVLink NCCL's kernels wait for it in memory, for ever."""
        return self._backend == "nccl"

    def untried(self, wave: Wave[Receiver]) -> bool:
        return self._groups.get(_processes(wave.servers)) in self._untried

    async def trial(self, wave: Wave[Receiver]) -> None:
        name, wave.at = self._group_of(wave), "trial of the group"
        try:
            await run_all(
                *(request(wave, server, self._receive(wave, server, TRIAL, name, None)) for server in wave.servers)
            )
        except WaveFailed as failure:
            if not isinstance(failure.cause, ServerError):
                raise
            raise WaveFailed(failure.server, GroupRefused(self._explained(failure.cause))) from failure
        self._untried.discard(name)

    def _group_of(self, wave: Wave[Receiver]) -> str:
        name = self._groups.get(_processes(wave.servers))
        if name is None:
            raise WaveFailed(None, SenderLost("a server was restarted meanwhile"))
        return name

    def _explained(self, error: ServerError) -> str:
        what = f"the first number that was broadcast to it did not arrive ({one_line(error)})"
        if self._backend != "nccl":
            return what
        return (
            f"{what}; NCCL's version must be the same in the learner (logs/broadcaster.0.log) and in the server "
            f"(SGLang {TESTED_SGLANG} brings {TESTED_NCCL}), and so NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE; "
            f"{_OTHER_WAYS}"
        )

    async def transfer(self, wave: Wave[Receiver]) -> dict[str, str]:
        name = self._group_of(wave)
        self._sent = asyncio.get_running_loop().create_future()
        await self._send(SendWeights(name, wave.weights.version))
        *_, sent = await run_all(
            *(request(wave, server, self._buckets(wave, server, name)) for server in wave.servers),
            self._answer(self._sent),
        )
        assert isinstance(sent, WeightsSent)
        return sent.checksums

    async def _buckets(self, wave: Wave[Receiver], server: Receiver, name: str) -> None:
        weights = wave.weights
        for number, entries in enumerate(weights.plan, 1):
            wave.at = f"bucket {number} of {len(weights.plan)}"
            await self._receive(wave, server, entries, name, str(weights.version))

    @staticmethod
    async def _receive(wave: Wave[Receiver], server: Receiver, entries: Any, name: str, version: str | None) -> None:
        wave.receiving.add(server)
        try:
            await server.client.update_weights_from_distributed(entries, name, version, flush_cache=False)
        except (ServerError, ProtocolError):  # it has answered; one that was cut off, or lost, may still wait
            wave.receiving.discard(server)
            raise
        wave.receiving.discard(server)

    @staticmethod
    async def _answer(future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        except SenderLost as error:
            raise WaveFailed(None, error) from error

    async def abort(self, reason: str) -> None:
        """Close every group: the learner kills its broadcaster, so servers that wait in a broadcast see it go."""
        members, self._members, self._groups = self._members, {}, {}
        self._untried.clear()
        await self._send(StopSending(reason))

        async def leave(server: Receiver, name: str) -> None:
            try:
                async with asyncio.timeout(_LEAVE_S):
                    await server.client.destroy_weights_update_group(name)
            except (*FAILURES, TimeoutError) as error:  # it has died, or the group has: nothing to leave any more
                print(f"{server.name} did not leave group {name}: {one_line(error)}", flush=True)

        await asyncio.gather(*(leave(server, name) for name, servers in members.items() for server in servers))

    async def release(self, weights: WeightsReady) -> None:
        await self._send(ReleaseWeights(weights.version))


def _processes(servers: Sequence[Receiver]) -> tuple[tuple[int, int], ...]:
    """The processes behind ``servers``: index and incarnation of each."""
    return tuple((server.index, server.incarnation) for server in servers)
