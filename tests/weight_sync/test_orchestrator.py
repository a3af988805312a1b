"""An update of a wave whose servers misbehave, by each transport that sends buckets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.orchestrator.fake_run import URL
from tests.weight_sync.fake_servers import (
    TRANSPORTS,
    DistributedClient,
    DistributedLearner,
    TensorLearner,
    distributed,
    run_distributed,
    run_tensor,
    tensor,
)
from vcpo_megatron.orchestrator.peers.weight_sync import SyncError, WeightSync
from vcpo_megatron.rollout.client.http import ServerError
from vcpo_megatron.rollout.fleet.fleet import Fleet
from vcpo_megatron.transport.messages import (
    OpenGroup,
    SendingFailed,
    SendWeights,
    WeightsReady,
)

pytestmark = pytest.mark.timeout(30)


@TRANSPORTS
def test_a_bucket_refused_by_one_server_again_and_again_ends_the_run_naming_it(harness: Any, weights: Any) -> None:
    reasons: list[str] = []

    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Any) -> None:
        async def refuse(number: int) -> None:
            raise ServerError(URL, "/update", 400, "shape mismatch")

        clients[1].bucket_fault, sender.reasons = refuse, reasons
        sync.offer(weights(0))
        await asyncio.sleep(10)

    with pytest.raises(SyncError, match=r"server 1 refused weights 1\.0 twice: .*shape mismatch"):
        harness(work)
    assert reasons and all("shape mismatch" in reason for reason in reasons)


@TRANSPORTS
def test_a_server_that_dies_in_a_bucket_comes_back_alone_and_current(harness: Any, weights: Any) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: Any) -> None:
        sync.offer(weights(0))
        await sync.all_loaded(0)

        async def die(number: int) -> None:
            if number == 2:
                clients[0].process.code = -9
                clients[0].bucket_fault = DistributedClient.bucket_fault.__get__(clients[0])

        clients[0].bucket_fault = die
        sync.offer(weights(1))
        await sync.all_loaded(1)
        assert clients[0].events.count("start") == 2 and clients[1].events.count("start") == 1

    harness(work, max_restarts=1)


def test_the_failure_of_what_was_given_up_is_not_that_of_what_is_asked_for_now() -> None:
    """A server refuses just when the sender fails: what it says of that comes when the next request is on its way."""

    async def by_tensor(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: TensorLearner) -> None:
        await refused_once(sync, clients, tensor(0))
        assert sender.log == ["send 1.0", "stop", "send 1.0", "send 1.0"]

    async def by_distributed(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        await refused_once(sync, clients, distributed(0))
        assert sender.log.count("OpenGroup") == sender.log.count("SendWeights") == 3

    async def refused_once(sync: WeightSync, clients: list[Any], weights: WeightsReady) -> None:
        transport: Any = sync._updater.transport(weights)
        send, first = transport._send, ""

        async def late(message: Any) -> None:
            nonlocal first
            if isinstance(message, OpenGroup | SendWeights):
                first = first or message.name
                if message.name != first:
                    transport.on_message(SendingFailed(first, "connection reset"))
            await send(message)

        async def refuse(number: int) -> None:
            if number == 1:
                clients[0].bucket_fault = DistributedClient.bucket_fault.__get__(clients[0])
                raise ServerError(URL, "/update", 400, "shape mismatch")

        transport._send, clients[0].bucket_fault = late, refuse
        sync.offer(weights)
        await sync.all_loaded(0)

    run_tensor(by_tensor)
    run_distributed(by_distributed)
