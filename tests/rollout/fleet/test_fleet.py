"""Servers' life and the routing of requests, with stand-in processes and clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.messages import assert_names
from tests.orchestrator.fake_run import FakeClient, FakeProcess, config, fake_fleet
from vcpo_megatron.rollout.client.http import ServerClient, ServerError, ServerUnavailable
from vcpo_megatron.rollout.client.protocol import SamplingParams
from vcpo_megatron.rollout.client.replies import UnsupportedServer
from vcpo_megatron.rollout.fleet.fleet import Fleet, FleetError, FleetOptions
from vcpo_megatron.rollout.fleet.server import Server, ServerState
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import run_beside
from vcpo_megatron.transport.child import start_child, stop_child
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(30)

Work = Callable[[Fleet, list[FakeClient]], Coroutine[Any, Any, None]]


def with_fleet(work: Work, *, servers: int = 2, capacity: int = 4, max_restarts: int = 0) -> None:
    """Run ``work`` beside the supervision of a fleet whose servers answer at once and hold version 1.0."""

    async def main() -> None:
        cfg = config(rollout={"max_running_requests": capacity, "max_restarts": max_restarts})
        clients = [FakeClient(i) for i in range(servers)]
        fleet = fake_fleet(cfg, Notifier(), clients, Path("/nowhere"))

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
        while sum("generate" in event for event in clients[0].events) < 2:
            await asyncio.sleep(0)
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


def test_a_failure_inside_the_server_is_tried_again() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        answer, tries = clients[0].generate, []

        async def fails_once(*request: Any) -> Any:
            tries.append(1)
            if len(tries) == 1:
                raise ServerError("http://fake", "/generate", 500, "the engine stumbled")
            return await answer(*request)

        clients[0].generate = fails_once  # type: ignore[method-assign]
        lease = fleet.lease(1)
        assert lease is not None
        assert len((await lease.generate((1,), SamplingParams(4), "r")).output_ids) == 4 and len(tries) == 2

    with_fleet(work, servers=1)


def test_requests_wait_while_weights_are_loaded() -> None:
    """What is sent meanwhile could read what the old weights left in the cache."""

    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        lease, server = fleet.lease(1), fleet.servers[0]
        assert lease is not None and clients[0].cache_key == "1.0"
        server.updating = True
        request = asyncio.ensure_future(lease.generate((1,), SamplingParams(4), "r"))
        await asyncio.sleep(0.1)
        assert not request.done() and not [event for event in clients[0].events if "generate" in event]
        server.updating = False
        load(fleet, clients, 0, 1)
        assert clients[0].cache_key == "1.1"
        assert {span.version for span in (await request).spans} == {"1.1"}

    with_fleet(work, servers=1)


def test_a_lease_that_must_move_to_a_server_that_is_updated_waits_without_blocking_others() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        lease = fleet.lease(1)
        assert lease is not None and lease.server.index == 0
        fleet.missed(fleet.servers[0])
        fleet.servers[1].updating = True
        request = asyncio.ensure_future(lease.generate((1,), SamplingParams(4), "r"))
        await asyncio.sleep(0.1)
        assert not request.done() and lease.server.index == 0
        fleet.servers[1].updating = False
        load(fleet, clients, 1, 1)
        assert {span.version for span in (await request).spans} == {"1.1"} and lease.server.index == 1

    with_fleet(work)


def test_trajectories_that_wait_for_their_environment_leave_room() -> None:
    """Capacity 4: a group whose members are between two requests is not busy; at most 8 places are given."""

    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        server, leases = fleet.servers[0], []
        for _ in range(2):
            leases.append(fleet.lease(4))
            assert leases[-1] is not None and fleet.lease(1) is None and server.busy == 4
            await asyncio.gather(*(leases[-1].generate((1,), SamplingParams(4), f"r{i}") for i in range(4)))
            assert server.busy == 0
        assert server.load == 8 and fleet.lease(1) is None
        again = asyncio.ensure_future(leases[0].generate((1,), SamplingParams(4), "again"))
        await asyncio.sleep(0)
        assert server.busy == 1
        await again
        leases[0].release(4)
        assert (server.load, server.busy) == (4, 0) and fleet.lease(1) is not None

    with_fleet(work, servers=1)


def test_a_place_that_is_released_unused_is_not_busy_any_more() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        lease = fleet.lease(3)
        assert lease is not None
        lease.release()
        assert (fleet.servers[0].load, fleet.servers[0].busy) == (2, 2)
        lease.release(2)
        assert (fleet.servers[0].load, fleet.servers[0].busy) == (0, 0)

    with_fleet(work, servers=1)


# --- health -------------------------------------------------------------------------------------


def watched(work: Work, *, joined: bool = False, max_restarts: int = 0) -> None:
    """``with_fleet`` of one server that is asked after 0.1 s of silence, with a deadline of 0.2 s."""

    async def main() -> None:
        clients = [FakeClient(0)]
        server = Server(0, clients[0], Path("/nowhere"), joined=joined)  # type: ignore[arg-type]
        clients[0].process = FakeProcess()

        def launch(index: int) -> FakeProcess:
            clients[0].reset()
            clients[0].process = FakeProcess()
            return clients[0].process

        def stop(process: Any) -> int:
            process.code = -9
            return -9

        options = FleetOptions(4, max_restarts, 1.0, 2.0, health_interval_s=0.1, health_timeout_s=0.2)
        fleet = Fleet([server], options, launch=launch, stop=stop, changes=Notifier())  # type: ignore[arg-type]

        async def ready() -> None:
            await fleet.answering()
            load(fleet, clients, 0, 0)
            await work(fleet, clients)

        fleet.launch()
        await run_beside(ready(), fleet.supervise())

    asyncio.run(asyncio.wait_for(main(), 10))


async def hangs(timeout_s: float) -> str:
    raise ServerUnavailable("http://fake", "/health", f"no answer within {timeout_s:g} s")


def test_a_server_that_hangs_is_killed_restarted_and_serves_after_a_full_update() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        server, first = fleet.servers[0], clients[0].process
        well, clients[0].health = clients[0].health, hangs  # type: ignore[method-assign]
        await fleet.changes.until(lambda: server.starts == 2 or None, 5)
        assert first is not None and first.code == -9
        clients[0].health = well  # type: ignore[method-assign]
        await fleet.changes.until(lambda: server.available or None, 5)
        assert not server.serving and fleet.lease(1) is None
        load(fleet, clients, 0, 1)
        await asyncio.sleep(0.5)
        assert server.serving and server.starts == 2

    watched(work, max_restarts=1)


def test_one_late_answer_is_no_fault_and_an_update_is_not_disturbed() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        server, answers = fleet.servers[0], ["late", "1.0"]
        asked = []

        async def late_once(timeout_s: float) -> str:
            asked.append(1)
            if answers.pop(0) == "late":
                await hangs(timeout_s)
            clients[0].health = well  # type: ignore[method-assign]
            return "1.0"

        well, clients[0].health = clients[0].health, late_once  # type: ignore[method-assign]
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(asked) == 2 and server.starts == 1 and server.serving
        clients[0].health, server.updating = hangs, True  # type: ignore[method-assign]
        await asyncio.sleep(0.6)
        assert server.starts == 1 and server.serving

    watched(work)


def test_a_server_that_answers_requests_is_not_asked() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        clients[0].health = hangs  # type: ignore[method-assign]
        lease = fleet.lease(1)
        assert lease is not None
        for index in range(20):
            await lease.generate((1,), SamplingParams(1), f"r{index}")
            await asyncio.sleep(0.03)
        assert fleet.servers[0].serving

    watched(work)


def test_other_weights_than_those_that_were_loaded_are_noticed() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        clients[0].version = "default"  # restarted by someone else
        await fleet.changes.until(lambda: (not fleet.servers[0].serving) or None, 5)
        assert fleet.servers[0].state is ServerState.EMPTY and fleet.servers[0].starts == 1

    watched(work)


# --- joined servers -----------------------------------------------------------------------------


def test_a_joined_server_that_is_lost_is_left_alone_until_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        server, process = fleet.servers[0], clients[0].process
        assert clients[0].events[0] == "adopt" and process is not None
        process.code = 1
        lease = fleet.lease(1)
        assert lease is not None
        request = asyncio.ensure_future(lease.generate((1,), SamplingParams(4), "r"))
        await fleet.changes.until(lambda: (not server.available) or None, 5)
        process.code = None
        await fleet.changes.until(lambda: server.available or None, 5)
        assert not request.done() and not server.serving
        load(fleet, clients, 0, 1)
        assert {span.version for span in (await request).spans} == {"1.1"} and server.starts == 0

    watched(work, joined=True)
    assert_names(capsys.readouterr().out, "rollout server 0 cannot be reached", "http://fake")


def test_an_old_request_that_fails_says_nothing_of_a_joined_server_that_came_back() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        server, back = fleet.servers[0], asyncio.Event()
        generate = clients[0].generate

        async def reset_late(*request: Any) -> Any:
            clients[0].generate = generate  # type: ignore[method-assign]
            await back.wait()
            raise ServerUnavailable("http://fake", "/generate", "connection reset")

        clients[0].generate = reset_late  # type: ignore[method-assign]
        lease = fleet.lease(1)
        assert lease is not None
        request = asyncio.ensure_future(lease.generate((1,), SamplingParams(4), "r"))
        await asyncio.sleep(0.05)
        await fleet.replace(server)
        await fleet.changes.until(lambda: server.available or None, 5)
        load(fleet, clients, 0, 1)
        back.set()
        assert {span.version for span in (await request).spans} == {"1.1"}
        assert clients[0].events.count("adopt") == 2

    watched(work, joined=True)


def test_a_joined_server_that_was_left_paused_is_resumed_before_it_is_ready() -> None:
    """SGLang says that it is not ready while it is paused."""

    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        await clients[0].pause("retract")
        await fleet.replace(fleet.servers[0])
        assert not await clients[0].ready() and not fleet.servers[0].available
        await fleet.changes.until(lambda: fleet.servers[0].available or None, 5)
        assert not clients[0].paused

    watched(work, joined=True)


def test_a_joined_server_that_another_run_pauses_is_found_and_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    """One that ends, or is killed, after this one has joined its server."""

    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        await clients[0].pause("retract")
        await fleet.changes.until(lambda: (not fleet.servers[0].available) or None, 5)
        await fleet.changes.until(lambda: fleet.servers[0].available or None, 5)
        assert not clients[0].paused
        load(fleet, clients, 0, 1)
        lease = fleet.lease(1)
        assert lease is not None and (await lease.generate((1,), SamplingParams(4), "r")).output_ids

    watched(work, joined=True)
    assert "rollout server 0 hangs (rollout server http://fake/ready" in (said := capsys.readouterr().out), said
    assert "it is paused" in said


def test_a_joined_server_that_never_answers_ends_the_run_before_it_begins() -> None:
    server = Server(0, ServerClient("http://127.0.0.1:9", 10, 1.0), Path("/nowhere"), joined=True)
    there = Server(1, FakeClient(1), Path("/nowhere"), joined=True)  # type: ignore[arg-type]
    there.client.process = FakeProcess()  # type: ignore[attr-defined]

    async def main() -> None:
        options = FleetOptions(4, 0, 0.3, 1.0)
        fleet = Fleet(
            [server, there], options, launch=lambda index: FakeProcess(), stop=lambda process: 0, changes=Notifier()
        )
        fleet.launch()
        await run_beside(fleet.answering(), fleet.supervise())

    with pytest.raises(FleetError, match="server 0 .*within 0.3 s; .*at http://127.0.0.1:9"):
        asyncio.run(asyncio.wait_for(main(), 8))


def test_the_last_joined_server_that_stays_away_ends_the_run() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        clients[0].health = hangs  # type: ignore[method-assign]
        assert clients[0].process is not None
        clients[0].process.code = 1
        await asyncio.sleep(8)

    with pytest.raises(FleetError, match=r"within 1 s, and no other .*at http://fake"):
        watched(work, joined=True)


def test_a_server_that_cannot_what_training_needs_ends_the_run() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        async def lacks() -> None:
            raise UnsupportedServer("SGLang 0.4.9 at http://fake does not answer what training needs")

        clients[0].check_capabilities = lacks  # type: ignore[method-assign]
        fleet.missed(fleet.servers[0])
        fleet.check(fleet.servers[0], fleet.servers[0].incarnation)
        await fleet.replace(fleet.servers[0])
        await asyncio.sleep(8)

    with pytest.raises(FleetError, match="rollout server 0: SGLang 0.4.9"):
        watched(work, max_restarts=1)


def test_restarts_run_out() -> None:
    async def work(fleet: Fleet, clients: list[FakeClient]) -> None:
        for _ in range(3):
            server = fleet.servers[0]
            before = server.starts
            clients[0].process.code = 1  # type: ignore[union-attr]
            await fleet.changes.until(lambda s=server, b=before: s.starts > b or None, 5)  # type: ignore[misc]
            assert not server.serving and server.version is None

    with pytest.raises(FleetError, match=r"server 0 died \(exit code 1\).*max_restarts is 2"):
        with_fleet(work, max_restarts=2)


def real_fleet(tmp_path: Path, program: str, *, start_timeout_s: float, max_restarts: int = 0) -> Fleet:
    log = tmp_path / "server.0.log"
    server = Server(0, ServerClient("http://127.0.0.1:9", 10, 1.0), log)
    return Fleet(
        [server],
        FleetOptions(4, max_restarts, start_timeout_s, 1.0),
        changes=Notifier(),
        launch=lambda index: start_child([sys.executable, "-c", program], env={}, log=log),
        stop=lambda process: stop_child(process, grace_s=2.0),  # type: ignore[arg-type]
    )


def test_a_server_that_cannot_start_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    program = "import sys; print('vcpo: error: no such model', file=sys.stderr); sys.exit(1)"
    fleet = real_fleet(tmp_path, program, start_timeout_s=20.0)

    async def main() -> None:
        fleet.launch()
        await run_beside(fleet.answering(), fleet.supervise())

    with pytest.raises(FleetError, match=r"\(exit code 1: no such model\), .*server.0.log"):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_what_a_dead_server_leaves_behind_ends_before_it_is_restarted(tmp_path: Path) -> None:
    """As a scheduler does, which holds the accelerator's memory, when the server's own process is killed."""
    program = (
        "import os, sys, time\n"
        "if os.fork() == 0: time.sleep(60)\n"
        f"open({str(tmp_path / 'groups')!r}, 'a').write(f'{{os.getpgrp()}}\\n'); sys.exit(1)"
    )
    fleet = real_fleet(tmp_path, program, start_timeout_s=20.0, max_restarts=1)

    async def main() -> None:
        fleet.launch()
        await run_beside(fleet.answering(), fleet.supervise())

    with pytest.raises(FleetError, match="died"):
        asyncio.run(asyncio.wait_for(main(), 20))
    first = int((tmp_path / "groups").read_text().split()[0])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            assert os.getpgid(process.pid) != first or process.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_never_answers_ends_the_run_at_the_deadline_and_is_stopped(tmp_path: Path) -> None:
    fleet = real_fleet(tmp_path, "import time; time.sleep(60)", start_timeout_s=0.3)

    async def main() -> None:
        fleet.launch()
        try:
            await run_beside(fleet.answering(), fleet.supervise())
        finally:
            await fleet.stop()

    with pytest.raises(FleetError, match=r"within 0.3 s of its start.*rollout.start_timeout_s"):
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

    with pytest.raises(FleetError, match=r"within 0.5 s of its start"):
        asyncio.run(asyncio.wait_for(main(), 8))


def test_a_server_that_hangs_does_not_hide_the_death_of_another() -> None:
    async def main() -> None:
        clients = [FakeClient(index) for index in range(2)]
        fleet = fake_fleet(config(rollout={"max_restarts": 0}), Notifier(), clients, Path("/nowhere"))

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
        changes = Notifier()
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
