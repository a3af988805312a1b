"""Checksums that servers answer, against those of the learner and of one another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.messages import assert_said
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
    (line,) = said
    assert_said("lines of a run", "checksums agree", line)


def test_servers_are_compared_with_one_another_where_the_learner_cannot_know() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        verifier = ChecksumVerifier()
        await verifier.check("rollout server 0", clients[0], "1.0", {})
        await verifier.check("rollout server 1", clients[1], "1.0", {})
        assert verifier.compared == 1
        clients[1].sums = {"a": "7"}
        await verifier.check("rollout server 0", clients[0], "1.1", {})
        with pytest.raises(ChecksumError, match="rollout server 0 holds, first a"):
            await verifier.check("rollout server 1", clients[1], "1.1", {})
        clients[0].sums, clients[1].sums = {"a": "1", "x": "2"}, {"a": "1", "x": "3"}  # x: what the learner cannot know
        await verifier.check("rollout server 0", clients[0], "1.2", {"a": "1"})
        with pytest.raises(ChecksumError, match="rollout server 0 holds, first x"):
            await verifier.check("rollout server 1", clients[1], "1.2", {"a": "1"})
        with pytest.raises(ChecksumError, match=r"2 of 2 .*first a \(checksum 1, .* 9\)"):
            await verifier.check("rollout server 1", clients[1], "1.2", {"a": "9", "b": "1"})
        for client in clients:  # hashed in another way
            client.info, client.sums = ServerInfo(on_gpus=True), {"a": "5"}
        await verifier.check("rollout server 0", clients[0], "1.3", {"a": "1"})
        clients[1].sums = {"a": "6"}
        with pytest.raises(ChecksumError, match="rollout server 0 holds, first a"):
            await verifier.check("rollout server 1", clients[1], "1.3", {"a": "1"})

    run_distributed(work)


def on_gpus(clients: list[Any]) -> None:
    """They hash in another way than the learner."""
    for client in clients:
        client.info = ServerInfo(on_gpus=True)


#: What servers 0, 1, 2 hold of a version whose "q" the learner has changed -> who is refused, who gets it again.
HELD = [
    ([{"q": "g0", "k": "h"}], ["rollout server 0"], set()),  # kept its weights, and there is no other to compare with
    ([{"q": "g0", "k": "h"}, {"q": "g1", "k": "h"}], ["rollout server 0"], set()),  # not the healthy one
    ([{"q": "g1", "k": "h"}, {"q": "g0", "k": "h"}], ["rollout server 1"], set()),
    ([{"q": "g1", "k": "h"}, {"q": "g1", "k": "h"}], [], set()),
    # damaged on the way: of two nobody knows which, of three the majority does
    ([{"q": "g1", "k": "h"}, {"q": "g9", "k": "h"}], ["rollout server 1"], {"rollout server 0"}),
    ([{"q": "g1", "k": "h"}, {"q": "g1", "k": "h"}, {"q": "g9", "k": "h"}], ["rollout server 2"], set()),
    ([{"q": "g9", "k": "h"}, {"q": "g1", "k": "h"}, {"q": "g1", "k": "h"}], ["rollout server 1"], {"rollout server 0"}),
]


@pytest.mark.parametrize(("held", "refused", "again"), HELD)
def test_the_server_that_is_wrong_is_blamed(held: list[dict[str, str]], refused: list[str], again: set[str]) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        on_gpus(clients)
        verifier = ChecksumVerifier()
        for client in clients:
            client.sums = {"q": "g0", "k": "h"}
        for at, client in enumerate(clients):
            await verifier.check(f"rollout server {at}", client, "1.0", {"q": "s0", "k": "t"})
        wrong = []
        for at, (client, sums) in enumerate(zip(clients, held, strict=True)):
            client.sums = sums
            try:
                await verifier.check(f"rollout server {at}", client, "1.1", {"q": "s1", "k": "t"})
            except ChecksumError as error:
                assert "first q" in str(error)
                wrong.append(f"rollout server {at}")
        assert wrong == refused and verifier.take_suspects() == again and verifier.take_suspects() == set()

    run_distributed(work, servers=len(held))


def test_of_several_ranks_one_that_holds_an_unchanged_part_is_no_fault() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        verifier, held = ChecksumVerifier(), [[{"q": "a"}, {"q": last}] for last in "bcc"]

        async def checksums() -> list[dict[str, str]]:
            return held.pop(0)

        clients[0].weights_checksums = checksums
        for number in range(2):
            await verifier.check("rollout server 0", clients[0], f"1.{number}", {"q": f"s{number}"})
        with pytest.raises(ChecksumError, match="1 of the 1 .*before, first q"):
            await verifier.check("rollout server 0", clients[0], "1.2", {"q": "s2"})

    run_distributed(work, servers=1)


@pytest.mark.parametrize("at", [0, 1])
def test_a_server_that_keeps_its_weights_ends_the_run_by_its_own_name(at: int) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        on_gpus(clients)
        for number in range(2):
            sender.sums = {"q": f"s{number}"}
            for index, client in enumerate(clients):
                client.sums = {"q": "g0" if index == at else f"g{number}"}
            sync.offer(distributed(number))
            await (sync.all_loaded(0) if number == 0 else asyncio.sleep(15))

    with pytest.raises(SyncError, match=f"server {at} refused weights 1.1 twice: .*server {at}"):
        run_distributed(work, wave=1, verify=True)


def test_a_server_that_was_damaged_and_verified_first_is_mended() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[Any], sender: DistributedLearner) -> None:
        on_gpus(clients)
        load = clients[0].end_weight_update

        async def damaged_once() -> None:
            await load()
            clients[0].sums = {"q": "g1" if clients[0].events.count("loaded 1.0") > 1 else "g9"}

        clients[0].end_weight_update = damaged_once
        clients[1].sums = {"q": "g1"}
        sender.sums = {"q": "s1"}
        sync.offer(distributed(0))
        await fleet.changes.until(
            lambda: (clients[0].events.count("loaded 1.0") > 1 and all(s.serving for s in fleet.servers)) or None, 8
        )

    run_distributed(work, wave=1, verify=True)
