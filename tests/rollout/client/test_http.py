"""The client against a server of canned answers: what it sends, and how it reports each failure."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.rollout.canned import Handler, run_against
from vcpo_megatron.rollout.client import http as client_module
from vcpo_megatron.rollout.client import protocol
from vcpo_megatron.rollout.client.http import ServerClient, ServerError, ServerUnavailable, allow_connections
from vcpo_megatron.rollout.client.protocol import ProtocolError, SamplingParams
from vcpo_megatron.rollout.client.replies import ServerInfo, UnsupportedServer

ANSWER = {
    "output_ids": [1],
    "meta_info": {
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "1.0", "start": 0, "end": 1}],
        "output_token_logprobs": [[-1.0, 1, None]],
    },
}


def against(handler: Handler, scenario: Callable[[ServerClient], Awaitable[Any]], timeout_s: float = 5.0) -> Any:
    """Runs ``scenario`` against a server whose every endpoint is ``handler``."""
    return run_against(handler, lambda url: ServerClient(url, 10, timeout_s), scenario)


def answering(status: int = 200, value: Any = None, text: str | None = None) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if text is not None:
            return web.Response(status=status, text=text)
        return web.json_response(value, status=status)

    return handle


def test_calls_reach_their_endpoints_with_their_bodies() -> None:
    seen: list[tuple[str, str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append((request.method, request.path, await request.json() if request.method == "POST" else None))
        return web.json_response({"success": True, "message": ""})

    async def scenario(client: ServerClient) -> None:
        await client.pause("in_place")
        await client.pause("retract")
        await client.begin_weight_update()
        await client.update_weights_from_tensor(b"QQ==", "2.7")
        await client.end_weight_update()
        await client.resume()
        await client.abort("not in flight")
        await client.abort()
        await client.flush_cache()
        assert await client.ready()

    against(handle, scenario)
    bucket = {"serialized_named_tensors": ["QQ=="], "load_format": None, "flush_cache": False, "weight_version": "2.7"}
    assert seen == [
        ("POST", "/pause_generation", {"mode": "in_place"}),
        ("POST", "/pause_generation", {"mode": "retract"}),
        ("POST", "/flush_cache", {}),
        ("POST", "/begin_weight_update", {}),
        ("POST", "/update_weights_from_tensor", bucket),
        ("POST", "/end_weight_update", {}),
        ("POST", "/continue_generation", {}),
        ("POST", "/abort_request", {"abort_all": True}),
        ("POST", "/flush_cache", {}),
        ("GET", "/ready", None),
    ]


@pytest.mark.parametrize("ids", [[], [10], [3, -1], [True], [1.0]])
def test_bad_ids_are_never_sent(ids: list[Any]) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        raise AssertionError("sent")

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ProtocolError, match="input_ids"):
            await client.generate(ids, SamplingParams(), "r")
        with pytest.raises(ProtocolError, match="input_ids"):
            await client.generate_batch([[1], ids], [SamplingParams()] * 2)
        with pytest.raises(ProtocolError, match="input_ids"):
            await client.score(ids)
        with pytest.raises(ProtocolError, match="stop_token_ids"):
            await client.generate([1], SamplingParams(stop_token_ids=(10,)), "r")

    against(handle, scenario)


@pytest.mark.parametrize(
    ("handler", "status", "message"),
    [
        (answering(400, {"success": False, "message": "too long"}), 400, "too long"),
        (answering(400, {"error": {"message": "inner"}}), 400, "inner"),
        (answering(503, text="overloaded\n"), 503, "overloaded"),
        (answering(502, text=""), 502, "Bad Gateway"),
    ],
)
def test_a_refusal_tells_server_endpoint_status_and_message(handler: Handler, status: int, message: str) -> None:
    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerError) as caught:
            await client.generate([1], SamplingParams(), "r")
        assert (caught.value.status, caught.value.message) == (status, message)
        assert str(caught.value) == f"rollout server {client.base_url}/generate answered {status}: {message}"
        assert await client.ready() is False

    against(handler, scenario)


@pytest.mark.parametrize(
    "handler", [answering(value={}), answering(text="[{"), answering(value={**ANSWER, "output_ids": [10]})]
)
def test_an_answer_that_breaks_the_protocol_names_the_server(handler: Handler) -> None:
    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ProtocolError, match=f"{client.base_url}/generate"):
            await client.generate([1], SamplingParams(), "r")

    against(handler, scenario)


def test_a_success_that_is_none_is_a_protocol_error() -> None:
    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ProtocolError, match="/end_weight_update: refused: no"):
            await client.end_weight_update()

    against(answering(value={"success": False, "message": "no"}), scenario)


def test_a_silent_server_is_given_up() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerUnavailable, match="/generate is unavailable: .*0.3"):
            await client.generate([1], SamplingParams(), "r")

    against(handle, scenario, timeout_s=0.3)


def test_a_server_that_hangs_up_or_is_not_there() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerUnavailable, match="/generate"):
            await client.generate([1], SamplingParams(), "r")
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            nobody = ServerClient(f"http://127.0.0.1:{unused.getsockname()[1]}/", 10, 5.0)
            with pytest.raises(ServerUnavailable, match="/model_info is unavailable"):
                await nobody.model_info()
            assert await nobody.ready() is False
            await nobody.close()

    against(handle, scenario)


def test_a_pause_flushes_the_cache_as_soon_as_it_can() -> None:
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        busy = request.path == "/flush_cache" and seen.count("/flush_cache") < 3
        return web.Response(status=400 if busy else 200, text="busy")

    against(handle, lambda client: client.pause("abort"))
    assert seen == ["/pause_generation", "/flush_cache", "/flush_cache", "/flush_cache"]


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang closes connections that were idle for 5 s; a request that crosses the close is lost."""
    assert client_module.IDLE_CONNECTION_S < 5
    monkeypatch.setattr(client_module, "IDLE_CONNECTION_S", 0.5)
    ports: list[int] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.json_response({})

    async def scenario(client: ServerClient) -> None:
        for pause_s in (0.0, 0.0, 1.2):
            await asyncio.sleep(pause_s)
            await client.resume()

    against(handle, scenario)
    assert ports[0] == ports[1] != ports[2]


# --- versions of servers ------------------------------------------------------------------------


def old_server(missing: set[str], seen: list[str], answer: Any = ANSWER) -> Handler:
    """SGLang's endpoints but ``missing``, which answer 404 as FastAPI does."""

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        if request.path in missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path == "/generate":
            return web.json_response(answer)
        return web.json_response({"success": True, "message": "", "version": "0.4.9", "weight_version": "1.0"})

    return handle


def test_a_server_without_begin_and_end_takes_updates_without() -> None:
    seen: list[str] = []

    async def scenario(client: ServerClient) -> None:
        for _ in range(2):
            await client.begin_weight_update()
            await client.update_weights_from_tensor(b"QQ==", "2.7")
            await client.end_weight_update()

    against(old_server({"/begin_weight_update", "/end_weight_update"}, seen), scenario)
    assert seen == ["/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_tensor"]


def test_a_server_without_ready_is_asked_for_its_health() -> None:
    seen: list[str] = []
    assert against(old_server({"/ready"}, seen), lambda client: client.ready()) is True
    assert seen == ["/ready", "/health"]
    assert against(old_server({"/ready", "/health"}, seen), lambda client: client.ready()) is False


def test_a_server_that_can_what_training_needs_is_taken() -> None:
    seen: list[str] = []
    against(old_server(set(), seen), lambda client: client.check_capabilities())
    assert seen == ["/model_info", "/generate", "/server_info"]


def without(key: str) -> Any:
    return {**ANSWER, "meta_info": {name: value for name, value in ANSWER["meta_info"].items() if name != key}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (old_server(set(), [], without("weight_versions")), r"SGLang 0.4.9 at http\S+ does not .*weight_versions"),
        (old_server(set(), [], without("output_token_logprobs")), "SGLang 0.4.9 .*output_token_logprobs"),
        (old_server({"/model_info", "/server_info", "/get_server_info"}, []), "is no SGLang server that is known"),
    ],
)
def test_a_server_that_lacks_something_is_refused_by_name(handler: Handler, message: str) -> None:
    async def scenario(client: ServerClient) -> None:
        with pytest.raises(UnsupportedServer, match=message):
            await client.check_capabilities()

    against(handler, scenario)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, ServerInfo(1, False)),
        ({"tp_size": 4, "dp_size": 1, "pp_size": 1, "device": "cuda"}, ServerInfo(4, True)),
        ({"tp_size": 2, "device": "cpu"}, ServerInfo(2, False)),
    ],
)
def test_a_server_tells_its_ranks(said: dict[str, Any], expected: ServerInfo) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(ANSWER if request.path == "/generate" else said)

    async def scenario(client: ServerClient) -> ServerInfo:
        await client.check_capabilities()
        return client.info

    assert against(handle, scenario) == expected


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"pp_size": 2}, "has pp_size = 2: weights are broadcast"),
        ({"dp_size": 2}, "has dp_size = 2: its replicas"),
        ({"tp_size": "two"}, "says tp_size = 'two'"),
        ({"tp_size": 0}, "says tp_size = 0"),
    ],
)
def test_a_split_that_weights_do_not_reach_is_refused(said: dict[str, Any], message: str) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(ANSWER if request.path == "/generate" else said)

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(UnsupportedServer, match=message):
            await client.check_capabilities()

    against(handle, scenario)


def test_what_another_run_left_is_undone() -> None:
    seen: list[str] = []
    unknown = {"new_version": "unknown", "abort_all_requests": True}

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        assert request.path != "/update_weight_version" or await request.json() == unknown
        status = {"/end_weight_update": 400, "/workers": 404}.get(request.path, 200)
        return web.json_response({"success": status == 200, "message": "no session is open"}, status=status)

    against(handle, lambda client: client.adopt())
    assert seen == ["/workers", "/model_info", "/end_weight_update", "/update_weight_version", "/continue_generation"]


OWN, OTHER = "3f9a21c0", "00c12a9f"


def shared(label: str, loads: list[Any], seen: list[str] | None = None) -> Handler:
    """A joined server that holds weights ``label``; ``loads``: what it answers to its load, the last one for ever."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(request.path)
        if request.path == "/model_info":
            return web.json_response({"weight_version": label})
        if request.path in ("/v1/loads", "/get_load"):
            answer = loads.pop(0) if len(loads) > 1 else loads[0]
            own = request.path == "/v1/loads" if isinstance(answer, dict) else request.path == "/get_load"
            return web.json_response(answer, status=200 if own and answer else 404)
        return web.json_response({"success": True}, status=404 if request.path == "/workers" else 200)

    return handle


def load(running: int, waiting: int) -> dict[str, Any]:
    return {"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]}


@pytest.mark.parametrize(
    ("label", "loads", "former"),
    [
        (f"{OTHER}.1.17", [load(0, 0)], OTHER),  # it ended, or was killed
        (f"{OTHER}.1.17", [load(3, 0), load(0, 1), load(0, 0)], OTHER),  # was killed a moment ago
        (f"{OTHER}.1.17", [[{"num_reqs": 0, "num_waiting_reqs": 0}]], OTHER),  # before /v1/loads
        (f"{OTHER}.1.17", [{}], OTHER),  # does not say
        (f"{OWN}.1.17", [load(3, 9)], None),  # an earlier attempt of this run
        ("default", [load(3, 9)], None),
        ("1.17", [load(3, 9)], None),
    ],
)
def test_a_server_is_taken_over_when_no_other_run_uses_it(label: str, loads: list[Any], former: str | None) -> None:
    seen: list[str] = []
    make = lambda url: ServerClient(url, 10, 5.0, run=OWN)  # noqa: E731
    assert run_against(shared(label, loads, seen), make, lambda client: client.adopt()) == former
    assert seen[-3:] == ["/end_weight_update", "/update_weight_version", "/continue_generation"]


@pytest.mark.parametrize("loads", [load(3, 0), load(0, 2), [{"num_reqs": 1, "num_waiting_reqs": 0}]])
def test_a_server_that_another_run_uses_is_refused_and_left_as_it_is(
    loads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LEFTOVER_S", 0.2)
    seen: list[str] = []

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(UnsupportedServer, match=rf"another run, {OTHER}: .* {OTHER}.1.17 .*of its own"):
            await client.adopt()

    run_against(shared(f"{OTHER}.1.17", [loads], seen), lambda url: ServerClient(url, 10, 5.0, run=OWN), scenario)
    assert set(seen) <= {"/workers", "/model_info", "/v1/loads", "/get_load"}


def test_every_try_of_a_request_has_an_id_of_its_own_that_names_the_run() -> None:
    """A server that still computes the first one, whose connection was lost, refuses the same id."""
    rids: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        rid = (await request.json())["rid"]
        if isinstance(rid, list):
            rids.extend(rid)
            return web.json_response([ANSWER] * len(rid))
        rids.append(rid)
        if len(rids) == 1:
            request.transport.close()  # type: ignore[union-attr]
        return web.json_response(ANSWER)

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerUnavailable):
            await client.generate((1, 2), SamplingParams(1), "p/7/3/0.0")
        await client.generate((1, 2), SamplingParams(1), "p/7/3/0.0")
        await client.generate_batch([(1,), (2,)], [SamplingParams(1)] * 2, ["a", "b"])
        again = ServerClient(client.base_url, 10, 5.0, run=OWN)  # of another attempt of the run
        await again.generate((1, 2), SamplingParams(1), "p/7/3/0.0")
        await again.close()

    run_against(handle, lambda url: ServerClient(url, 10, 5.0, run=OWN), scenario)
    assert len(set(rids)) == len(rids) == 5 and all(rid.startswith(f"{OWN}-") for rid in rids)
    assert [name in rid for name, rid in zip(["p/7/3/0.0"] * 2 + ["a", "b", "p/7/3/0.0"], rids, strict=True)] == [
        True
    ] * 5


@pytest.mark.parametrize(("logprob", "refused"), [(0.0, True), (-0.0, True), (-4.6, False)])
def test_a_server_without_log_probs_is_refused_before_the_first_request(logprob: float, refused: bool) -> None:
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            asked.append((await request.json())["sampling_params"]["temperature"])
            meta = {**ANSWER["meta_info"], "output_token_logprobs": [[logprob, 1, None]]}  # type: ignore[dict-item]
            return web.json_response({**ANSWER, "meta_info": meta})
        return web.json_response({})

    async def scenario(client: ServerClient) -> None:
        if not refused:
            return await client.check_capabilities()
        with pytest.raises(UnsupportedServer, match=r"log-prob of .* is -?0.0 at temperature 1000"):
            await client.check_capabilities()

    against(handle, scenario)
    assert asked == [1000.0]


async def router(request: web.Request) -> web.StreamResponse:
    """What sglang-router 0.3.2 answers (measured)."""
    workers = [{"id": "4058", "url": f"http://b:{port}", "is_healthy": True, "metadata": {}} for port in (1, 2)]
    answers = {"/workers": {"workers": workers, "total": 2}, "/generate": ANSWER, "/get_server_info": {"workers": 2}}
    if request.path in answers:
        return web.json_response(answers[request.path])
    return web.Response(status=200 if request.path == "/health" else 404)


def test_a_router_is_refused_and_its_workers_are_named() -> None:
    async def scenario(client: ServerClient) -> None:
        assert await client.ready()
        with pytest.raises(UnsupportedServer, match=r"sglang-router, .*set rollout.router to it, .*: http://b:1, h"):
            await client.adopt()

    against(router, scenario)


@pytest.mark.parametrize(("status", "error"), [(404, UnsupportedServer), (503, ServerError)])
def test_a_server_that_cannot_be_resumed_is_refused_at_once(status: int, error: type[Exception]) -> None:
    """Not asked again until the deadline of its start, unless it is its own fault."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=status)

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(error):
            await client.adopt()

    against(handle, scenario)


def test_health_tells_the_weights_within_its_own_deadline() -> None:
    assert against(old_server(set(), []), lambda client: client.health(5.0)) == "1.0"

    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError

    async def scenario(client: ServerClient) -> None:
        with pytest.raises(ServerUnavailable, match="/health is unavailable: .*0.2"):
            await client.health(0.2)

    against(silent, scenario)


def test_a_bucket_goes_out_uncopied_and_whole() -> None:
    """Many servers are sent one bucket at a time: what a request needs beside it is bounded, not a copy of it."""
    bucket, seen = b"Q" * (24 << 20), []

    async def handle(request: web.Request) -> web.StreamResponse:
        size = 0
        async for piece in request.content.iter_any():
            size += len(piece)
        seen.append((request.headers.get("Transfer-Encoding"), request.content_length, size))
        return web.json_response({"success": True, "message": ""})

    async def scenario(client: ServerClient) -> int:
        await client.update_weights_from_tensor(b"QQ==", "2.7")
        tracemalloc.start()
        try:
            await asyncio.gather(*(client.update_weights_from_tensor(bucket, "2.7") for _ in range(4)))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak = against(handle, scenario, timeout_s=60.0)
    rest = len(b"".join(protocol.update_weights_from_tensor_body(b"QQ==", "2.7"))) - 4
    assert seen[1:] == [(None, len(bucket) + rest, len(bucket) + rest)] * 4
    assert peak < len(bucket)


UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised", "refused"),
    [
        ((1024, 20000), (10256, 20000), None),
        ((20000, 20000), None, None),
        ((1024, UNLIMITED), (10256, UNLIMITED), None),
        ((UNLIMITED, UNLIMITED), None, None),
        ((1024, 4096), (4096, 4096), "10000 requests in flight need 10256 open files, the hard limit .* is 4096"),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: tuple[int, int] | None, refused: str | None
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: seen.append(new))
    found = allow_connections(10_000)
    assert seen == ([raised] if raised else [])
    assert (found is None) == (refused is None)
    assert re.search(refused or "", found or "")
