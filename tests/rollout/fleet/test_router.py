"""A fleet behind a stand-in for sglang-router, and the real router's answers (0.3.2, measured)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.orchestrator.fake_run import FakeClient, FakeProcess, FakeRun, config
from tests.rollout.canned import Handler, run_against
from tests.rollout.client.test_http import ANSWER
from vcpo_megatron.rollout.client.http import ServerError, ServerUnavailable
from vcpo_megatron.rollout.client.protocol import GenerateResult, SamplingParams
from vcpo_megatron.rollout.client.replies import UnsupportedServer
from vcpo_megatron.rollout.fleet.fleet import Fleet, FleetError, FleetOptions
from vcpo_megatron.rollout.fleet.router import Router, RouterClient, sampling_problem
from vcpo_megatron.rollout.fleet.server import Server, ServerState
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import run_beside
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(60)


class FakeRouter:
    """Router and its client in one: requests go to ``workers`` in turn. ``events`` are the changes of its workers."""

    base_url = "http://router"

    def __init__(self, clients: Sequence[FakeClient], workers: Sequence[str] = ()) -> None:
        self.servers = {client.base_url: client for client in clients}
        self.listed = list(workers)
        self.events: list[str] = []
        self.dead = False
        self.turn = 0

    async def workers(self) -> dict[str, str]:
        if self.dead:
            raise ServerUnavailable(self.base_url, "/workers", "connection refused")
        return {address: f"id of {address}" for address in self.listed}

    async def add(self, address: str) -> None:
        self.events.append(f"add {address}")
        self.listed.append(address)

    async def remove(self, worker: str) -> None:
        self.events.append(f"remove {worker.removeprefix('id of ')}")
        self.listed.remove(worker.removeprefix("id of "))

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        if self.dead or not self.listed:
            raise ServerError(self.base_url, "/generate", 503, "no available workers")
        self.turn += 1
        return await self.servers[self.listed[self.turn % len(self.listed)]].generate(input_ids, sampling, rid)

    async def close(self) -> None:
        self.events.append("close")


def named(count: int) -> list[FakeClient]:
    clients = [FakeClient(index) for index in range(count)]
    for client in clients:
        client.base_url = f"http://{client.index}"
    return clients


def routed(clients: Sequence[FakeClient], router: FakeRouter, health_s: float, timeout_s: float = 1.0) -> Fleet:
    """A fleet of joined servers behind ``router``."""
    servers = [Server(c.index, c, Path("/nowhere"), joined=True) for c in clients]  # type: ignore[arg-type]
    for client in clients:
        client.process = FakeProcess()
    options = FleetOptions(8, 0, 5.0, timeout_s, health_interval_s=health_s, health_timeout_s=0.2)
    return Fleet(
        servers,
        options,
        launch=lambda index: FakeProcess(),
        stop=lambda process: 0,
        changes=Notifier(),
        router=Router(router, [*router.servers], interval_s=0.1, timeout_s=timeout_s),  # type: ignore[arg-type]
    )


def load(fleet: Fleet, clients: Sequence[FakeClient], index: int, number: int) -> None:
    clients[index].version = f"1.{number}"
    fleet.loaded(fleet.servers[index], PolicyVersion(1, number))


Work = Callable[[Fleet, FakeRouter, list[FakeClient]], Awaitable[None]]


def behind_a_router(work: Work, *, workers: Sequence[str] = (), loaded: int = 2, health_s: float = 0.1) -> FakeRouter:
    """Runs ``work`` beside the supervision of two servers, the first ``loaded`` of which hold version 1.0."""

    async def main() -> FakeRouter:
        clients = named(2)
        router = FakeRouter(clients, workers)
        fleet = routed(clients, router, health_s)

        async def ready() -> None:
            await fleet.answering()
            for index in range(loaded):
                load(fleet, clients, index, 0)
            await work(fleet, router, clients)

        fleet.launch()
        await run_beside(ready(), fleet.supervise())
        return router

    return asyncio.run(asyncio.wait_for(main(), 15))


async def members(fleet: Fleet, *addresses: str) -> None:
    assert fleet.router is not None
    router = fleet.router
    await fleet.changes.until(lambda: router.members == set(addresses) or None, 5)


def test_servers_are_behind_the_router_while_they_serve() -> None:
    """One that the router has from the start is taken out until it has weights; each is put back once it has them."""

    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        await members(fleet)
        assert router.events == ["remove http://1"] and fleet.lease(1) is None
        load(fleet, clients, 0, 0)
        assert fleet.lease(1) is None  # nobody is behind the router yet
        await members(fleet, "http://0")
        load(fleet, clients, 1, 0)
        await members(fleet, "http://0", "http://1")
        fleet.missed(fleet.servers[0])
        await members(fleet, "http://1")
        load(fleet, clients, 0, 1)
        await members(fleet, "http://0", "http://1")
        assert router.events[1:] == ["add http://0", "add http://1", "remove http://0", "add http://0"]

    behind_a_router(work, workers=["http://1"], loaded=0)


def test_a_server_in_an_update_stays_and_its_requests_wait() -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        await members(fleet, "http://0", "http://1")
        lease = fleet.lease(2)
        assert lease is not None
        for server, client in zip(fleet.servers, clients, strict=True):
            server.updating = True
            await client.pause("retract")
        requests = [asyncio.ensure_future(lease.generate((1, 2), SamplingParams(4), f"r{i}")) for i in range(2)]
        await asyncio.sleep(0.3)
        assert not any(request.done() for request in requests) and len(router.listed) == 2
        for index, client in enumerate(clients):
            load(fleet, clients, index, 1)
            await client.resume()
            fleet.servers[index].updating = False
        assert {span.version for result in await asyncio.gather(*requests) for span in result.spans} <= {"1.0", "1.1"}

    behind_a_router(work)


@pytest.mark.parametrize("when", ["start", "later"])
def test_a_worker_that_is_not_of_the_run_is_refused_by_name(when: str) -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        assert when == "later"
        await members(fleet, "http://0", "http://1")
        router.listed.append("http://stranger:1")
        await asyncio.sleep(5)

    with pytest.raises(FleetError, match=r"http://router has workers .*: http://stranger:1; remove them"):
        behind_a_router(work, workers=["http://stranger:1"] if when == "start" else [])


def test_the_oldest_version_admits_a_group_and_is_written_down() -> None:
    """The router may send it to any server."""

    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        load(fleet, clients, 0, 7)
        load(fleet, clients, 1, 5)
        await members(fleet, "http://0", "http://1")
        asked: list[int] = []
        lease = fleet.lease(1, allowed=lambda number: asked.append(number) is None)
        assert lease is not None and set(asked) == {5}
        assert (lease.version, lease.held, lease.server.index) == (5, PolicyVersion(1, 5), 0)
        assert fleet.lease(1, allowed=lambda number: number > 5) is None

    behind_a_router(work)


def test_an_evaluation_asks_its_servers_themselves() -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        load(fleet, clients, 0, 7)
        lease = fleet.lease(1, among=fleet.servers[:1], allowed=lambda number: number == 7)
        assert lease is not None
        for index in range(4):
            result = await lease.generate((1, 2), SamplingParams(4), f"r{index}")
            assert {span.version for span in result.spans} == {"1.7"}
        assert router.turn == 0

    behind_a_router(work)


def test_every_answer_has_the_version_of_the_server_that_gave_it() -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        load(fleet, clients, 1, 3)
        await members(fleet, "http://0", "http://1")
        lease = fleet.lease(4)
        assert lease is not None
        found = [await lease.generate((1, 2), SamplingParams(4), f"r{i}") for i in range(4)]
        assert sorted({span.version for result in found for span in result.spans}) == ["1.0", "1.3"]
        for client, version in zip(clients, ("1.0", "1.3"), strict=True):
            mine = {event.split()[1] for event in client.events if event.startswith("generate")}
            assert len(mine) == 2
            assert {r.spans[0].version for i, r in enumerate(found) if f"r{i}" in mine} == {version}

    behind_a_router(work)


@pytest.mark.parametrize("weights", ["default", "1.2"])
def test_an_answer_of_other_weights_is_not_taken(weights: str) -> None:
    """Of a server that was restarted behind the run's back (by any name), or has older weights than the group may."""

    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        for index in range(2):
            load(fleet, clients, index, 3)
        await members(fleet, "http://0", "http://1")
        lease = fleet.lease(4)
        assert lease is not None and lease.version == 3
        clients[0].version = weights
        clients[0].policy = lambda version: version
        found = await asyncio.gather(*(lease.generate((1, 2), SamplingParams(4), f"r{i}") for i in range(4)))
        assert {span.version for result in found for span in result.spans} == {"1.3"}
        assert any(weights in event for event in clients[0].events)
        # All were asked at once, long before their health was due.
        assert fleet.servers[0].state is ServerState.EMPTY and fleet.servers[1].serving
        await members(fleet, "http://1")

    behind_a_router(work, health_s=60.0)


def test_a_lost_server_is_taken_out_and_put_back_with_whole_weights() -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        await members(fleet, "http://0", "http://1")
        lease = fleet.lease(1)
        assert lease is not None and lease.server.index == 0
        assert clients[0].process is not None
        clients[0].process.code = 1
        await members(fleet, "http://1")
        assert not fleet.servers[0].available
        assert {s.version for s in (await lease.generate((1, 2), SamplingParams(4), "r")).spans} == {"1.0"}
        assert lease.server.index == 1 and fleet.servers[0].load == 0  # counted where it may be sampled
        clients[0].process.code = None
        await fleet.changes.until(lambda: fleet.servers[0].available or None, 5)
        await asyncio.sleep(0.3)
        assert router.listed == ["http://1"]
        load(fleet, clients, 0, 1)
        await members(fleet, "http://0", "http://1")
        assert clients[0].events.count("adopt") == 2

    behind_a_router(work)


def test_a_request_waits_for_a_router_that_is_restarted() -> None:
    """It comes back with no workers, gets them again, and the request is sent again."""

    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        await members(fleet, "http://0", "http://1")
        lease = fleet.lease(1)
        assert lease is not None
        router.dead, router.listed = True, []
        request = asyncio.ensure_future(lease.generate((1, 2), SamplingParams(4), "r"))
        await asyncio.sleep(0.25)  # of the second that it has
        assert not request.done() and all(server.serving for server in fleet.servers)  # it is not they that failed
        router.dead = False
        assert {span.version for span in (await request).spans} == {"1.0"}
        assert sorted(router.listed) == ["http://0", "http://1"]

    behind_a_router(work)


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (500, 3)])
def test_a_request_that_is_refused_fails(status: int, tries: int) -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        await members(fleet, "http://0", "http://1")
        lease, asked = fleet.lease(1), []

        async def refuse(*request: Any) -> GenerateResult:
            asked.append(request)
            raise ServerError("http://router", "/generate", status, "no such thing")

        router.generate = refuse  # type: ignore[method-assign]
        assert lease is not None
        with pytest.raises(ServerError, match=f"http://router/generate answered {status}: no such thing"):
            await lease.generate((1, 2), SamplingParams(4), "r")
        assert len(asked) == tries and all(server.serving for server in fleet.servers)

    behind_a_router(work)


def test_a_router_that_does_not_answer_ends_the_run() -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        await members(fleet, "http://0", "http://1")
        router.dead = True
        await asyncio.sleep(10)

    with pytest.raises(FleetError, match=r"http://router .*within 1 s .*: .*connection refused"):
        behind_a_router(work)


def test_a_router_that_reaches_no_server_ends_the_run() -> None:
    async def work(fleet: Fleet, router: FakeRouter, clients: list[FakeClient]) -> None:
        async def never(address: str) -> None:
            """Accepted, and nothing comes of it."""

        router.add = never  # type: ignore[method-assign]
        await asyncio.sleep(10)

    with pytest.raises(FleetError, match=r"none of the servers that serve, http://0, http://1"):
        behind_a_router(work)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_behind_a_router_keeps_the_bound_and_the_versions(tmp_path: Path, lag: int) -> None:
    """Tokens are a function of the version that sampled them, so a wrong one would be seen; so is the staleness."""

    def setup(run: FakeRun) -> None:
        for client in run.clients:
            client.base_url = f"http://{client.index}"
        router = FakeRouter(run.clients)
        assert run.fleet is not None
        run.fleet.router = Router(router, [*router.servers], interval_s=0.1, timeout_s=5.0)  # type: ignore[arg-type]

    run = FakeRun(
        tmp_path, config(staleness={"max_staleness": lag}, train={"steps": 8, "eval_every": 3}), servers=2, setup=setup
    )
    run.learner.step_s = 0.03
    assert run.run() == "run ended"
    assert [batch.step for batch in run.learner.batches] == list(range(8)) and max(run.staleness()) <= lag
    sampled = {
        client.index: {event for event in client.events if event.startswith("generate train-")}
        for client in run.clients
    }
    assert all(sampled.values())
    by_rid = {event.split()[1]: event.split()[3] for events in sampled.values() for event in events}
    trajectories = [t for batch in run.learner.batches for group in batch.groups for t in group.trajectories]
    for trajectory in trajectories:
        rid = f"{trajectory.prompt_id}/{trajectory.group_id}/{trajectory.sample_index}/0.0"
        assert str(trajectory.turns[0].spans[0].version) == by_rid[rid]


# --- the client ---------------------------------------------------------------------------------


def against(handler: Handler, scenario: Callable[[RouterClient], Awaitable[Any]]) -> Any:
    return run_against(handler, lambda url: RouterClient(f"{url}/", 10, 5.0), scenario)


def test_what_the_router_is_asked_and_answers() -> None:
    seen: list[tuple[str, str, Any]] = []
    workers = [
        {"id": "5355b740", "url": "http://127.0.0.1:1", "model_id": "m", "is_healthy": True, "load": 0},
        {"id": "b33ae622", "url": "http://127.0.0.1:2/", "model_id": "m", "is_healthy": False, "load": 0},
    ]

    async def handle(request: web.Request) -> web.StreamResponse:
        text = await request.text()
        seen.append((request.method, request.path, json.loads(text) if text else None))
        if request.path == "/generate":
            return web.json_response(ANSWER)
        if request.method == "GET":
            return web.json_response({"workers": workers, "total": 2, "stats": {"regular_count": 2}})
        if request.path == "/workers/gone":
            return web.json_response({"error": "Worker gone not found", "code": "WORKER_NOT_FOUND"}, status=404)
        return web.json_response({"status": "accepted", "worker_id": "b24e657a"}, status=202)

    async def scenario(client: RouterClient) -> None:
        assert await client.workers() == {"http://127.0.0.1:1": "5355b740", "http://127.0.0.1:2": "b33ae622"}
        await client.add("http://127.0.0.1:3")
        await client.remove("b33ae622")
        await client.remove("gone")
        assert (await client.generate((1, 2), SamplingParams(1), "r")).spans == ((0, 1, "1.0"),)

    against(handle, scenario)
    assert seen[-1][2].pop("rid").split("/")[1:] == ["r", "1"]
    assert seen == [
        ("GET", "/workers", None),
        ("POST", "/workers", {"url": "http://127.0.0.1:3"}),
        ("DELETE", "/workers/b33ae622", None),
        ("DELETE", "/workers/gone", None),
        # No cache key: which weights will read the prompt is not known. The caches are flushed at every pause.
        (
            "POST",
            "/generate",
            {
                "input_ids": [1, 2],
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            },
        ),
    ]


def test_a_server_is_no_router() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async def scenario(client: RouterClient) -> None:
        with pytest.raises(UnsupportedServer, match=r"rollout.router = .*: .*is no sglang-router"):
            await client.workers()

    against(handle, scenario)


#: What sglang-router 0.3.2 leaves of a request (measured: every field that a client sends, against what arrived).
KEPT = {"rid", "input_ids", "sampling_params", "return_logprob", "extra_key"}
KEPT_SAMPLING = {
    "max_new_tokens",
    "temperature",
    "ignore_eos",
    "stop_token_ids",
    "sampling_seed",
    "top_p",
    "top_k",
    "min_p",
}


def test_a_request_loses_nothing_on_its_way_through_the_router() -> None:
    """But for restricted sampling, which is refused."""
    bodies: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response(ANSWER)

    async def scenario(client: RouterClient) -> None:
        await client.generate((1, 2), SamplingParams(4, 0.7, True, (5, 6), 77), "r")
        with contextlib.suppress(ValueError):  # the answer has no log-probs of what was left
            await client.generate((1, 2), SamplingParams(4, 0.7, top_p=0.9, top_k=5, min_p=0.1), "r")

    against(handle, scenario)
    plain, restricted = bodies
    assert set(plain) <= KEPT and set(plain["sampling_params"]) <= KEPT_SAMPLING
    assert set(restricted) - KEPT == {"return_sampling_mask"}


def test_restricted_sampling_is_refused_by_name() -> None:
    assert sampling_problem({"max_new_tokens": 4, "ignore_eos": True, "stop_token_ids": (1,)}) is None
    problem = sampling_problem({"top_k": 20, "top_p": 0.9})
    assert problem is not None and "samples with top_p, top_k" in problem and "return_sampling_mask" in problem
