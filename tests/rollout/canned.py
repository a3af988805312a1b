"""A client against a server of canned answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web

from vcpo_megatron.rollout.client.http import ServerClient

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Client = TypeVar("_Client", bound=ServerClient)


def run_against(
    handler: Handler, make_client: Callable[[str], _Client], scenario: Callable[[_Client], Awaitable[Any]]
) -> Any:
    """What ``scenario`` gives with the client of a server whose every endpoint is ``handler``; at most 50 s."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = make_client(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            async with asyncio.timeout(50):
                return await scenario(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())
