"""A rollout server that computes nothing: ``python -m benchmarks.fake_server TOKENS``.

It speaks /generate as SGLang does and holds every request until POST /release?how=stop (answer TOKENS tokens) or
how=abort (half of them, as a weight update in mode abort leaves a request). GET /held says how many it holds.
Prints its address.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

from vcpo_megatron.rollout.client import protocol


def reply(tokens: int, how: str) -> bytes:
    """Body of one answer."""
    ids = [7 + index % 1000 for index in range(tokens)]
    meta = {
        "finish_reason": {"type": how, "matched": ids[-1]} if how == "stop" else {"type": how},
        "output_token_logprobs": [[-0.25, token, None] for token in ids],
        "weight_versions": [{"version": "1.0", "start": 0, "end": tokens}],
    }
    return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


class Holding:
    """Requests that wait for ``release``."""

    def __init__(self, tokens: int) -> None:
        self._replies = {"stop": reply(tokens, "stop"), "abort": reply(max(1, tokens // 2), "abort")}
        self._waiting: list[asyncio.Future[str]] = []

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return web.Response(body=self._replies[await future], content_type="application/json")

    async def release(self, request: web.Request) -> web.Response:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(request.query["how"])
        return web.json_response(len(waiting))

    async def held(self, request: web.Request) -> web.Response:
        return web.json_response(len(self._waiting))


async def serve(tokens: int) -> None:
    holding, app = Holding(tokens), web.Application()
    app.router.add_post(protocol.GENERATE, holding.generate)
    app.router.add_post("/release", holding.release)
    app.router.add_get("/held", holding.held)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"fake server at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
