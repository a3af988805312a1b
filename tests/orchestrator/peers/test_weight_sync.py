"""The update protocol to one and several servers: order, refusal, restart, deferral for an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.fake_run import FakeClient, FakeRun, bucket_texts, config, fake_fleet, weights
from vcpo_megatron.orchestrator.peers.probe import compare
from vcpo_megatron.orchestrator.peers.servers import back_in_service
from vcpo_megatron.orchestrator.peers.weight_sync import SyncError, WeightSync
from vcpo_megatron.rollout.client.http import ServerUnavailable
from vcpo_megatron.rollout.fleet.fleet import Fleet, FleetError
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import RunError, run_beside
from vcpo_megatron.transport.messages import Message, WeightsReady
from vcpo_megatron.types import PolicyVersion
from vcpo_megatron.weight_sync.orchestrator import Updater
from vcpo_megatron.weight_sync.wave import Wave, request

pytestmark = pytest.mark.timeout(30)


class RecordingClient(FakeClient):
    """Records every call of the protocol."""

    async def pause(self, mode: str) -> None:
        self.events.append(f"pause {mode}")
        await super().pause(mode)

    async def resume(self) -> None:
        self.events.append("resume")
        await super().resume()

    async def begin_weight_update(self) -> None:
        self.events.append("begin")
        await super().begin_weight_update()

    async def update_weights_from_tensor(self, bucket: bytes, version: str, flush_cache: bool = False) -> None:
        self.events.append(f"bucket {bucket.decode()} {version}")
        await super().update_weights_from_tensor(bucket, version, flush_cache)

    async def end_weight_update(self) -> None:
        self.events.append("end")
        await super().end_weight_update()


class Direct:
    """A transport that has the two buckets of ``weights`` at hand, for one server at a time."""

    session, together, strands = True, False, False

    def on_message(self, message: Message) -> None:
        pass

    async def prepare(self, wave: Wave[Any]) -> None:
        pass

    def untried(self, wave: Wave[Any]) -> bool:
        return False

    async def trial(self, wave: Wave[Any]) -> None:
        pass

    async def transfer(self, wave: Wave[Any]) -> dict[str, str]:
        (server,) = wave.servers
        for text in bucket_texts(wave.weights.version):
            await request(wave, server, server.client.update_weights_from_tensor(text, str(wave.weights.version)))
        return {}

    async def abort(self, reason: str) -> None:
        pass

    async def release(self, weights: WeightsReady) -> None:
        pass


def version(number: int) -> PolicyVersion:
    return PolicyVersion(1, number)


def with_sync(
    work: Callable[[Fleet, WeightSync, list[FakeClient]], Coroutine[Any, Any, None]],
    *,
    servers: int = 1,
    held: tuple[int, ...] = (),
    evaluators: int = 1,
    client: type[FakeClient] = FakeClient,
    timeout_s: float = 10.0,
    max_restarts: int = 0,
    wave: int = 1,
    verifier: Any = None,
) -> None:
    """Run ``work`` beside the sync and the fleet's supervision."""

    async def main() -> None:
        cfg = config(rollout={"max_restarts": max_restarts})
        clients = [client(i) for i in range(servers)]
        fleet = fake_fleet(cfg, Notifier(), clients, Path("/nowhere"))
        sync = WeightSync(
            fleet,
            Updater(lambda weights: Direct(), "retract", verifier),
            wave=wave,
            timeout_s=timeout_s,
            evaluators=fleet.servers[:evaluators],
            evaluation_due=lambda number: number in held,
        )
        fleet.launch()
        await run_beside(work(fleet, sync, clients), fleet.supervise(), sync.run())

    asyncio.run(asyncio.wait_for(main(), 25))


def test_the_calls_come_in_the_order_of_the_protocol() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        assert sync.newest is None
        sync.offer(weights(version(0)))
        assert sync.newest == version(0)
        await sync.all_loaded(0)
        assert clients[0].events == [
            "start",
            "pause retract",
            "begin",
            "bucket a1.0 1.0",
            "bucket b1.0 1.0",
            "end",
            "loaded 1.0",
            "resume",
        ]
        assert sync.take_metrics()["time/sync"] > 0 and sync.take_metrics() == {"time/sync": 0.0}

    with_sync(work, client=RecordingClient)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("step", ["begin_weight_update", "update_weights_from_tensor", "resume"])
def test_a_run_that_ends_in_an_update_leaves_no_joined_server_paused(step: str, joined: bool) -> None:
    left: list[FakeClient] = []

    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        fleet.servers[0].joined = joined
        left.extend(clients)
        own, reached = getattr(clients[0], step), asyncio.Event()

        async def hang(*args: Any) -> None:
            setattr(clients[0], step, own)
            reached.set()
            await asyncio.sleep(1000)

        await fleet.answering()
        setattr(clients[0], step, hang)
        sync.offer(weights(version(0)))
        await reached.wait()
        assert clients[0].paused

    with_sync(work)
    assert left[0].paused is not joined


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("fault", ["probe", "refusal", "deadline", "return"])
def test_what_ends_a_run_says_where_its_server_is(fault: str, joined: bool) -> None:
    """A joined one has no log here."""

    class Link:
        async def probe(self, tokens: Any) -> Any:
            return tokens[1:]

    async def gone(*args: Any) -> Any:
        raise ServerUnavailable("http://fake", "/generate", "connection reset")

    async def hangs(*args: Any) -> None:
        await asyncio.sleep(1000)

    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        (server,) = fleet.servers
        await fleet.answering()
        server.joined = joined
        if fault == "probe":
            clients[0].score = gone  # type: ignore[method-assign]
            await compare(Link(), fleet, 50, "float32")  # type: ignore[arg-type]
        if fault == "return":
            fleet.options = replace(fleet.options, takeover_timeout_s=0.1)
            await back_in_service(fleet, server)
        if fault == "refusal":
            clients[0].refuses = lambda label: True
        else:
            clients[0].begin_weight_update = hangs  # type: ignore[method-assign]
        sync.offer(weights(version(0)))
        await asyncio.sleep(1000)

    where = "it runs at http://fake" if joined else "see .*server.0.log"
    with pytest.raises((SyncError, RunError), match=f"rollout server 0 .*[,;] {where}"):
        with_sync(work, timeout_s=0.3)


def test_a_joined_server_that_cannot_be_resumed_does_not_hold_up_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        fleet.servers[0].joined = True

        async def dies(*args: Any) -> None:
            assert clients[0].process is not None
            clients[0].process.code = 1
            reached.set()
            await asyncio.sleep(1000)

        reached = asyncio.Event()
        clients[0].begin_weight_update = dies  # type: ignore[method-assign]
        await fleet.answering()
        sync.offer(weights(version(0)))
        await reached.wait()

    with_sync(work)
    assert "rollout server 0 at http://fake is left paused, " in capsys.readouterr().out


def test_versions_that_come_too_fast_are_skipped_not_queued() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        clients[0].latency_s = 0.1
        sync.offer(weights(version(0)))
        while clients[0].session is None:
            await asyncio.sleep(0.001)
        for number in range(1, 6):
            sync.offer(weights(version(number)))
        await sync.all_loaded(5)
        assert [event for event in clients[0].events if "loaded" in event] == ["loaded 1.0", "loaded 1.5"]

    with_sync(work)


def test_a_slow_server_does_not_hold_up_another() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        clients[0].latency_s = 60
        sync.offer(weights(version(0)))
        await fleet.changes.until(lambda: fleet.servers[1].serving or None, 5)
        assert not fleet.servers[0].serving
        assert fleet.lease(1).server is fleet.servers[1]

    with_sync(work, servers=2)


def test_a_server_without_weights_comes_before_one_with_old_ones() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        await sync.all_loaded(0)
        fleet.missed(fleet.servers[1])
        sync.offer(weights(version(1)))
        first = await fleet.changes.until(lambda: [s.index for s in fleet.servers if s.updating] or None, 5)
        assert first == [1]
        await sync.all_loaded(1)

    with_sync(work, servers=2)


def test_a_refused_update_takes_the_server_out_and_is_tried_once_more() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        await sync.all_loaded(0)
        refusals = iter([True])
        clients[0].refuses = lambda _: next(refusals, False)
        states = []

        def note() -> bool | None:
            states.append((fleet.servers[0].serving, fleet.servers[0].version))
            return fleet.servers[0].version == version(1) or None

        sync.offer(weights(version(1)))
        await fleet.changes.until(note, 5)
        assert (False, None) in states  # no request between the refusal and the full update
        assert clients[0].version == "1.1" and not clients[0].paused

    with_sync(work)


def test_a_server_that_another_one_shows_to_be_wrong_gets_its_weights_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Accuses:
        """Finds nothing wrong; once both servers are up to date, the first is not to be believed."""

        checked, verified = 0, 0

        async def check(self, *about: Any) -> None:
            self.checked += 1

        def take_suspects(self) -> set[str]:
            return {"rollout server 0"} if self.checked == 2 else set()

    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        await fleet.changes.until(lambda: clients[0].events.count("loaded 1.0") == 2 or None, 5)
        assert clients[1].events.count("loaded 1.0") == 1

    with_sync(work, servers=2, verifier=Accuses())
    assert "rollout server 0 may hold wrong weights" in capsys.readouterr().out


def test_an_update_refused_twice_ends_the_run_naming_the_server() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        clients[1].refuses = lambda asked: asked == "1.0"
        sync.offer(weights(version(0)))
        await asyncio.sleep(5)

    with pytest.raises(SyncError, match=r"server 1 refused weights 1.0 twice: .*mismatch.*server.1.log"):
        with_sync(work, servers=2)


def test_a_server_that_hangs_in_an_update_ends_the_run_at_the_deadline() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        clients[0].latency_s = 60
        sync.offer(weights(version(0)))
        await asyncio.sleep(20)

    with pytest.raises(SyncError, match=r"server 0 .*weights 1.0 within 0.5 s"):
        with_sync(work, timeout_s=0.5)


def test_a_server_that_hangs_in_an_update_is_replaced_when_it_may_be_restarted() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        clients[0].latency_s = 60
        sync.offer(weights(version(0)))
        await fleet.changes.until(lambda: fleet.servers[0].starts == 2 or None, 5)
        clients[0].latency_s = 0.0
        await sync.all_loaded(0)
        assert clients[0].events.count("start") == 2

    with_sync(work, timeout_s=1.0, max_restarts=3)


def test_a_server_that_dies_in_an_update_gets_the_newest_version_after_its_restart() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        await sync.all_loaded(0)
        clients[0].latency_s = 0.1
        sync.offer(weights(version(1)))
        while clients[0].session is None:
            await asyncio.sleep(0.001)
        assert fleet.servers[0].updating
        clients[0].process.code = -11
        sync.offer(weights(version(2)))
        await sync.all_loaded(2)
        assert [event for event in clients[0].events if event.split()[0] in ("start", "loaded")] == [
            "start",
            "loaded 1.0",
            "start",
            "loaded 1.2",
        ]

    with_sync(work, max_restarts=1)


def test_a_killed_server_whose_connections_end_before_its_exit_is_seen_has_died() -> None:
    """Else the run would end by a server that lives and does not take weights."""

    class Killed(RecordingClient):
        async def begin_weight_update(self) -> None:
            if self.version is None:
                return await super().begin_weight_update()
            process = self.process
            assert process is not None
            asyncio.get_running_loop().call_later(0.3, setattr, process, "code", -9)
            raise ServerUnavailable(self.base_url, "/begin_weight_update", "connection reset")

    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        await sync.all_loaded(0)
        sync.offer(weights(version(1)))
        await asyncio.sleep(20)

    with pytest.raises(FleetError, match="rollout server 0 .*-9"):
        with_sync(work, client=Killed)


def test_updates_of_evaluating_servers_are_deferred_and_made_up_in_full() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        await sync.all_loaded(0)
        sync.offer(weights(version(2)))
        sync.offer(weights(version(3)))  # the one held for evaluation is not forgotten
        await sync.evaluation_loaded(2)
        await fleet.changes.until(lambda: fleet.servers[1].version == version(3) or None, 5)
        sync.offer(weights(version(4)))
        await fleet.changes.until(lambda: fleet.servers[1].version == version(4) or None, 5)
        assert fleet.servers[0].version == version(2) and fleet.servers[0].serving
        sync.end_evaluation()
        await sync.all_loaded(4)
        assert clients[0].events == ["start", "loaded 1.0", "loaded 1.2", "loaded 1.4"]

    with_sync(work, servers=2, held=(2,))


def test_an_evaluating_server_that_dies_comes_back_with_the_version_held_for_it() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        sync.offer(weights(version(1)))
        await sync.evaluation_loaded(0)
        clients[0].process.code = -9
        await fleet.changes.until(lambda: fleet.servers[0].starts == 2 or None, 5)
        await sync.evaluation_loaded(0)
        assert fleet.servers[0].version == version(0)

    with_sync(work, held=(0,), max_restarts=1)


def test_two_versions_held_for_evaluation_at_a_time_are_an_error() -> None:
    async def work(fleet: Fleet, sync: WeightSync, clients: list[FakeClient]) -> None:
        sync.offer(weights(version(0)))
        with pytest.raises(SyncError, match=r"due at version 1.1 while that of 1.0"):
            sync.offer(weights(version(1)))

    with_sync(work, held=(0, 1))


def test_a_run_whose_server_refuses_weights_ends_with_one_line(tmp_path: Path) -> None:
    def setup(run: FakeRun) -> None:
        run.clients[0].refuses = lambda asked: asked == "1.2"

    run = FakeRun(tmp_path, config(staleness={"max_staleness": 0}), setup=setup)
    with pytest.raises(SyncError, match="refused weights 1.2 twice"):
        run.run()
