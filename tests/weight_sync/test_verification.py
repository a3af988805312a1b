"""Checksums that servers answer, against those of the learner and of one another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.weight_sync.fake_servers import (
    DistributedLearner,
    distributed,
    run_distributed,
)
from vcpo_megatron.orchestrator.peers.weight_sync import SyncError, WeightSync
from vcpo_megatron.rollout.client.replies import ServerInfo
from vcpo_megatron.rollout.fleet.fleet import Fleet
from vcpo_megatron.weight_sync.verification import ChecksumError, ChecksumVerifier

pytestmark = pytest.mark.timeout(30)


def test_a_server_that_holds_other_bytes_is_given_them_once_more_and_then_ends_the_run() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        sender.sums = {"a": "1", "b": "2"}
        for client in clients:
            client.sums = {"a": "1", "b": "2"}
        sync.offer(distributed(0))
        await sync.all_loaded(0)
        clients[1].sums = {"a": "1", "b": "9"}
        sync.offer(distributed(1))
        await asyncio.sleep(10)

    match = r"server 1 .*twice: .*1 of 2 parameters differ from what the learner sent, first b \(checksum 9, expected 2"
    with pytest.raises(SyncError, match=match):
        run_distributed(work, verify=True)


def test_what_was_verified_is_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        sender.sums = {"a": "1"}
        for number in range(2):
            sync.offer(distributed(number))
            await sync.all_loaded(number)
            assert sync.take_metrics()["sync/verified"] == 2
        assert sync.take_metrics() == {"time/sync": 0.0, "sync/verified": 0}

    run_distributed(work, verify=True)
    said = [line for line in capsys.readouterr().out.splitlines() if "verify_sync" in line]
    assert said == [
        "vcpo: note: rollout server 0: 1 checksums of weights 1.0 agree (rollout.verify_sync); sync/verified counts "
        "the updates that follow"
    ]


def test_servers_are_compared_with_one_another_where_the_learner_cannot_know() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        verifier = ChecksumVerifier()
        await verifier.check("rollout server 0", clients[0], "1.0", {})
        await verifier.check("rollout server 1", clients[1], "1.0", {})
        assert verifier.compared == 1
        clients[1].sums = {"a": "7"}
        await verifier.check("rollout server 0", clients[0], "1.1", {})
        with pytest.raises(ChecksumError, match="differ from what rollout server 0 holds, first a"):
            await verifier.check("rollout server 1", clients[1], "1.1", {})
        clients[0].sums, clients[1].sums = {"a": "1", "x": "2"}, {"a": "1", "x": "3"}  # x: what the learner cannot know
        await verifier.check("rollout server 0", clients[0], "1.2", {"a": "1"})
        with pytest.raises(ChecksumError, match="differ from what rollout server 0 holds, first x"):
            await verifier.check("rollout server 1", clients[1], "1.2", {"a": "1"})
        with pytest.raises(ChecksumError, match=r"2 of 2 .* the learner sent, first a \(checksum 1, expected 9\)"):
            await verifier.check("rollout server 1", clients[1], "1.2", {"a": "9", "b": "1"})
        for client in clients:  # hashed in another way
            client.info, client.sums = ServerInfo(on_gpus=True), {"a": "5"}
        await verifier.check("rollout server 0", clients[0], "1.3", {"a": "1"})
        clients[1].sums = {"a": "6"}
        with pytest.raises(ChecksumError, match="differ from what rollout server 0 holds, first a"):
            await verifier.check("rollout server 1", clients[1], "1.3", {"a": "1"})

    run_distributed(work)
