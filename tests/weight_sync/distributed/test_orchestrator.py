"""An update by broadcast, against servers and a learner that misbehave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.orchestrator.fake_run import URL
from tests.weight_sync.fake_servers import (
    DistributedClient,
    DistributedLearner,
    distributed,
    replaced_in_a_bucket,
    run_distributed,
)
from vcpo_megatron.orchestrator.peers.weight_sync import SyncError, WeightSync
from vcpo_megatron.rollout.client.http import ServerError, ServerUnavailable
from vcpo_megatron.rollout.client.replies import ServerInfo
from vcpo_megatron.rollout.fleet.fleet import Fleet
from vcpo_megatron.run.tasks import RunError
from vcpo_megatron.transport.messages import (
    OpenGroup,
    SendingFailed,
    SendWeights,
)
from vcpo_megatron.types import PolicyVersion
from vcpo_megatron.weight_sync.distributed.orchestrator import DistributedTransport
from vcpo_megatron.weight_sync.wave import Wave

pytestmark = pytest.mark.timeout(30)


def test_a_wave_joins_one_group_once_and_uses_it_again() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        for number in range(3):
            sync.offer(distributed(number))
            await sync.all_loaded(number)
        assert [e for e in clients[1].events if e.startswith("join")] == ["join g-1 as 2 of 3"]
        assert sender.log.count("OpenGroup") == 1 and sender.log.count("SendWeights") == 3
        assert [e for e in clients[0].events if "loaded" in e] == ["loaded 1.0", "loaded 1.1", "loaded 1.2"]
        assert not clients[0].paused and not clients[1].paused
        await fleet.changes.until(lambda: ("release 1.1" in sender.log) or None, 5)
        assert "release 1.2" not in sender.log

    run_distributed(work)


def refuse_once(client: Any) -> None:
    """In bucket 1, when another server is in the broadcast of it; what comes later is taken."""

    async def refuse(number: int) -> None:
        if number == 1:
            await asyncio.sleep(0.05)  # the other one is in the broadcast by now
            client.bucket_fault = DistributedClient.bucket_fault.__get__(client)
            raise ServerError(URL, "/update", 400, "shape mismatch")

    client.bucket_fault = refuse


def test_a_server_that_refuses_a_bucket_leaves_nobody_hanging() -> None:
    """In bucket 1 of 3, while the other server waits in the broadcast of it; both hold the version in the end."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        refuse_once(clients[0])
        sync.offer(distributed(0))
        await sync.all_loaded(0)
        assert "StopSending" in sender.log
        joined = [event.split()[1] for client in clients for event in client.events if event.startswith("join")]
        assert len(joined) == len({(n, i) for i, n in enumerate(joined)}) and "g-1" in joined and "g-2" in joined
        assert clients[0].version == clients[1].version == "1.0"

    run_distributed(work)


def test_a_server_that_is_back_before_the_update_is_given_up_has_died_once() -> None:
    """Leaving the group takes longer than a restart: the new process has done nothing wrong."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        sync.offer(distributed(0))
        await sync.all_loaded(0)

        async def die(number: int) -> None:
            clients[0].bucket_fault = DistributedClient.bucket_fault.__get__(clients[0])
            clients[0].process.code = -9
            clients[0]._alive()

        async def leave(name: str) -> None:
            await fleet.changes.until(lambda: (fleet.servers[0].starts == 2 and fleet.servers[0].available) or None, 4)
            raise ServerUnavailable(URL, "/destroy", "Cannot connect")

        clients[0].bucket_fault, clients[0].destroy_weights_update_group = die, leave
        sync.offer(distributed(1))
        await sync.all_loaded(1)
        assert clients[0].events.count("start") == 2

    run_distributed(work, servers=1, max_restarts=1)


def test_a_server_that_is_restarted_between_two_steps_of_an_update_does_not_end_the_run() -> None:
    """It had begun; the other one had not when it came back: the group of its former process is not used."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        async def late() -> None:
            clients[1].begin_weight_update = DistributedClient.begin_weight_update.__get__(clients[1])
            await asyncio.sleep(0.02)
            clients[0].process.code = -9
            await fleet.changes.until(lambda: (fleet.servers[0].starts == 2 and fleet.servers[0].available) or None, 4)
            await clients[1].begin_weight_update()

        clients[1].begin_weight_update = late
        sync.offer(distributed(0))
        await sync.all_loaded(0)
        assert clients[0].events.count("start") == 2

    run_distributed(work, max_restarts=1)


def test_a_server_that_answers_late_is_late_for_its_wave_only_until_the_deadline() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        async def late(number: int) -> None:
            await asyncio.sleep(0.3)

        clients[0].bucket_fault = late
        sync.offer(distributed(0))
        await sync.all_loaded(0)

    run_distributed(work)


def test_a_server_that_hangs_in_a_bucket_ends_the_run_naming_the_step() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        async def hang(number: int) -> None:
            if number == 1:
                await asyncio.sleep(60)

        clients[0].bucket_fault = hang
        sync.offer(distributed(0))
        await asyncio.sleep(10)

    match = r"server 0 did not take weights 1\.0 within 1 s \(rollout\.sync_timeout_s\) in step: bucket 2 of 3"
    with pytest.raises(SyncError, match=match):
        run_distributed(work, servers=1, timeout_s=1.0)


def test_a_hanging_server_is_replaced_where_it_may_be_and_the_other_does_not_wait_for_it_twice() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        await replaced_in_a_bucket(fleet, sync, clients[0], distributed(0))
        assert clients[1].events.count("start") == 1

    run_distributed(work, timeout_s=1.0, max_restarts=2)


def test_a_broadcast_that_fails_at_the_learner_is_tried_once_more() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        async def lose(number: int) -> None:
            if number == 1:
                clients[0].bucket_fault = DistributedClient.bucket_fault.__get__(clients[0])
                sender.answer(SendingFailed("g-1", "connection reset"))
                await asyncio.sleep(60)

        original = sender.send

        async def send(message: Any) -> None:  # what was sent is not said before it has left
            if isinstance(message, SendWeights) and sender.log.count("SendWeights") == 0:
                sender.log.append("SendWeights")
                return
            await original(message)

        sync._updater.transport(distributed(0))._send = send  # type: ignore[attr-defined]
        clients[0].bucket_fault = lose
        sync.offer(distributed(0))
        await sync.all_loaded(0)
        assert sender.log.count("OpenGroup") == 2

    run_distributed(work, servers=1)


def test_a_learner_that_does_not_open_the_group_ends_the_run() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        sender.silent = True
        sync.offer(distributed(0))
        await asyncio.sleep(10)

    with pytest.raises(SyncError, match="weight sender did not respond"):
        run_distributed(work, servers=1, timeout_s=0.4)


def test_waves_leave_the_others_serving_and_each_server_has_its_own_version() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        sync.offer(distributed(0))
        await sync.all_loaded(0)
        seen: set[tuple[int, ...]] = set()

        async def look(number: int) -> None:
            await asyncio.sleep(0.01)
            seen.add(tuple(client.index for client in clients if client.paused))

        for client in clients:
            client.bucket_fault = look
        sync.offer(distributed(1))
        versions = set()

        def note() -> bool | None:
            versions.add(tuple(server.version.number if server.version else None for server in fleet.servers))
            return versions if all(server.version == PolicyVersion(1, 1) for server in fleet.servers) else None  # type: ignore[return-value]

        await fleet.changes.until(note, 8)
        assert seen == {(0, 1), (2, 3)}
        assert (1, 1, 0, 0) in versions
        assert [e for e in clients[2].events if e.startswith("join")] == ["join g-1 as 3 of 5", "join g-3 as 1 of 3"]

    run_distributed(work, servers=4, wave=2)


def test_the_ranks_of_joined_servers_follow_one_another_in_the_group() -> None:
    """The learner is 0; servers of 1, 4 and 2 ranks are 1, 2..5 and 6..7 of 8."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        for client, ranks in zip(clients, (1, 4, 2), strict=True):
            client.info = ServerInfo(ranks=ranks)
        opened: list[int] = []
        original, sender.members["g-1"] = sender.send, set()

        async def send(message: Any) -> None:
            if isinstance(message, OpenGroup):
                opened.append(message.world_size)
            await original(message)

        groups = DistributedTransport(send, prefix="g", timeout_s=2.0)
        sender.answer = groups.on_message
        await groups.prepare(Wave(fleet.servers, distributed(0)))
        assert opened == [8]
        joined = [event for client in clients for event in client.events if event.startswith("join")]
        assert joined == ["join g-1 as 1 of 8", "join g-1 as 2 of 8", "join g-1 as 6 of 8"]

    run_distributed(work, servers=3)


# --- a group is tried before it is used ---------------------------------------------------------


def test_a_group_is_tried_before_any_server_is_paused_and_in_the_pause_of_those_that_serve() -> None:
    """The first group is of servers that serve nothing; those of the waves that roll are opened while all serve."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        for number in range(3):
            sync.offer(distributed(number))
            await sync.all_loaded(number)
        tried = [[event for event in client.events if event.startswith("tried")] for client in clients]
        assert (
            tried == [["tried g-1 running", "tried g-2 paused"]] * 2 + [["tried g-1 running", "tried g-3 paused"]] * 2
        )
        assert [client.sessions for client in clients] == [["running", "paused", "paused", "paused"]] * 4

    run_distributed(work, servers=4, wave=2)


def test_a_group_that_brings_nothing_is_refused_before_the_pause_naming_nccl_and_the_remedy() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        sender.backend = "nccl"
        clients[0].info = ServerInfo(on_gpus=True)

        async def unlike() -> None:
            assert not clients[0].paused
            raise ServerError(URL, "/update", 400, "Mismatched NCCL version detected : rank 0 2.29.7, rank 1 2.30.7")

        clients[0].trial_fault = unlike
        sync.offer(distributed(0))
        await asyncio.sleep(10)

    match = (
        r"server 0 refused weights 1\.0 twice: the first number that was broadcast to it did not arrive \(.*2\.29\.7, "
        r'rank 1 2\.30\.7\); NCCL.s version must be the same .* brings 2\.30\.7\).*rollout\.sync = "disk"'
    )
    with pytest.raises(SyncError, match=match):
        run_distributed(work, servers=1)


def test_a_joined_server_on_cpus_is_refused_where_the_learner_broadcasts_by_nccl() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        sender.backend = "nccl"
        sync.offer(distributed(0))
        await asyncio.sleep(10)

    with pytest.raises(RunError, match=r'server 0 at http://fake .*CPUs.* = "tensor" or "disk"'):
        run_distributed(work, servers=1)


# --- a broadcast by NCCL that is given up ---------------------------------------------------------


def on_gpus(clients: list[Any], sender: DistributedLearner) -> None:
    """NCCL's servers; one that waits in a broadcast does not notice that its sender is killed."""
    sender.backend = "nccl"
    sender.drop = lambda error: sender.sizes.clear()  # type: ignore[method-assign]
    for client in clients:
        client.info = ServerInfo(on_gpus=True)


def test_who_waits_in_a_broadcast_that_was_given_up_is_replaced_and_the_one_that_refused_is_not() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        on_gpus(clients, sender)

        refuse_once(clients[0])
        sync.offer(distributed(0))
        await sync.all_loaded(0)
        assert [client.events.count("start") for client in clients] == [1, 2]

    run_distributed(work, max_restarts=1)


def test_a_server_that_may_not_be_replaced_ends_the_run_by_its_name() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        on_gpus(clients, sender)

        async def refuse(number: int) -> None:
            await asyncio.sleep(0.05)
            raise ServerError(URL, "/update", 400, "shape mismatch")

        clients[0].bucket_fault = refuse
        sync.offer(distributed(0))
        await asyncio.sleep(10)

    with pytest.raises(SyncError, match=r"server 1 .*weights 1\.0 \(.*shape mismatch.*max_restarts is 0"):
        run_distributed(work)


def test_a_sender_that_is_lost_twice_ends_the_run_though_its_servers_are_replaced() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        on_gpus(clients, sender)

        async def lose(number: int) -> None:
            sender.answer(SendingFailed(f"g-{sender.log.count('OpenGroup')}", "the broadcaster ended, see its log"))
            await asyncio.sleep(60)

        original = sender.send

        async def send(message: Any) -> None:  # what was sent is not said before it has left
            if not isinstance(message, SendWeights):
                await original(message)

        sync._updater.transport(distributed(0))._send = send  # type: ignore[attr-defined]
        clients[0].bucket_fault = lose
        sync.offer(distributed(0))
        await asyncio.sleep(20)

    match = r"weights 1\.0 did not reach rollout server 0 twice: the broadcaster ended, see its log"
    with pytest.raises(SyncError, match=match):
        run_distributed(work, servers=1, max_restarts=5)
