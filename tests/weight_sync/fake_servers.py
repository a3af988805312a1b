"""Servers and a learner in memory that speak the protocol of an update, by "distributed" and by "tensor"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.fake_run import URL, FakeClient, config, fake_fleet
from vcpo_megatron.orchestrator.peers.weight_sync import WeightSync
from vcpo_megatron.rollout.client.http import ServerError
from vcpo_megatron.rollout.client.protocol import TRIAL
from vcpo_megatron.rollout.fleet.fleet import Fleet
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import run_beside
from vcpo_megatron.transport.messages import (
    BucketTaken,
    GroupOpened,
    OpenGroup,
    ReleaseWeights,
    SendWeights,
    StopSending,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from vcpo_megatron.types import PolicyVersion
from vcpo_megatron.weight_sync.orchestrator import Transports, Updater
from vcpo_megatron.weight_sync.verification import ChecksumVerifier

PLAN = [[["a", "float32", [2]]], [["b", "float32", [3]]], [["c", "float32", [1]]]]


class DistributedLearner:
    """The learner's sender and the broadcast in one: a bucket arrives when every member of the group asks for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.reasons: list[str] = []  # for which sending was stopped
        self.answer: Callable[[Any], None] = lambda message: None
        self.sizes: dict[str, int] = {}
        self.members: dict[str, set[int]] = {}
        self.waiting: dict[tuple[str, int], list[asyncio.Future[None]]] = {}
        self.silent = False
        self.backend = "gloo"
        self.sums: dict[str, str] = {}

    async def send(self, message: Any) -> None:
        self.log.append(type(message).__name__)
        match message:
            case OpenGroup(name, size):
                self.sizes[name], self.members[name] = size, set()
                if not self.silent:
                    self.answer(GroupOpened(name, "127.0.0.1", 9, self.backend))
            case SendWeights(name, version):
                self.answer(WeightsSent(name, version, self.sums))
            case StopSending(reason):
                self.reasons.append(reason)
                self.drop(ServerError(URL, "/update", 400, "connection closed by peer"))
            case ReleaseWeights(version):
                self.log[-1] = f"release {version}"

    def drop(self, error: Exception) -> None:
        self.sizes.clear()
        for futures in self.waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        self.waiting.clear()

    async def receive(self, name: str, number: int) -> None:
        """Bucket ``number``; -1 is what the group is tried with."""
        if name not in self.sizes:
            raise ServerError(URL, "/update", 400, f"group {name} does not exist")
        arrived = asyncio.get_running_loop().create_future()
        futures = self.waiting.setdefault((name, number), [])
        futures.append(arrived)
        if len(futures) == self.sizes[name] - 1:
            for future in self.waiting.pop((name, number)):
                future.set_result(None)
        await arrived


class DistributedClient(FakeClient):
    """A server of the real protocol. ``bucket_fault(number)`` is awaited before a bucket is received."""

    sender: DistributedLearner

    def reset(self) -> None:
        super().reset()
        self.groups: set[str] = set()
        self.sessions: list[str] = []
        self.received: list[str] = []
        self.sums = {"a": "1"}

    async def bucket_fault(self, number: int) -> None:
        pass

    async def init_weights_update_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        self._alive()
        assert (address, port, backend) == ("127.0.0.1", 9, self.sender.backend) and 1 <= rank_offset < world_size
        if group_name in self.groups:
            raise ServerError(URL, "/init", 400, "the name is taken")
        self.groups.add(group_name)
        self.sender.members[group_name].add(rank_offset)
        self.events.append(f"join {group_name} as {rank_offset} of {world_size}")

    async def destroy_weights_update_group(self, group_name: str) -> None:
        self._alive()
        self.groups.discard(group_name)

    async def begin_weight_update(self) -> None:
        """A session of its own needs no pause, unless the server would finish requests first."""
        self._alive()
        if self.session is not None:
            raise ServerError(URL, "/begin_weight_update", 400, "a session is open")
        self.session, self.received = [], []
        self.sessions.append("paused" if self.paused else "running")

    async def trial_fault(self) -> None:
        pass

    async def update_weights_from_distributed(
        self, entries: Any, group_name: str, version: str | None, flush_cache: bool = False
    ) -> None:
        self._alive()
        assert not flush_cache
        if self.session is None or group_name not in self.groups:
            raise ServerError(URL, "/update", 400, "no session, or not in the group")
        if entries is TRIAL:
            assert version is None
            await self.trial_fault()
            await self.sender.receive(group_name, -1)
            self._alive()
            self.events.append(f"tried {group_name} {self.sessions[-1]}")
            return
        assert self.paused and version is not None
        number = len(self.received)
        await self.bucket_fault(number)
        await self.sender.receive(group_name, number)
        self._alive()
        self.received.append(entries[0][0])
        self.session.append(version)

    async def end_weight_update(self) -> None:
        self._alive()
        if self.session is None:
            raise ServerError(URL, "/end", 400, "no session")
        if self.received == ["a", "b", "c"]:
            self.version = self.session[0]
            self.events.append(f"loaded {self.version}")
        self.session = None

    async def update_weights_from_disk(self, path: str, version: str, flush_cache: bool = False) -> None:
        self._alive()
        assert self.paused and not flush_cache
        if not Path(path).is_dir():
            raise ServerError(URL, "/disk", 400, "no such folder")
        self.version = version
        self.events.append(f"loaded {version}")

    async def weights_checksums(self) -> list[dict[str, str]]:
        return [self.sums]


Work = Callable[[Fleet, WeightSync, list[Any], DistributedLearner], Coroutine[Any, Any, None]]


def run_distributed(
    work: Work,
    *,
    servers: int = 2,
    wave: int = 2,
    timeout_s: float = 10.0,
    max_restarts: int = 0,
    verify: bool = False,
) -> None:
    sender = DistributedLearner()
    clients = [DistributedClient(i) for i in range(servers)]
    for client in clients:
        client.sender = sender
    run_sync(work, sender, clients, "g", wave, timeout_s, max_restarts, verify)


def run_sync(
    work: Callable[..., Coroutine[Any, Any, None]],
    sender: Any,
    clients: Sequence[Any],
    prefix: str,
    wave: int,
    timeout_s: float,
    max_restarts: int,
    verify: bool,
) -> None:
    """``work`` beside the sync of ``clients`` with the learner's ``sender``, and the fleet's supervision."""

    async def main() -> None:
        fleet = fake_fleet(config(rollout={"max_restarts": max_restarts}), Notifier(), clients, Path("/nowhere"))
        transports = Transports(lambda message: sender.send(message), prefix=prefix, timeout_s=timeout_s)
        sender.answer = transports.on_message
        updater = Updater(transports.of, "retract", ChecksumVerifier() if verify else None)
        sync = WeightSync(fleet, updater, wave=wave, timeout_s=timeout_s)
        fleet.launch()
        await run_beside(work(fleet, sync, clients, sender), fleet.supervise(), sync.run())

    asyncio.run(asyncio.wait_for(main(), 25))


def distributed(number: int) -> WeightsReady:
    return WeightsReady(PolicyVersion(1, number), "distributed", PLAN)


class TensorLearner:
    """The learner's sender of serialized buckets: two buckets ahead of what is taken, as the real one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.reasons: list[str] = []  # for which sending was stopped
        self.answer: Callable[[Any], None] = lambda message: None
        self.most = 0
        self._name, self._version, self._sent, self._taken = "", PolicyVersion(1, 0), 0, 0

    async def send(self, message: Any) -> None:
        match message:
            case SendWeights(name, version):
                self.log.append(f"send {version}")
                self._name, self._version, self._sent, self._taken = name, version, 0, 0
            case BucketTaken(name, number):
                assert (name, number) == (self._name, self._taken)
                self._taken += 1
            case StopSending(reason):
                self.reasons.append(reason)
                self.log.append("stop")
                self._name = ""
            case ReleaseWeights(version):
                self.log.append(f"release {version}")
        self._go_on()

    def _go_on(self) -> None:
        while self._name and self._sent < min(len(PLAN), self._taken + 2):
            self._sent += 1
            self.most = max(self.most, self._sent - self._taken)
            self.answer(WeightsBucket(self._name, self._sent - 1, f"{'abc'[self._sent - 1]} {self._version}".encode()))
        if self._name and self._taken == len(PLAN):
            self.answer(WeightsSent(self._name, self._version, {"a": "1"}))
            self._name = ""


class TensorClient(DistributedClient):
    """A server that takes serialized buckets. ``bucket_fault(number)`` as in DistributedClient."""

    async def update_weights_from_tensor(self, bucket: bytes, version: str, flush_cache: bool = False) -> None:
        self._alive()
        assert not flush_cache and self.paused
        if self.session is None:
            raise ServerError(URL, "/update", 400, "no session")
        await self.bucket_fault(len(self.received))
        self._alive()
        name, of = bucket.decode().split()
        assert of == version
        self.received.append(name)
        self.session.append(version)


def run_tensor(
    work: Callable[[Fleet, WeightSync, list[Any], TensorLearner], Coroutine[Any, Any, None]],
    *,
    servers: int = 2,
    wave: int = 2,
    timeout_s: float = 10.0,
    max_restarts: int = 0,
    verify: bool = False,
) -> None:
    run_sync(
        work, TensorLearner(), [TensorClient(i) for i in range(servers)], "t", wave, timeout_s, max_restarts, verify
    )


def tensor(number: int) -> WeightsReady:
    return WeightsReady(PolicyVersion(1, number), "tensor", PLAN)


#: Runs a scenario by broadcast, or with serialized buckets; and what is offered in it.
TRANSPORTS = pytest.mark.parametrize(("harness", "weights"), [(run_distributed, distributed), (run_tensor, tensor)])


async def hangs(*_: Any) -> None:
    await asyncio.sleep(60)


async def replaced_in_a_bucket(fleet: Fleet, sync: WeightSync, client: Any, weights: WeightsReady) -> None:
    """``client`` hangs in a bucket of ``weights``, is restarted, and takes them."""
    client.bucket_fault = hangs
    sync.offer(weights)
    await fleet.changes.until(lambda: client.events.count("start") == 2 or None, 8)
    client.bucket_fault = DistributedClient.bucket_fault.__get__(client)
    await sync.all_loaded(weights.version.number)
