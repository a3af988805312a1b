"""HTTP handlers of the embedded engine: SGLang's endpoints over one ``Engine``.

Bad requests answer 400 with {success: false, message}; a failure of the engine answers 500.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from ..client import protocol
from .engine import Engine, EngineFailed
from .errors import ModelError, RequestError
from .loading import load_model
from .requests import RequestParser
from .scheduler import Scheduler
from .weight_groups import WeightGroups
from .weights import NamedTensors, Parameters, UpdateSession, combined_checksum, decode_bucket, named_tensors

#: Bodies carry whole models; this only stops a runaway client.
MAX_BODY_BYTES = 2**37


@dataclass
class Service:
    """What the handlers work on. ``info`` is answered by /server_info."""

    engine: Engine
    scheduler: Scheduler
    parser: RequestParser
    parameters: Parameters
    session: UpdateSession
    groups: WeightGroups
    model_path: str
    dtype: str
    info: dict[str, Any]

    # ------------------------------------------------------------ generation

    async def generate(self, body: dict[str, Any]) -> web.Response:
        request = self.parser.parse(body)
        await self.engine.generate(request.sequences)
        failures = [f"request {s.rid!r}: {s.failure}" for s in request.sequences if s.failure]
        if failures:
            return _error(500, failures[0])
        return _json(request.answer(self.scheduler.version, self.parser.tokenizer))

    async def pause_generation(self, body: dict[str, Any]) -> web.Response:
        mode = body.get("mode", "abort")
        if mode not in protocol.PAUSE_MODES:
            raise RequestError(f"mode = {mode!r}: expected one of {', '.join(protocol.PAUSE_MODES)}")
        await self.engine.call(lambda: self.scheduler.pause(mode))
        return _json({"status": "ok", "message": f"generation paused ({mode})"})

    async def continue_generation(self, body: dict[str, Any]) -> web.Response:
        await self.engine.call(self.scheduler.resume)
        return _json({"status": "ok", "message": "generation continued"})

    async def abort_request(self, body: dict[str, Any]) -> web.Response:
        rid, everything = body.get("rid"), body.get("abort_all", False)
        if not everything and not isinstance(rid, str):
            raise RequestError("/abort_request needs rid or abort_all: true")
        rids = None if everything else {str(rid)}
        await self.engine.call(lambda: self.scheduler.abort(rids, "aborted by /abort_request"))
        return web.Response()

    async def flush_cache(self, body: dict[str, Any]) -> web.Response:
        await self.engine.call(self._require_idle)
        return web.Response(text="Cache flushed.\n")

    def _require_idle(self) -> None:
        """The cache holds running sequences only, so flushing an idle one is free. While paused, those that wait hold
        nothing and may go on waiting."""
        running, waiting = self.scheduler.num_running, self.scheduler.num_waiting
        if running or waiting and not self.scheduler.paused:
            raise RequestError(f"the cache cannot be flushed: {running} requests are running, {waiting} waiting")

    # ------------------------------------------------------------ weights

    async def begin_weight_update(self, body: dict[str, Any]) -> web.Response:
        discarded = self.session.begin()
        return _success(f"discarded {discarded} tensors of an unfinished update" if discarded else "")

    async def update_weights_from_tensor(self, body: dict[str, Any]) -> web.Response:
        self.session.require_open(protocol.UPDATE_WEIGHTS_FROM_TENSOR)
        try:
            return await self._stage(body)
        except RequestError as error:
            self.session.refuse(str(error))
            raise

    async def _stage(self, body: dict[str, Any]) -> web.Response:
        if body.get("load_format") is not None:
            raise RequestError(f"load_format = {body['load_format']!r}: the embedded engine takes null only")
        texts = body.get("serialized_named_tensors")
        if not isinstance(texts, list) or len(texts) != 1:
            raise RequestError("serialized_named_tensors: expected a list of one bucket (one tensor-parallel rank)")
        version = _version(body, "weight_version")
        bucket = await asyncio.to_thread(decode_bucket, texts[0])
        await self._before_update(body)
        self.session.require_open(protocol.UPDATE_WEIGHTS_FROM_TENSOR)
        self.session.stage(bucket, version)
        return _success(f"staged {len(bucket)} tensors")

    async def init_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        await self.groups.join(body)
        return _success("joined")

    async def destroy_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        self.groups.leave(body)
        return _success("left")

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> web.Response:
        self.session.require_open(protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED)
        try:
            return await self._receive(body)
        except RequestError as error:
            self.session.refuse(str(error))
            raise

    async def _receive(self, body: dict[str, Any]) -> web.Response:
        version = _version(body, "weight_version")
        await self._before_update(body)
        bucket, memory = await self.groups.receive(body)
        self.session.require_open(protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED)
        self.session.stage(bucket, version, memory)
        return _success(f"staged {len(bucket)} tensors")

    async def end_weight_update(self, body: dict[str, Any]) -> web.Response:
        """As in SGLang, 400 without a begin; an update without tensors is answered 200 and changes nothing."""
        self.session.require_open(protocol.END_WEIGHT_UPDATE)
        tensors, version, memory = self.session.end()
        if not tensors:
            return _success("no tensors came since /begin_weight_update: the weights are unchanged")
        await self.engine.update(lambda: self._load(tensors, version))
        self.groups.keep(memory)
        return _success(f"loaded {len(tensors)} tensors")

    async def update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        path = body.get("model_path")
        if not isinstance(path, str):
            raise RequestError(f"model_path = {path!r}: expected a path")
        if body.get("load_format") not in (None, "auto"):
            raise RequestError(f"load_format = {body['load_format']!r}: the embedded engine takes null or auto")
        version = _version(body, "weight_version")
        await self._before_update(body)
        paused = await self.engine.update(lambda: self._load_from_disk(Path(path), version))
        return _json({"success": True, "message": "loaded", "num_paused_requests": paused})

    async def update_weight_version(self, body: dict[str, Any]) -> web.Response:
        version = _version(body, "new_version")
        if version is None:
            raise RequestError("/update_weight_version needs new_version")
        abort = body.get("abort_all_requests", True)

        def rename() -> None:
            if abort:
                self.scheduler.abort(None, "aborted by /update_weight_version")
            self.scheduler.set_version(version)

        await self.engine.call(rename)
        return _json({"success": True, "message": "", "new_version": version})

    async def weights_checker(self, body: dict[str, Any]) -> web.Response:
        action = body.get("action", "checksum")
        if action != "checksum":
            raise RequestError(f"action = {action!r}: the embedded engine supports checksum")
        checksums = await self.engine.call(self.parameters.checksums)
        answer = {"ranks": [{"rank": 0, "checksums": checksums}], "per_engine_checksum": combined_checksum(checksums)}
        return _json({"success": True, "message": "", **answer})

    async def _before_update(self, body: dict[str, Any]) -> None:
        """Serves abort_all_requests, and refuses a flush that cannot be done before anything changes."""
        if body.get("abort_all_requests", False):
            await self.engine.call(lambda: self.scheduler.abort(None, "aborted by a weight update"))
        if body.get("flush_cache", True):
            await self.engine.call(self._require_flushable)

    def _require_flushable(self) -> None:
        running = self.scheduler.num_running
        if self.scheduler.paused == "in_place" and running:
            raise RequestError(
                f"the cache cannot be flushed: {running} requests are paused in place; send flush_cache: false"
            )

    def _load(self, tensors: NamedTensors, version: str | None) -> None:
        self.parameters.load(tensors)
        if version is not None:
            self.scheduler.set_version(version)

    def _load_from_disk(self, path: Path, version: str | None) -> int:
        tensors = named_tensors(load_model(path, self.dtype))
        self.parameters.check(tensors)
        self._load(tensors, version)
        return self.scheduler.num_running if self.scheduler.paused else 0

    # ------------------------------------------------------------ information

    async def model_info(self) -> web.Response:
        return _json(
            {
                "model_path": self.model_path,
                "weight_version": self.scheduler.version,
                "is_generation": True,
                "vocab_size": self.parser.vocab_size,
                "context_length": self.parser.context_length,
                "engine": "embedded",
            }
        )

    async def server_info(self) -> web.Response:
        state = {
            "weight_version": self.scheduler.version,
            "paused": self.scheduler.paused,
            "num_running_requests": self.scheduler.num_running,
            "num_waiting_requests": self.scheduler.num_waiting,
        }
        return _json({**self.info, **state})

    async def loads(self) -> web.Response:
        counts = {
            "num_running_reqs": self.scheduler.num_running,
            "num_waiting_reqs": self.scheduler.num_waiting,
        }
        return _json({"loads": [counts]})

    async def alive(self) -> web.Response:
        return web.Response() if self.engine.alive else _error(503, self.engine.failure or "the engine has ended")

    async def ready(self) -> web.Response:
        """As SGLang: not while it is paused."""
        if self.engine.alive and self.scheduler.paused is not None:
            return _error(503, "it is paused (/pause_generation)")
        return await self.alive()


def make_app(service: Service) -> web.Application:
    """Routes of ``service``; a handler's error becomes the answer."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    posts = {
        protocol.GENERATE: service.generate,
        protocol.PAUSE_GENERATION: service.pause_generation,
        protocol.CONTINUE_GENERATION: service.continue_generation,
        protocol.ABORT_REQUEST: service.abort_request,
        protocol.FLUSH_CACHE: service.flush_cache,
        protocol.BEGIN_WEIGHT_UPDATE: service.begin_weight_update,
        protocol.END_WEIGHT_UPDATE: service.end_weight_update,
        protocol.UPDATE_WEIGHTS_FROM_TENSOR: service.update_weights_from_tensor,
        protocol.INIT_WEIGHTS_UPDATE_GROUP: service.init_weights_update_group,
        protocol.DESTROY_WEIGHTS_UPDATE_GROUP: service.destroy_weights_update_group,
        protocol.UPDATE_WEIGHTS_FROM_DISTRIBUTED: service.update_weights_from_distributed,
        protocol.UPDATE_WEIGHTS_FROM_DISK: service.update_weights_from_disk,
        protocol.UPDATE_WEIGHT_VERSION: service.update_weight_version,
        protocol.WEIGHTS_CHECKER: service.weights_checker,
    }
    for path, handler in posts.items():
        app.router.add_post(path, _endpoint(handler, body_required=path != protocol.FLUSH_CACHE))
    gets = {
        protocol.MODEL_INFO: service.model_info,
        protocol.SERVER_INFO: service.server_info,
        protocol.LOADS: service.loads,
        protocol.HEALTH: service.alive,
        protocol.READY: service.ready,
    }
    for path, getter in gets.items():
        app.router.add_get(path, _getter(getter))
    return app


def _endpoint(
    handler: Callable[[dict[str, Any]], Awaitable[web.Response]], body_required: bool
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            return await handler(await _body(request, body_required))
        except (RequestError, ModelError) as error:
            return _error(400, " ".join(str(error).split()))
        except EngineFailed as error:
            return _error(500, str(error))

    return handle


def _getter(handler: Callable[[], Awaitable[web.Response]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        return await handler()

    return handle


async def _body(request: web.Request, required: bool) -> dict[str, Any]:
    text = await request.read()
    if not text and not required:
        return {}
    try:
        body = json.loads(text)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def _version(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{key} = {value!r}: expected a string")
    return value


def _json(value: Any) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")


def _success(message: str) -> web.Response:
    return _json({"success": True, "message": message})


def _error(status: int, message: str) -> web.Response:
    body = json.dumps({"success": False, "message": message, "error": {"message": message}})
    return web.Response(status=status, body=body.encode(), content_type="application/json")
