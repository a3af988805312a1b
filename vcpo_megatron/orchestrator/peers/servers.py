"""The fleet of a run: servers started as child processes of the orchestrator, or joined by their addresses.

A started server runs under this interpreter (the embedded engine) or under ``rollout.python`` (SGLang), on its own
share of ``context.server_devices``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from ...config.process import NOTE_PREFIX, ProcessContext
from ...config.schema import RunConfig
from ...models.folder import read_model
from ...rollout.client.http import ServerClient
from ...rollout.client.routed_experts import RoutingShape
from ...rollout.fleet.fleet import Fleet, FleetOptions
from ...rollout.fleet.router import Router, RouterClient
from ...rollout.fleet.server import Server, ServerProcess
from ...rollout.fleet.sglang import SglangServer
from ...run.notifier import Notifier
from ...run.tasks import RunError, run_beside
from ...transport.child import start_child, stop_child

_HOST = "127.0.0.1"
#: Seconds that a server gets to end after SIGTERM.
_GRACE_S = 5.0
#: How often a user is told that servers are still waited for.
SAY_EVERY_S = 10.0


def embedded_command(context: ProcessContext, config: RunConfig, index: int) -> list[str]:
    """Command line of embedded server ``index``."""
    command = [
        sys.executable,
        "-m",
        "vcpo_megatron.rollout.embedded",
        "--model-path",
        str(config.model.path),
        "--host",
        _HOST,
        "--port",
        str(context.server_ports[index]),
        "--dtype",
        config.model.dtype,
        "--max-running-requests",
        str(config.rollout.max_running_requests),
    ]
    if config.rollout.context_length is not None:
        command += ["--context-length", str(config.rollout.context_length)]
    if config.staleness.lag == "exact":
        command.append("--enable-deterministic-inference")
    return [*command, *_same_as_learner(config)]


def _same_as_learner(config: RunConfig) -> list[str]:
    """Flags, the same for both engines, of what learner and servers must do alike."""
    wanted = {
        "--enable-fp32-lm-head": config.model.upcasts_logits,
        "--enable-return-routed-experts": config.rollout.routing_replay,
    }
    return [flag for flag, given in wanted.items() if given]


def sglang_server(context: ProcessContext, config: RunConfig, index: int) -> SglangServer:
    """SGLang server ``index``."""
    rollout, ranks = config.rollout, config.rollout.tensor_parallel
    assert rollout.python is not None  # config/checks/servers.py asks for it
    return SglangServer(
        python=rollout.python,
        model_path=config.model.path,
        host=_HOST,
        port=context.server_ports[index],
        dtype=config.model.dtype,
        context_length=rollout.context_length or read_model(config.model.path).max_position_embeddings,
        max_running_requests=rollout.max_running_requests,
        devices=context.server_devices[index * ranks : (index + 1) * ranks],
        args=(*_same_as_learner(config), *rollout.args),
    )


def make_fleet(context: ProcessContext, config: RunConfig, vocab_size: int, changes: Notifier) -> Fleet:
    """The servers of a run, not started yet."""
    rollout = config.rollout
    routing = RoutingShape.of(read_model(config.model.path)) if rollout.routing_replay else None

    def launch(index: int) -> ServerProcess:
        env = {**context.environment(), "RANK": str(index), "PYTHONUNBUFFERED": "1"}
        if rollout.engine == "sglang":
            server = sglang_server(context, config, index)
            command, env = server.command(), env | server.environment()
        else:
            command, env = embedded_command(context, config, index), env | {"CUDA_VISIBLE_DEVICES": ""}  # on CPUs
        return start_child(command, env=env, log=context.directory.log("server", index))

    def stop(process: ServerProcess) -> int:
        assert isinstance(process, subprocess.Popen)
        return stop_child(process, grace_s=_GRACE_S)

    started = [f"http://{_HOST}:{port}" for port in context.server_ports]
    servers = [
        Server(
            index,
            ServerClient(address, vocab_size, rollout.request_timeout_s, routing, run=context.run),
            context.directory.log("server", index),
            joined=bool(rollout.addresses),
        )
        for index, address in enumerate(rollout.addresses or started)
    ]
    options = FleetOptions(
        capacity=rollout.max_running_requests,
        max_restarts=rollout.max_restarts,
        start_timeout_s=rollout.start_timeout_s,
        takeover_timeout_s=rollout.start_timeout_s + rollout.sync_timeout_s,
        health_interval_s=rollout.health_interval_s,
        health_timeout_s=rollout.health_timeout_s,
    )
    router = _router(context, config, vocab_size)
    return Fleet(servers, options, launch=launch, stop=stop, changes=changes, router=router)


def ready(fleet: Fleet) -> str:
    """How many servers answer, in words."""
    return f"{sum(server.available for server in fleet.servers)} of {len(fleet.servers)} ready"


async def all_answer(fleet: Fleet) -> None:
    """Wait until every server answers, and say now and then how many do; ``Fleet.answering`` says what bounds it."""

    started, limit = time.monotonic(), fleet.options.start_timeout_s

    async def say() -> None:
        while True:
            time_used = f"{time.monotonic() - started:.0f} of {limit:g} s, rollout.start_timeout_s"
            print(f"{NOTE_PREFIX}waiting for rollout servers: {ready(fleet)} ({time_used})", flush=True)
            await asyncio.sleep(SAY_EVERY_S)

    await run_beside(fleet.answering(), say())


async def back_in_service(fleet: Fleet, server: Server) -> None:
    """Wait until ``server`` serves, at once where it does; RunError when it takes too long to be restarted."""
    try:
        await fleet.changes.until(lambda: server.serving or None, fleet.options.takeover_timeout_s)
    except TimeoutError:
        raise RunError(f"{server.name} did not come back in time, {server.where}") from None


def _router(context: ProcessContext, config: RunConfig, vocab_size: int) -> Router | None:
    rollout = config.rollout
    if rollout.router is None:
        return None
    return Router(
        RouterClient(rollout.router, vocab_size, rollout.request_timeout_s, run=context.run),
        [address.rstrip("/") for address in rollout.addresses],
        interval_s=rollout.health_interval_s,
        timeout_s=rollout.start_timeout_s,
    )
