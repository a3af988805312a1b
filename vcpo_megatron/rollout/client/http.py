"""Asynchronous client of one rollout server: SGLang or the embedded engine, over the same HTTP API.

Token ids are checked before anything is sent: SGLang dies of an id outside its vocabulary. Every
request has a deadline, and every failure names the server, the endpoint and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import resource
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import aiohttp

from ...config.checks.servers import TESTED_SGLANG
from ...run.text import one_line
from . import protocol, replies
from .back_off import BackOff
from .protocol import GenerateResult, ImpossibleLogprobs, PauseMode, ProtocolError, SamplingParams
from .replies import ServerInfo, UnsupportedServer, other_run, parse_loads, router_workers
from .routed_experts import RoutingShape

#: Establishing a TCP connection is quick or hopeless; it does not get the whole request timeout.
CONNECT_TIMEOUT_S = 10.0
#: A connection that was idle for so long is not used again: SGLang closes it after 5 s, and a request that is on its
#: way just then is lost.
IDLE_CONNECTION_S = 2.0
#: Bytes of a large body that are handed to the connection at a time.
_PIECE = 1 << 20
#: A question about the server itself is answered at once by one that works.
STATUS_TIMEOUT_S = 10.0
#: So long a server may still compute what a run that was killed had asked for.
LEFTOVER_S = 5.0
#: Open files of a process beside its connections.
_OTHER_FILES = 256


class ServerError(RuntimeError):
    """The server answered and refused: HTTP ``status`` and its ``message``."""

    def __init__(self, url: str, endpoint: str, status: int, message: str):
        super().__init__(f"rollout server {url}{endpoint} answered {status}: {message}")
        self.url, self.endpoint, self.status, self.message = url, endpoint, status, message


class ServerUnavailable(RuntimeError):
    """The server did not answer: connection refused or lost, or the deadline passed."""

    def __init__(self, url: str, endpoint: str, reason: str):
        super().__init__(f"rollout server {url}{endpoint} is unavailable: {reason}")
        self.url, self.endpoint, self.reason = url, endpoint, reason


def allow_connections(count: int) -> str | None:
    """Let this process have ``count`` connections, each an open file, as far as its hard limit goes. What is wrong
    where that is too low, in words; None where it is not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most >= wanted:
        return None
    return (
        f"{count} requests in flight need {wanted} open files, the hard limit of this process is {hard}; raise it "
        "(ulimit -Hn, LimitNOFILE of a service)"
    )


class ServerClient:
    """Client of the server at ``base_url``. ``timeout_s`` bounds every single request.

    ``cache_key`` names the weights that the server holds: what its cache has read under another name is not used.
    ``routing`` is that of a model whose routed experts are asked for with every answer. ``info`` is what the server
    tells of itself, known once its capabilities were checked. ``run`` is the run that asks: it is part of every
    request's id, and what another run's server is known by.

    Every try of a request goes out under an id of its own: a server that still computes an earlier one, whose
    connection was lost, refuses the same id.

    Requests raise ServerError (refused), ServerUnavailable (no answer) or ProtocolError (an id
    outside [0, vocab_size), or an answer that does not follow the protocol).
    """

    def __init__(
        self,
        base_url: str,
        vocab_size: int,
        timeout_s: float,
        routing: RoutingShape | None = None,
        *,
        run: str = "",
    ):
        self.base_url = base_url.rstrip("/")
        self.vocab_size = vocab_size
        self.timeout_s = timeout_s
        self.routing = routing
        self.run = run
        self._asks_as = f"{run or 'vcpo'}-{secrets.token_hex(4)}"
        self._tries = itertools.count(1)
        self._in_flight: dict[str, str] = {}  # name of a try -> its request
        self.cache_key: str | None = None
        self.info = ServerInfo()
        #: Whether the server brackets updates by begin and end; servers before SGLang 0.5.21 do not.
        self._brackets = True
        self._session: aiohttp.ClientSession | None = None

    # ------------------------------------------------------------ generation

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        """One answer to one prompt."""
        self._check_prompt(input_ids, sampling)
        with self._tried([rid]) as (own,):
            body = protocol.generate_body(input_ids, sampling, own, self.cache_key)
            reply = await self._post(protocol.GENERATE, body | self._routing_options)
        result = self._parsed(protocol.GENERATE, replies.parse_generate, reply, self.vocab_size, sampling)
        return self._with_experts(result, reply, input_ids)

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[SamplingParams],
        rids: Sequence[str] | None = None,
    ) -> list[GenerateResult]:
        """Answers to an ordered list of prompts, submitted as one request."""
        with self._tried(rids or ()) as own:
            body = protocol.generate_batch_body(prompts, samplings, own or None, self.cache_key)
            for prompt, sampling in zip(prompts, samplings, strict=True):
                self._check_prompt(prompt, sampling)
            reply = await self._post(protocol.GENERATE, body | self._routing_options)
        found = self._parsed(protocol.GENERATE, replies.parse_generate_batch, reply, samplings, self.vocab_size)
        return [self._with_experts(*one) for one in zip(found, reply, prompts, strict=True)]

    @contextlib.contextmanager
    def _tried(self, rids: Sequence[str]) -> Iterator[list[str]]:
        """What this try of requests ``rids`` is called: no other try, attempt or run has the names."""
        names = [f"{self._asks_as}/{rid}/{next(self._tries)}" for rid in rids]
        self._in_flight.update(zip(names, rids, strict=True))
        try:
            yield names
        finally:
            for name in names:
                del self._in_flight[name]

    @property
    def _routing_options(self) -> dict[str, Any]:
        return {} if self.routing is None else {"return_routed_experts": True}

    def _with_experts(self, result: GenerateResult, reply: Any, prompt: Sequence[int]) -> GenerateResult:
        """An answer without a token (aborted while it waited) went through no layer."""
        if self.routing is None or not result.output_ids:
            return result
        tokens = len(prompt) + len(result.output_ids)
        experts = self._parsed(protocol.GENERATE, self.routing.parse, reply, tokens)
        return dataclasses.replace(result, routed_experts=experts)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs [L-1] of ``tokens[t]`` given ``tokens[:t]``, t = 1..L-1, at temperature 1."""
        self._check_prompt(tokens, SamplingParams())
        reply = await self._post(protocol.GENERATE, protocol.score_body(tokens))
        return self._parsed(protocol.GENERATE, replies.parse_score, reply, tokens, self.vocab_size)

    async def abort(self, rid: str | None = None) -> None:
        """Ends request ``rid`` of this client (None: every request of anyone) with what it has sampled."""
        for name in [None] if rid is None else [name for name, of in self._in_flight.items() if of == rid]:
            await self._post(protocol.ABORT_REQUEST, protocol.abort_body(name))

    # ------------------------------------------------------------ control

    async def pause(self, mode: PauseMode) -> None:
        """Pause, and forget what the weights that leave have read, but for the answers that ``in_place`` continues.

        Without that, a retracted answer would be computed again on top of a cached prefix of the old weights.
        """
        await self._post(protocol.PAUSE_GENERATION, protocol.pause_body(mode))
        if mode != "in_place":
            await self._flush_when_idle()

    async def _flush_when_idle(self) -> None:
        """The server refuses while the last of its batches is still on its way out."""
        deadline, again = time.monotonic() + self.timeout_s, BackOff(0.01, 1.0)
        while True:
            try:
                return await self.flush_cache()
            except ServerError as error:
                if error.status != 400 or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(again.wait())

    async def resume(self) -> None:
        await self._post(protocol.CONTINUE_GENERATION, {})

    async def flush_cache(self) -> None:
        await self._post(protocol.FLUSH_CACHE, {})

    async def begin_weight_update(self) -> None:
        """A server that does not know of it (SGLang before 0.5.21) takes updates without."""
        await self._bracket(protocol.BEGIN_WEIGHT_UPDATE)

    async def update_weights_from_tensor(self, bucket: bytes, version: str, flush_cache: bool = False) -> None:
        """One bucket (base64 of a pickled [(name, tensor), ...]), between begin and end."""
        body = protocol.update_weights_from_tensor_body(bucket, version, flush_cache)
        await self._control(protocol.UPDATE_WEIGHTS_FROM_TENSOR, body)

    async def init_weights_update_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the broadcast group of a sender; answered when all its members are there."""
        body = protocol.init_weights_update_group_body(address, port, rank_offset, world_size, group_name, backend)
        await self._control(protocol.INIT_WEIGHTS_UPDATE_GROUP, body)

    async def update_weights_from_distributed(
        self, entries: Sequence[Sequence[Any]], group_name: str, version: str | None, flush_cache: bool = False
    ) -> None:
        """Take one flattened bucket that is broadcast in the group, between begin and end; ``version`` None: the name
        of the weights stays."""
        body = protocol.update_weights_from_distributed_body(entries, group_name, version, flush_cache)
        await self._control(protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED, body)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._control(protocol.DESTROY_WEIGHTS_UPDATE_GROUP, {"group_name": group_name})

    async def update_weights_from_disk(self, path: str, version: str, flush_cache: bool = False) -> None:
        """Load all weights from the safetensors in folder ``path``; no session is needed."""
        body = protocol.update_weights_from_disk_body(path, version, flush_cache)
        await self._control(protocol.UPDATE_WEIGHTS_FROM_DISK, body)

    async def weights_checksums(self) -> list[dict[str, str]]:
        """Checksums of what the server holds, by parameter name, one dict a rank of the server."""
        reply = await self._post(protocol.WEIGHTS_CHECKER, {"action": "checksum"})
        return list(self._parsed(protocol.WEIGHTS_CHECKER, replies.parse_checksums, reply))

    async def end_weight_update(self) -> None:
        await self._bracket(protocol.END_WEIGHT_UPDATE)

    async def _bracket(self, endpoint: str) -> None:
        if not self._brackets:
            return
        try:
            await self._control(endpoint, {})
        except ServerError as error:
            if error.status != 404:
                raise
            self._brackets = False

    # ------------------------------------------------------------ the server itself

    async def model_info(self) -> dict[str, Any]:
        """{model_path, weight_version, ...}."""
        reply = await self._request("GET", protocol.MODEL_INFO, None, STATUS_TIMEOUT_S)
        if not isinstance(reply, dict):
            raise ProtocolError(f"rollout server {self.base_url}{protocol.MODEL_INFO}: {reply!r} is not an object")
        return reply

    async def ready(self) -> bool:
        """True when the server takes requests; False when it does not answer, or says no."""
        try:
            await self._request("GET", protocol.READY, None, STATUS_TIMEOUT_S)
        except ServerError as error:
            return error.status == 404 and await self._is_healthy()  # servers before SGLang 0.5.23 have no /ready
        except ServerUnavailable:
            return False
        return True

    async def _is_healthy(self) -> bool:
        try:
            await self._request("GET", protocol.HEALTH, None, STATUS_TIMEOUT_S)
        except (ServerError, ServerUnavailable):
            return False
        return True

    async def health(self, timeout_s: float) -> str:
        """Name of the weights of a server that is well: a request has gone through all of it. ServerUnavailable after
        ``timeout_s`` seconds; ServerError when it says that it is not well, or takes no requests: another run, or what
        is left of one, may have paused it."""
        await self._request("GET", protocol.HEALTH, None, timeout_s)
        try:
            await self._request("GET", protocol.READY, None, timeout_s)
        except ServerError as error:
            if error.status != 404:  # servers before SGLang 0.5.23 have no /ready
                raise
        return str((await self.model_info()).get("weight_version"))

    async def adopt(self) -> str | None:
        """Undo what another run, or an update that was lost, may have left: an update that did not end, a pause.
        UnsupportedServer for what cannot be paused and updated, an sglang-router among them, and for a server that
        another run uses, as far as that can be seen. Another run whose weights it held, if any.

        Which weights it then has is not known, so no answer may name a version for them; those in flight end first.
        """
        await self._refuse_router()
        former = await self._former_run()
        with contextlib.suppress(ServerError):  # it says that there is none
            await self.end_weight_update()
        try:
            await self._post(protocol.UPDATE_WEIGHT_VERSION, protocol.unknown_weights_body())
            await self.resume()
        except ServerError as error:
            await self._refuse(error)
        return former

    async def _former_run(self) -> str | None:
        """Another run whose weights the server holds; UnsupportedServer while it computes something, which can only be
        that run's. What a run that was killed has left there ends soon."""
        try:
            label = str((await self.model_info()).get("weight_version"))
        except ServerError as error:
            if error.status >= 500:
                raise
            return None  # what else it does not know is found out below
        if (former := other_run(label, self.run)) is None:
            return None
        until, again = time.monotonic() + LEFTOVER_S, BackOff(0.05, 0.5)
        while await self._requests_in_flight():
            if time.monotonic() > until:
                raise UnsupportedServer(
                    f"{self.base_url} is used by another run, {former}: it holds weights {label} and "
                    "computes answers; give this run servers of its own (rollout.addresses), or end that one first"
                )
            await asyncio.sleep(again.wait())
        return former

    async def _requests_in_flight(self) -> int:
        """Requests that the server computes or has queued; 0 where it does not say."""
        for endpoint in (protocol.LOADS, "/get_load"):  # the latter of servers before /v1/loads
            try:
                return parse_loads(await self._request("GET", endpoint, None, STATUS_TIMEOUT_S))
            except ServerError:
                continue
        return 0

    async def _refuse_router(self) -> None:
        """It has no weights, and passes none on (0.3.2): docs/rollout_servers.md."""
        try:
            reply = await self._request("GET", protocol.WORKERS, None, STATUS_TIMEOUT_S)
        except ServerError:  # SGLang does not know it
            return
        if (workers := router_workers(reply)) is not None:
            raise UnsupportedServer(
                f"{self.base_url} is an sglang-router, which passes on no pause and no weights: set rollout.router to "
                f"it, and rollout.addresses to its workers: {', '.join(workers) or 'it has none now'}"
            )

    async def _refuse(self, error: ServerError) -> NoReturn:
        """A refusal is for good, unless the server has a fault of its own."""
        if error.status >= 500:
            raise error
        raise UnsupportedServer(f"{await self._described()} refuses what training needs: {error}") from error

    async def check_logprobs(self) -> None:
        """Sample one token at a temperature at which no policy is certain of any; ImpossibleLogprobs when its log-prob
        is 0 all the same."""
        flat = SamplingParams(max_new_tokens=1, temperature=protocol.FLAT, ignore_eos=True)
        answer = await self.generate([0], flat, "log-probs")
        if not any(answer.logprobs):
            what = f"{answer.logprobs[0]!r} at temperature {protocol.FLAT:g}" if answer.logprobs else "none"
            raise ImpossibleLogprobs(
                f"rollout server {self.base_url}{protocol.GENERATE}: the log-prob of a sampled token is {what}"
            )

    async def check_capabilities(self) -> None:
        """Sample one token, and look whether its answer has all that training needs, and at how the server is split;
        UnsupportedServer when it is not taken.

        ServerUnavailable is passed on as False is by ``ready``: the caller asks again.
        """
        try:
            await self.model_info()
            await self.check_logprobs()
        except ServerError as error:
            await self._refuse(error)
        except ProtocolError as error:
            raise UnsupportedServer(
                f"{await self._described()} does not answer what training needs (tested with SGLang "
                f"{TESTED_SGLANG}): {error}"
            ) from error
        self.info = ServerInfo.parse(await self._server_info(), f"the server at {self.base_url}")

    async def _server_info(self) -> dict[str, Any]:
        """What the server tells of itself; nothing where it does not."""
        for endpoint in (protocol.SERVER_INFO, "/get_server_info"):
            try:
                reply = await self._request("GET", endpoint, None, STATUS_TIMEOUT_S)
            except (ServerError, ServerUnavailable):
                continue
            if isinstance(reply, dict):
                return reply
        return {}

    async def _described(self) -> str:
        """What is known of the server, for a refusal."""
        if "version" in (reply := await self._server_info()):
            return f"SGLang {reply['version']} at {self.base_url}"
        return f"the server at {self.base_url} is no SGLang server that is known here; it"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------ plumbing

    def _check_prompt(self, input_ids: Sequence[int], sampling: SamplingParams) -> None:
        if not input_ids:
            raise ProtocolError("input_ids is empty: a prompt has at least one token")
        protocol.token_ids(input_ids, "input_ids", self.vocab_size)
        protocol.token_ids(sampling.stop_token_ids, "stop_token_ids", self.vocab_size)

    async def _control(self, endpoint: str, body: Mapping[str, Any] | Sequence[bytes]) -> None:
        self._parsed(endpoint, replies.parse_success, await self._post(endpoint, body))

    def _parsed(self, endpoint: str, parse: Any, *args: Any) -> Any:
        try:
            return parse(*args)
        except ProtocolError as error:
            raise type(error)(f"rollout server {self.base_url}{endpoint}: {error}") from error

    async def _post(self, endpoint: str, body: Mapping[str, Any] | Sequence[bytes]) -> Any:
        """``body``: an object, or JSON text in pieces, which are large."""
        return await self._request("POST", endpoint, json.dumps(body).encode() if isinstance(body, Mapping) else body)

    async def _request(
        self, method: str, endpoint: str, body: bytes | Sequence[bytes] | None, at_most_s: float = math.inf
    ) -> Any:
        timeout_s = min(self.timeout_s, at_most_s)
        if self._session is None:
            # No limit on connections: concurrency is bounded by whoever admits requests.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {} if body is None else {"Content-Type": "application/json"}
        data: bytes | AsyncIterator[memoryview] | None
        if body is None or isinstance(body, bytes):
            data = body
        else:  # nothing copies it; its length is said, else it would go out in chunks, which not every server takes
            data, headers["Content-Length"] = _views(body), str(sum(map(len, body)))
        try:
            async with self._session.request(
                method, self.base_url + endpoint, data=data, headers=headers, timeout=timeout
            ) as response:
                text = await response.text()
                status, reason = response.status, response.reason
        except TimeoutError as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            raise ServerUnavailable(self.base_url, endpoint, reason) from error
        except aiohttp.InvalidURL as error:  # says the address only
            raise ServerUnavailable(self.base_url, endpoint, "this is no address") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailable(self.base_url, endpoint, str(error) or type(error).__name__) from error
        if status not in (200, 202):  # 202: a router does it a little later
            raise ServerError(self.base_url, endpoint, status, _error_message(text) or reason or "without a reason")
        return _decode(text, self.base_url + endpoint)


async def _views(pieces: Sequence[bytes]) -> AsyncIterator[memoryview]:
    """``pieces``, not copied, in parts that a connection takes one after the other."""
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), _PIECE):
            yield view[at : at + _PIECE]


def _decode(text: str, where: str) -> Any:
    """JSON of a 200 reply; some endpoints answer plain text or nothing, which is returned as text."""
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ProtocolError(f"rollout server {where}: reply is not JSON: {text[:200]!r}") from error


def _error_message(text: str) -> str:
    """The message inside an error reply: {message}, {error: {message}} or {error}; else the text itself."""
    try:
        reply = json.loads(text)
    except json.JSONDecodeError:
        return one_line(text, 500)
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        message = error.get("message") if isinstance(error, dict) else error
        if message:
            return str(message)
    return one_line(text, 500)
