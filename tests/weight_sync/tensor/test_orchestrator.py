"""An update by buckets over HTTP, against servers and a learner that misbehave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.orchestrator.fake_run import URL
from tests.weight_sync.fake_servers import (
    PLAN,
    DistributedClient,
    DistributedLearner,
    TensorLearner,
    hangs,
    replaced_in_a_bucket,
    run_distributed,
    run_tensor,
    tensor,
)
from vcpo_megatron.orchestrator.peers.weight_sync import SyncError, WeightSync
from vcpo_megatron.rollout.client.http import ServerError
from vcpo_megatron.rollout.client.replies import ServerInfo
from vcpo_megatron.rollout.fleet.fleet import Fleet
from vcpo_megatron.run.tasks import RunError
from vcpo_megatron.transport.messages import (
    SendingFailed,
    SendWeights,
    WeightsReady,
)
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(30)


def test_a_wave_shares_the_buckets_and_no_third_one_is_made() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: TensorLearner) -> None:
        for number in range(3):
            sync.offer(tensor(number))
            await sync.all_loaded(number)
        await fleet.changes.until(lambda: ("release 1.1" in sender.log) or None, 5)
        assert [entry for entry in sender.log if "send" in entry] == ["send 1.0", "send 1.1", "send 1.2"]
        assert "stop" not in sender.log and "release 1.2" not in sender.log
        assert sender.most == 2
        for client in clients:
            assert [e for e in client.events if "loaded" in e] == ["loaded 1.0", "loaded 1.1", "loaded 1.2"]
            assert not client.paused
        assert sync.take_metrics()["sync/verified"] == 6

    run_tensor(work, verify=True)


def test_a_refused_bucket_stops_the_sender_and_each_is_tried_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: TensorLearner) -> None:
        async def refuse(number: int) -> None:
            if number == 1:
                clients[0].bucket_fault = DistributedClient.bucket_fault.__get__(clients[0])
                raise ServerError(URL, "/update", 400, "shape mismatch")

        clients[0].bucket_fault = refuse
        sync.offer(tensor(0))
        await sync.all_loaded(0)
        assert sender.log == ["send 1.0", "stop", "send 1.0", "send 1.0"]

    run_tensor(work)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "one by one" in line]
    assert "rollout server 0, rollout server 1" in line and "shape mismatch" in line


def test_of_several_that_are_late_none_is_blamed_before_each_was_tried_by_itself() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: TensorLearner) -> None:
        def hang_once(client: Any) -> None:
            pause = client.pause

            async def hang(mode: str) -> None:
                client.pause = pause
                await asyncio.sleep(60)

            client.pause = hang

        hang_once(clients[0])
        hang_once(clients[1])
        sync.offer(tensor(0))
        await sync.all_loaded(0)
        assert [client.events.count("start") for client in clients] == [1, 1, 1]

    run_tensor(work, servers=3, wave=3, timeout_s=1.0, max_restarts=1)


def test_the_one_server_that_is_late_is_replaced_and_the_other_is_updated_at_once() -> None:
    """In a bucket, and in a step of the protocol: the deadline is not waited for once more."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: TensorLearner) -> None:
        await replaced_in_a_bucket(fleet, sync, clients[0], tensor(0))
        assert sender.log == ["send 1.0", "stop", "send 1.0", "send 1.0"]
        pause, clients[1].pause = clients[1].pause, hangs
        sync.offer(tensor(1))
        await fleet.changes.until(lambda: clients[1].events.count("start") == 2 or None, 20)
        clients[1].pause = pause
        await sync.all_loaded(1)
        assert [entry for entry in sender.log[4:] if entry != "release 1.0"] == ["stop", "send 1.1", "send 1.1"]
        assert [client.events.count("start") for client in clients] == [2, 2]

    run_tensor(work, timeout_s=1.5, max_restarts=1)


def test_a_sender_that_fails_and_then_is_silent_ends_the_run_and_no_server_is_blamed() -> None:
    """It might be replaced, and is not: it did nothing wrong."""

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: TensorLearner) -> None:
        async def send(message: Any) -> None:
            sender.log.append(type(message).__name__)
            if isinstance(message, SendWeights) and sender.log.count("SendWeights") == 1:
                sender.answer(SendingFailed(message.name, "took no bucket"))
            assert all(client.events.count("start") == 1 for client in clients)

        sender.send = send  # type: ignore[method-assign]
        sync.offer(tensor(0))
        await asyncio.sleep(10)

    match = (
        r"weights 1\.0 did not reach rollout server 0 twice: weight sender did not respond within 0\.5 s "
        r"\(rollout\.sync_timeout_s / 2\); see logs/learner\.0\.log$"
    )
    with pytest.raises(SyncError, match=match):
        run_tensor(work, timeout_s=1.0, max_restarts=3)


def test_buckets_over_http_are_not_sent_to_a_server_of_several_ranks() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        clients[1].info = ServerInfo(ranks=2)
        sync.offer(WeightsReady(PolicyVersion(1, 0), "tensor", PLAN))
        await asyncio.sleep(10)

    with pytest.raises(RunError, match='server 1 .*has 2 .*"distributed" or "disk"'):
        run_distributed(work)
