"""An update by broadcast, by a disk, and its verification: every transition, against servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.fake_run import URL, FakeClient, config, fake_fleet
from vcpo_megatron.orchestrator.peers.weight_sync import SyncError, WeightSync
from vcpo_megatron.rollout.client.http import ServerError, ServerUnavailable
from vcpo_megatron.rollout.client.server_info import ServerInfo
from vcpo_megatron.rollout.fleet.fleet import Changes, Fleet
from vcpo_megatron.run.tasks import RunError, run_beside
from vcpo_megatron.transport.messages import (
    BucketTaken,
    GroupOpened,
    OpenGroup,
    ReleaseWeights,
    SendingFailed,
    SendWeights,
    StopSending,
    WeightsBucket,
    WeightsReady,
    WeightsSent,
)
from vcpo_megatron.types import PolicyVersion
from vcpo_megatron.weight_sync.checksums import ChecksumBook, ChecksumError
from vcpo_megatron.weight_sync.couriers import Couriers, GroupCourier
from vcpo_megatron.weight_sync.update import Updater, Wave

pytestmark = pytest.mark.timeout(30)

PLAN = [[["a", "float32", [2]]], [["b", "float32", [3]]], [["c", "float32", [1]]]]


class Sender:
    """The learner's sender and the broadcast in one: a bucket arrives when every member of the group asks for it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.heard: Callable[[Any], None] = lambda message: None
        self.sizes: dict[str, int] = {}
        self.members: dict[str, set[int]] = {}
        self.waiting: dict[tuple[str, int], list[asyncio.Future[None]]] = {}
        self.silent = False
        self.sums: dict[str, str] = {}

    async def tell(self, message: Any) -> None:
        self.told.append(type(message).__name__)
        match message:
            case OpenGroup(name, size):
                self.sizes[name], self.members[name] = size, set()
                if not self.silent:
                    self.heard(GroupOpened(name, "127.0.0.1", 9, "gloo"))
            case SendWeights(name, version):
                self.heard(WeightsSent(name, version, self.sums))
            case StopSending():
                self.drop(ServerError(URL, "/update", 400, "connection closed by peer"))
            case ReleaseWeights(version):
                self.told[-1] = f"release {version}"

    def drop(self, error: Exception) -> None:
        self.sizes.clear()
        for futures in self.waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        self.waiting.clear()

    async def receive(self, name: str, number: int) -> None:
        if name not in self.sizes:
            raise ServerError(URL, "/update", 400, f"group {name} does not exist")
        arrived = asyncio.get_running_loop().create_future()
        futures = self.waiting.setdefault((name, number), [])
        futures.append(arrived)
        if len(futures) == self.sizes[name] - 1:
            for future in self.waiting.pop((name, number)):
                future.set_result(None)
        await arrived


class GroupClient(FakeClient):
    """A server of the real protocol. ``bucket_fault(number)`` is awaited before a bucket is received."""

    sender: Sender

    def reset(self) -> None:
        super().reset()
        self.groups: set[str] = set()
        self.received: list[str] = []
        self.sums = {"a": "1"}

    async def bucket_fault(self, number: int) -> None:
        pass

    async def init_weights_update_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        self._alive()
        assert (address, port, backend) == ("127.0.0.1", 9, "gloo") and 1 <= rank_offset < world_size
        if group_name in self.groups:
            raise ServerError(URL, "/init", 400, "the name is taken")
        self.groups.add(group_name)
        self.sender.members[group_name].add(rank_offset)
        self.events.append(f"join {group_name} as {rank_offset} of {world_size}")

    async def destroy_weights_update_group(self, group_name: str) -> None:
        self._alive()
        self.groups.discard(group_name)

    async def begin_weight_update(self) -> None:
        await super().begin_weight_update()
        self.received = []

    async def update_weights_from_distributed(
        self, entries: Any, group_name: str, version: str, flush_cache: bool = False
    ) -> None:
        self._alive()
        assert not flush_cache and self.paused
        if self.session is None or group_name not in self.groups:
            raise ServerError(URL, "/update", 400, "no session, or not in the group")
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


Work = Callable[[Fleet, WeightSync, list[Any], Sender], Coroutine[Any, Any, None]]


def with_groups(
    work: Work,
    *,
    servers: int = 2,
    wave: int = 2,
    timeout_s: float = 10.0,
    max_restarts: int = 0,
    verify: bool = False,
) -> None:
    sender = Sender()
    clients = [GroupClient(i) for i in range(servers)]
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
        fleet = fake_fleet(config(rollout={"max_restarts": max_restarts}), Changes(), clients, Path("/nowhere"))
        couriers = Couriers(lambda message: sender.tell(message), prefix=prefix, timeout_s=timeout_s)
        sender.heard = couriers.heard
        updater = Updater(couriers, "retract", ChecksumBook() if verify else None)
        sync = WeightSync(fleet, updater, wave=wave, timeout_s=timeout_s)
        fleet.launch()
        await run_beside(work(fleet, sync, clients, sender), fleet.supervise(), sync.run())

    asyncio.run(asyncio.wait_for(main(), 25))


def planned(number: int) -> WeightsReady:
    return WeightsReady(PolicyVersion(1, number), "distributed", PLAN)


class Texts:
    """The learner's sender of text: two buckets ahead of what is taken, as the real one."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.heard: Callable[[Any], None] = lambda message: None
        self.most = 0
        self._name, self._version, self._sent, self._taken = "", PolicyVersion(1, 0), 0, 0

    async def tell(self, message: Any) -> None:
        match message:
            case SendWeights(name, version):
                self.told.append(f"send {version}")
                self._name, self._version, self._sent, self._taken = name, version, 0, 0
            case BucketTaken(name, number):
                assert (name, number) == (self._name, self._taken)
                self._taken += 1
            case StopSending():
                self.told.append("stop")
                self._name = ""
            case ReleaseWeights(version):
                self.told.append(f"release {version}")
        self._go_on()

    def _go_on(self) -> None:
        while self._name and self._sent < min(len(PLAN), self._taken + 2):
            self._sent += 1
            self.most = max(self.most, self._sent - self._taken)
            self.heard(WeightsBucket(self._name, self._sent - 1, f"{'abc'[self._sent - 1]} {self._version}".encode()))
        if self._name and self._taken == len(PLAN):
            self.heard(WeightsSent(self._name, self._version, {"a": "1"}))
            self._name = ""


class TextClient(GroupClient):
    """A server that takes text. ``bucket_fault(number)`` as in GroupClient."""

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


def with_texts(
    work: Callable[[Fleet, WeightSync, list[Any], Texts], Coroutine[Any, Any, None]],
    *,
    wave: int = 2,
    timeout_s: float = 10.0,
    max_restarts: int = 0,
    verify: bool = False,
) -> None:
    run_sync(work, Texts(), [TextClient(i) for i in range(2)], "t", wave, timeout_s, max_restarts, verify)


def text(number: int) -> WeightsReady:
    return WeightsReady(PolicyVersion(1, number), "tensor", PLAN)


#: Runs a scenario by broadcast, or with buckets of text; and what is offered in it.
WAYS = pytest.mark.parametrize(("harness", "weights"), [(with_groups, planned), (with_texts, text)])


def test_a_wave_joins_one_group_once_and_uses_it_again() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        for number in range(3):
            sync.offer(planned(number))
            await sync.all_loaded(number)
        assert [e for e in clients[1].events if e.startswith("join")] == ["join g-1 as 2 of 3"]
        assert sender.told.count("OpenGroup") == 1 and sender.told.count("SendWeights") == 3
        assert [e for e in clients[0].events if "loaded" in e] == ["loaded 1.0", "loaded 1.1", "loaded 1.2"]
        assert not clients[0].paused and not clients[1].paused
        await fleet.changes.until(lambda: ("release 1.1" in sender.told) or None, 5)
        assert "release 1.2" not in sender.told

    with_groups(work)


def test_a_server_that_refuses_a_bucket_leaves_nobody_hanging() -> None:
    """In bucket 1 of 3, while the other server waits in the broadcast of it; both hold the version in the end."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        async def refuse(number: int) -> None:
            if number == 1:
                await asyncio.sleep(0.05)  # the other one is in the broadcast by now
                clients[0].bucket_fault = GroupClient.bucket_fault.__get__(clients[0])
                raise ServerError(URL, "/update", 400, "shape mismatch")

        clients[0].bucket_fault = refuse
        sync.offer(planned(0))
        await sync.all_loaded(0)
        assert "StopSending" in sender.told
        joined = [event.split()[1] for client in clients for event in client.events if event.startswith("join")]
        assert len(joined) == len({(n, i) for i, n in enumerate(joined)}) and "g-1" in joined and "g-2" in joined
        assert clients[0].version == clients[1].version == "1.0"

    with_groups(work)


@WAYS
def test_a_bucket_refused_by_one_server_again_and_again_ends_the_run_naming_it(harness: Any, weights: Any) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Any) -> None:
        async def refuse(number: int) -> None:
            raise ServerError(URL, "/update", 400, "shape mismatch")

        clients[1].bucket_fault = refuse
        sync.offer(weights(0))
        await asyncio.sleep(10)

    with pytest.raises(SyncError, match=r"rollout server 1 refused weights 1\.0 twice: .*shape mismatch"):
        harness(work)


@WAYS
def test_a_server_that_dies_in_a_bucket_comes_back_alone_and_current(harness: Any, weights: Any) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Any) -> None:
        sync.offer(weights(0))
        await sync.all_loaded(0)

        async def die(number: int) -> None:
            if number == 2:
                clients[0].process.code = -9
                clients[0].bucket_fault = GroupClient.bucket_fault.__get__(clients[0])

        clients[0].bucket_fault = die
        sync.offer(weights(1))
        await sync.all_loaded(1)
        assert clients[0].events.count("start") == 2 and clients[1].events.count("start") == 1

    harness(work, max_restarts=1)


def test_a_server_that_is_back_before_the_update_is_given_up_has_died_once() -> None:
    """Leaving the group takes longer than a restart: the new process has done nothing wrong."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        sync.offer(planned(0))
        await sync.all_loaded(0)

        async def die(number: int) -> None:
            clients[0].bucket_fault = GroupClient.bucket_fault.__get__(clients[0])
            clients[0].process.code = -9
            clients[0]._alive()

        async def leave(name: str) -> None:
            await fleet.changes.until(lambda: (fleet.servers[0].starts == 2 and fleet.servers[0].available) or None, 4)
            raise ServerUnavailable(URL, "/destroy", "Cannot connect")

        clients[0].bucket_fault, clients[0].destroy_weights_update_group = die, leave
        sync.offer(planned(1))
        await sync.all_loaded(1)
        assert clients[0].events.count("start") == 2

    with_groups(work, servers=1, max_restarts=1)


def test_a_server_that_is_restarted_between_two_steps_of_an_update_does_not_end_the_run() -> None:
    """It had begun; the other one had not when it came back: the group of its former process is not used."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        async def late() -> None:
            clients[1].begin_weight_update = GroupClient.begin_weight_update.__get__(clients[1])
            await asyncio.sleep(0.02)
            clients[0].process.code = -9
            await fleet.changes.until(lambda: (fleet.servers[0].starts == 2 and fleet.servers[0].available) or None, 4)
            await clients[1].begin_weight_update()

        clients[1].begin_weight_update = late
        sync.offer(planned(0))
        await sync.all_loaded(0)
        assert clients[0].events.count("start") == 2

    with_groups(work, max_restarts=1)


def test_a_server_that_answers_late_is_late_for_its_wave_only_until_the_deadline() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        async def late(number: int) -> None:
            await asyncio.sleep(0.3)

        clients[0].bucket_fault = late
        sync.offer(planned(0))
        await sync.all_loaded(0)

    with_groups(work)


def test_a_server_that_hangs_in_a_bucket_ends_the_run_naming_the_step() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        async def hang(number: int) -> None:
            if number == 1:
                await asyncio.sleep(60)

        clients[0].bucket_fault = hang
        sync.offer(planned(0))
        await asyncio.sleep(10)

    match = r"server 0 did not take weights 1\.0 within 1 s \(rollout\.sync_timeout_s\) in step: bucket 2 of 3"
    with pytest.raises(SyncError, match=match):
        with_groups(work, servers=1, timeout_s=1.0)


async def hangs(*_: Any) -> None:
    await asyncio.sleep(60)


async def replaced_in_a_bucket(fleet: Fleet, sync: WeightSync, client: Any, weights: WeightsReady) -> None:
    """``client`` hangs in a bucket of ``weights``, is restarted, and takes them."""
    client.bucket_fault = hangs
    sync.offer(weights)
    await fleet.changes.until(lambda: client.events.count("start") == 2 or None, 8)
    client.bucket_fault = GroupClient.bucket_fault.__get__(client)
    await sync.all_loaded(weights.version.number)


def test_a_hanging_server_is_replaced_where_it_may_be_and_the_other_does_not_wait_for_it_twice() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        await replaced_in_a_bucket(fleet, sync, clients[0], planned(0))
        assert clients[1].events.count("start") == 1

    with_groups(work, timeout_s=1.0, max_restarts=2)


def test_a_broadcast_that_fails_at_the_learner_is_tried_once_more() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        async def lose(number: int) -> None:
            if number == 1:
                clients[0].bucket_fault = GroupClient.bucket_fault.__get__(clients[0])
                sender.heard(SendingFailed("g-1", "connection reset"))
                await asyncio.sleep(60)

        original = sender.tell

        async def tell(message: Any) -> None:  # what was sent is not said before it has left
            if isinstance(message, SendWeights) and sender.told.count("SendWeights") == 0:
                sender.told.append("SendWeights")
                return
            await original(message)

        sync._updater.courier(planned(0))._tell = tell  # type: ignore[attr-defined]
        clients[0].bucket_fault = lose
        sync.offer(planned(0))
        await sync.all_loaded(0)
        assert sender.told.count("OpenGroup") == 2

    with_groups(work, servers=1)


def test_a_learner_that_does_not_open_the_group_ends_the_run() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        sender.silent = True
        sync.offer(planned(0))
        await asyncio.sleep(10)

    with pytest.raises(SyncError, match="sender of weights is silent"):
        with_groups(work, servers=1, timeout_s=0.4)


def test_waves_leave_the_others_serving_and_each_server_has_its_own_version() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        sync.offer(planned(0))
        await sync.all_loaded(0)
        seen: set[tuple[int, ...]] = set()

        async def look(number: int) -> None:
            await asyncio.sleep(0.01)
            seen.add(tuple(client.index for client in clients if client.paused))

        for client in clients:
            client.bucket_fault = look
        sync.offer(planned(1))
        versions = set()

        def note() -> bool | None:
            versions.add(tuple(server.version.number if server.version else None for server in fleet.servers))
            return versions if all(server.version == PolicyVersion(1, 1) for server in fleet.servers) else None  # type: ignore[return-value]

        await fleet.changes.until(note, 8)
        assert seen == {(0, 1), (2, 3)}
        assert (1, 1, 0, 0) in versions
        assert [e for e in clients[2].events if e.startswith("join")] == ["join g-1 as 3 of 5", "join g-3 as 1 of 3"]

    with_groups(work, servers=4, wave=2)


def test_the_ranks_of_joined_servers_follow_one_another_in_the_group() -> None:
    """The learner is 0; servers of 1, 4 and 2 ranks are 1, 2..5 and 6..7 of 8."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        for client, ranks in zip(clients, (1, 4, 2), strict=True):
            client.info = ServerInfo(ranks=ranks)
        opened: list[int] = []
        told, sender.members["g-1"] = sender.tell, set()

        async def tell(message: Any) -> None:
            if isinstance(message, OpenGroup):
                opened.append(message.world_size)
            await told(message)

        groups = GroupCourier(tell, prefix="g", timeout_s=2.0)
        sender.heard = groups.heard
        await groups.prepare(Wave(fleet.servers, planned(0)))
        assert opened == [8]
        joined = [event for client in clients for event in client.events if event.startswith("join")]
        assert joined == ["join g-1 as 1 of 8", "join g-1 as 2 of 8", "join g-1 as 6 of 8"]

    with_groups(work, servers=3)


def test_a_wave_shares_the_buckets_of_text_and_no_third_one_is_made() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Texts) -> None:
        for number in range(3):
            sync.offer(text(number))
            await sync.all_loaded(number)
        await fleet.changes.until(lambda: ("release 1.1" in sender.told) or None, 5)
        assert [told for told in sender.told if "send" in told] == ["send 1.0", "send 1.1", "send 1.2"]
        assert "stop" not in sender.told and "release 1.2" not in sender.told
        assert sender.most == 2
        for client in clients:
            assert [e for e in client.events if "loaded" in e] == ["loaded 1.0", "loaded 1.1", "loaded 1.2"]
            assert not client.paused
        assert sync.take_metrics()["sync/verified"] == 6

    with_texts(work, verify=True)


def test_a_refused_bucket_of_text_stops_the_sender_and_each_is_tried_alone() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Texts) -> None:
        async def refuse(number: int) -> None:
            if number == 1:
                clients[0].bucket_fault = GroupClient.bucket_fault.__get__(clients[0])
                raise ServerError(URL, "/update", 400, "shape mismatch")

        clients[0].bucket_fault = refuse
        sync.offer(text(0))
        await sync.all_loaded(0)
        assert sender.told == ["send 1.0", "stop", "send 1.0", "send 1.0"]

    with_texts(work)


def test_the_one_server_that_is_late_is_replaced_and_the_other_is_updated_at_once() -> None:
    """In a bucket of text, and in a step of the protocol: the deadline is not waited for once more."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Texts) -> None:
        await replaced_in_a_bucket(fleet, sync, clients[0], text(0))
        assert sender.told == ["send 1.0", "stop", "send 1.0", "send 1.0"]
        pause, clients[1].pause = clients[1].pause, hangs
        sync.offer(text(1))
        await fleet.changes.until(lambda: clients[1].events.count("start") == 2 or None, 20)
        clients[1].pause = pause
        await sync.all_loaded(1)
        assert [told for told in sender.told[4:] if told != "release 1.0"] == ["stop", "send 1.1", "send 1.1"]
        assert [client.events.count("start") for client in clients] == [2, 2]

    with_texts(work, timeout_s=1.5, max_restarts=1)


def test_a_sender_of_text_that_fails_and_then_is_silent_ends_the_run_and_no_server_is_blamed() -> None:
    """It might be replaced, and is not: it did nothing wrong."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Texts) -> None:
        async def told(message: Any) -> None:
            sender.told.append(type(message).__name__)
            if isinstance(message, SendWeights) and sender.told.count("SendWeights") == 1:
                sender.heard(SendingFailed(message.name, "took no bucket"))
            assert all(client.events.count("start") == 1 for client in clients)

        sender.tell = told  # type: ignore[method-assign]
        sync.offer(text(0))
        await asyncio.sleep(10)

    match = (
        r"weights 1\.0 did not reach rollout server 0 twice: the learner's sender of weights is silent for 0\.5 s "
        r"\(half of rollout\.sync_timeout_s\), see the logs of the learner$"
    )
    with pytest.raises(SyncError, match=match):
        with_texts(work, timeout_s=1.0, max_restarts=3)


def test_the_failure_of_what_was_given_up_is_not_that_of_what_is_asked_for_now() -> None:
    """A server refuses just when the sender fails: its word of that comes when the next request is on its way."""

    async def texts(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Texts) -> None:
        await refused_once(sync, clients, text(0))
        assert sender.told == ["send 1.0", "stop", "send 1.0", "send 1.0"]

    async def groups(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        await refused_once(sync, clients, planned(0))
        assert sender.told.count("OpenGroup") == sender.told.count("SendWeights") == 3

    async def refused_once(sync: WeightSync, clients: list[Any], weights: WeightsReady) -> None:
        courier: Any = sync._updater.courier(weights)
        tell, first = courier._tell, ""

        async def late(message: Any) -> None:
            nonlocal first
            if isinstance(message, OpenGroup | SendWeights):
                first = first or message.name
                if message.name != first:
                    courier.heard(SendingFailed(first, "connection reset"))
            await tell(message)

        async def refuse(number: int) -> None:
            if number == 1:
                clients[0].bucket_fault = GroupClient.bucket_fault.__get__(clients[0])
                raise ServerError(URL, "/update", 400, "shape mismatch")

        courier._tell, clients[0].bucket_fault = late, refuse
        sync.offer(weights)
        await sync.all_loaded(0)

    with_texts(texts)
    with_groups(groups)


def test_buckets_over_http_are_not_sent_to_a_server_of_several_ranks() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        clients[1].info = ServerInfo(ranks=2)
        sync.offer(WeightsReady(PolicyVersion(1, 0), "tensor", PLAN))
        await asyncio.sleep(10)

    with pytest.raises(RunError, match='server 1 at http://fake has 2 .* set it to "distributed" or "disk"'):
        with_groups(work)


def test_the_disk_path_gives_its_folders_back(tmp_path: Path) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        for number in range(3):
            folder = tmp_path / f"1.{number}"
            folder.mkdir()
            sync.offer(WeightsReady(PolicyVersion(1, number), "disk", path=str(folder)))
            await sync.all_loaded(number)
        await fleet.changes.until(lambda: [f.name for f in tmp_path.iterdir()] == ["1.2"] or None, 5)
        assert clients[0].session is None and sender.told == []

    with_groups(work, wave=1)


def test_a_server_that_holds_other_bytes_is_given_them_once_more_and_then_ends_the_run() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        sender.sums = {"a": "1", "b": "2"}
        for client in clients:
            client.sums = {"a": "1", "b": "2"}
        sync.offer(planned(0))
        await sync.all_loaded(0)
        clients[1].sums = {"a": "1", "b": "9"}
        sync.offer(planned(1))
        await asyncio.sleep(10)

    match = r"server 1 .*twice: .*1 of 2 parameters differ from what the learner sent, first b \(checksum 9, expected 2"
    with pytest.raises(SyncError, match=match):
        with_groups(work, verify=True)


def test_what_was_verified_is_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        sender.sums = {"a": "1"}
        for number in range(2):
            sync.offer(planned(number))
            await sync.all_loaded(number)
            assert sync.take_metrics()["sync/verified"] == 2
        assert sync.take_metrics() == {"time/sync": 0.0, "sync/verified": 0}

    with_groups(work, verify=True)
    said = [line for line in capsys.readouterr().out.splitlines() if "verify_sync" in line]
    assert said == [
        "vcpo: note: rollout server 0: 1 checksums of weights 1.0 agree (rollout.verify_sync); sync/verified counts "
        "the updates that follow"
    ]


def test_servers_are_compared_with_one_another_where_the_learner_cannot_know() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Sender) -> None:
        book = ChecksumBook()
        await book.check(fleet.servers[0], "1.0", {})
        await book.check(fleet.servers[1], "1.0", {})
        assert book.compared == 1
        clients[1].sums = {"a": "7"}
        await book.check(fleet.servers[0], "1.1", {})
        with pytest.raises(ChecksumError, match="differ from what rollout server 0 holds, first a"):
            await book.check(fleet.servers[1], "1.1", {})
        clients[0].sums, clients[1].sums = {"a": "1", "x": "2"}, {"a": "1", "x": "3"}  # x: what nobody can foretell
        await book.check(fleet.servers[0], "1.2", {"a": "1"})
        with pytest.raises(ChecksumError, match="differ from what rollout server 0 holds, first x"):
            await book.check(fleet.servers[1], "1.2", {"a": "1"})
        with pytest.raises(ChecksumError, match=r"2 of 2 .* the learner sent, first a \(checksum 1, expected 9\)"):
            await book.check(fleet.servers[1], "1.2", {"a": "9", "b": "1"})
        for client in clients:  # hashed in another way
            client.info, client.sums = ServerInfo(on_gpus=True), {"a": "5"}
        await book.check(fleet.servers[0], "1.3", {"a": "1"})
        clients[1].sums = {"a": "6"}
        with pytest.raises(ChecksumError, match="differ from what rollout server 0 holds, first a"):
            await book.check(fleet.servers[1], "1.3", {"a": "1"})

    with_groups(work)
