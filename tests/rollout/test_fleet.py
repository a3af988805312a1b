"""Servers' life and the routing of requests, with stand-in processes and clients."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.fake_run import FakeClient, config, fake_fleet
from vcpo_megatron.orchestrator.tasks import run_beside
from vcpo_megatron.rollout.client import ServerClient, ServerUnavailable
from vcpo_megatron.rollout.fleet import Changes, Fleet, FleetError, FleetOptions, Server, ServerState
from vcpo_megatron.rollout.protocol import SamplingParams
from vcpo_megatron.transport.child import start_child, stop_child
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(30)

Work = Callable[[Fleet, list[FakeClient]], Coroutine[Any, Any, None]]


def with_fleet(work: Work, *, servers: int = 2, capacity: int = 4, max_restarts: int = 0) -> None:
    """Run ``work`` beside the supervision of a fleet whose servers answer at once and hold version 1.0."""

    async def main() -> None:
        cfg = config(rollout={"max_running_requests": capacity, "max_restarts": max_restarts})
        clients = [FakeClient(i) for i in range(servers)]
        fleet = fake_fleet(cfg, Changes(), clients, Path("/nowhere"))

        async def ready() -> None:
            await fleet.answering()
            for index in range(servers):
                load(fleet, clients, index, 0)
            await work(fleet, clients)

        fleet.launch()
        await run_beside(ready(), fleet.supervise())

    asyncio.run(asyncio.wait_for(main(), 10))


def load(fleet: Fleet, clients: list[FakeClient], index: int, number: int) -> None:
    """What a full update does."""
    clients[index].version = f"1.{number}"
    fleet.loaded(fleet.servers[index], PolicyVersion(1, number))


def test_groups_go_to_the_least_loaded_server_with_room() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        first, second = fleet.lease(2), fleet.lease(2)
        assert first is not None and second is not None
        assert (first.server.index, second.server.index) == (0, 1)
        first.release()
        third = fleet.lease(2)
        assert third is not None and third.server.index == 0 and fleet.servers[0].load == 3
        assert fleet.lease(2).server.index == 1  # type: ignore[union-attr]
        assert fleet.lease(2) is None  # loads 3 and 4 of 4
        assert fleet.lease(1).server.index == 0  # type: ignore[union-attr]

    with_fleet(work)


def test_a_group_larger_than_a_server_goes_to_an_idle_one() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        lease = fleet.lease(9)
        assert lease is not None
        assert fleet.lease(9) is None

    with_fleet(work, servers=1)


def test_only_a_server_of_an_allowed_version_is_leased() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        load(fleet, clients, 1, 3)
        lease = fleet.lease(1, allowed=lambda number: number >= 2)
        assert lease is not None and lease.server.index == 1 and lease.version == 3
        assert fleet.lease(1, among=fleet.servers[:1], allowed=lambda number: number >= 2) is None

    with_fleet(work)


def test_a_server_that_missed_an_update_takes_no_request_until_a_full_one() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        fleet.missed(fleet.servers[0])
        assert fleet.servers[0].state is ServerState.EMPTY and fleet.lease(1) is None
        load(fleet, clients, 0, 1)
        assert fleet.lease(1) is not None

    with_fleet(work, servers=1)


def test_requests_of_a_dead_server_are_run_again_on_another() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        clients[0].latency_s = 0.2
        lease = fleet.lease(2)
        assert lease is not None and lease.server.index == 0
        requests = [asyncio.ensure_future(lease.generate((1, 2), SamplingParams(4), f"r{i}")) for i in range(2)]
        await asyncio.sleep(0.05)
        clients[0].process.code = -9  # type: ignore[union-attr]
        results = await asyncio.gather(*requests)
        assert all(len(result.output_ids) == 4 for result in results)
        assert [event.split()[1] for event in clients[1].events if "generate" in event] == ["r0", "r1"]
        assert fleet.servers[0].load == 0 and fleet.servers[1].load == 2  # the places moved with the group

    with_fleet(work, max_restarts=1)


def test_a_lease_never_moves_to_an_older_version() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        load(fleet, clients, 0, 5)
        lease = fleet.lease(1, allowed=lambda number: number == 5)
        assert lease is not None
        fleet.missed(fleet.servers[0])
        request = asyncio.ensure_future(lease.generate((1, 2), SamplingParams(4), "r"))
        await asyncio.sleep(0.1)
        assert not request.done()  # server 1 serves, but version 0
        load(fleet, clients, 1, 6)
        result = await request
        assert {span.version for span in result.spans} == {"1.6"}

    with_fleet(work)


def test_a_server_that_lives_but_is_out_of_reach_fails_the_request_after_retries() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        tries = []

        async def unreachable(*_: Any) -> Any:
            tries.append(1)
            raise ServerUnavailable("http://fake", "/generate", "no answer within 1 s")

        clients[0].generate = unreachable  # type: ignore[method-assign]
        lease = fleet.lease(1)
        assert lease is not None
        with pytest.raises(ServerUnavailable, match="no answer within 1 s"):
            await lease.generate((1,), SamplingParams(4), "r")
        assert len(tries) == 3

    with_fleet(work, servers=1)


def test_restarts_run_out() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        for _ in range(3):
            server = fleet.servers[0]
            before = server.starts
            clients[0].process.code = 1  # type: ignore[union-attr]
            await fleet.changes.until(lambda s=server, b=before: s.starts > b or None, 5)  # type: ignore[misc]
            assert not server.serving and server.version is None

    with pytest.raises(FleetError, match=r"rollout server 0 died \(exit code 1\), see .*; rollout.max_restarts is 2"):
        with_fleet(work, max_restarts=2)


def real_fleet(tmp_path: Path, program: str, *, start_timeout_s: float) -> Fleet:
    log = tmp_path / "server.0.log"
    server = Server(0, ServerClient("http://127.0.0.1:9", 10, 1.0), log)
    return Fleet(
        [server], FleetOptions(4, 0, start_timeout_s, 1.0), changes=Changes(),
        launch=lambda index: start_child([sys.executable, "-c", program], env={}, log=log),
        stop=lambda process: stop_child(process, grace_s=2.0),  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    program = "import sys; print('vcpo: error: no such model', file=sys.stderr); sys.exit(1)"
    fleet = real_fleet(tmp_path, program, start_timeout_s=20.0)

    async def main() -> None:
        fleet.launch()
        await run_beside(fleet.answering(), fleet.supervise())

    with pytest.raises(FleetError, match=r"died \(exit code 1: no such model\), see .*server.0.log"):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_a_server_that_never_answers_ends_the_run_at_the_deadline_and_is_stopped(tmp_path: Path) -> None:
    fleet = real_fleet(tmp_path, "import time; time.sleep(60)", start_timeout_s=0.3)

    async def main() -> None:
        fleet.launch()
        try:
            await run_beside(fleet.answering(), fleet.supervise())
        finally:
            await fleet.stop()

    with pytest.raises(FleetError, match=r"did not answer within 0.3 s of its start.*rollout.start_timeout_s"):
        asyncio.run(asyncio.wait_for(main(), 20))
    assert fleet.servers[0].process is not None and fleet.servers[0].process.poll() == -15


def test_a_server_that_accepts_and_hangs_is_bound_by_the_deadline_of_its_start(tmp_path: Path) -> None:
    fleet = real_fleet(tmp_path, "import time; time.sleep(60)", start_timeout_s=0.5)

    async def main() -> None:
        hanging = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
        port = hanging.sockets[0].getsockname()[1]
        fleet.servers[0].client.base_url = f"http://127.0.0.1:{port}"
        fleet.launch()
        try:
            await run_beside(fleet.answering(), fleet.supervise())
        finally:
            await fleet.stop()
            hanging.close()

    with pytest.raises(FleetError, match=r"did not answer within 0.5 s of its start"):
        asyncio.run(asyncio.wait_for(main(), 8))


def test_a_server_that_hangs_does_not_hide_the_death_of_another() -> None:
    async def main() -> None:
        clients = [FakeClient(index) for index in range(2)]
        fleet = fake_fleet(config(), Changes(), clients, Path("/nowhere"))

        async def hang() -> bool:
            await asyncio.sleep(60)
            return True

        clients[0].ready = hang  # type: ignore[method-assign]
        fleet.launch()
        clients[1].process.code = -9  # type: ignore[union-attr]
        await run_beside(fleet.answering(), fleet.supervise())

    with pytest.raises(FleetError, match="rollout server 1 died"):
        asyncio.run(asyncio.wait_for(main(), 8))


def test_changes_wake_every_waiter_and_time_out() -> None:
    async def main() -> None:
        changes = Changes()
        box: list[int] = []
        waiters = [asyncio.ensure_future(changes.until(lambda: box[0] if box else None, 5)) for _ in range(3)]
        await asyncio.sleep(0)
        changes.notify()
        await asyncio.sleep(0)
        box.append(7)
        changes.notify()
        assert await asyncio.gather(*waiters) == [7, 7, 7] and changes.count == 2
        with pytest.raises(TimeoutError):
            await changes.until(lambda: None, 0.05)

    asyncio.run(asyncio.wait_for(main(), 5))
