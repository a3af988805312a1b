"""The fleet over two real embedded servers: killed, stopped, refusing an update; requests go on, weights come first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ports import HeldPort
from tests.rollout.conftest import ROOT, VOCABULARY, Versions
from vcpo_megatron.rollout.client.http import ServerClient, ServerError
from vcpo_megatron.rollout.client.protocol import GenerateResult, SamplingParams
from vcpo_megatron.rollout.fleet.fleet import Fleet, FleetOptions
from vcpo_megatron.rollout.fleet.lease import Lease
from vcpo_megatron.rollout.fleet.server import Server
from vcpo_megatron.run.notifier import Notifier
from vcpo_megatron.run.tasks import run_beside
from vcpo_megatron.transport.child import start_child, stop_child
from vcpo_megatron.types import PolicyVersion

pytestmark = pytest.mark.timeout(300)

PROMPT = [5, 17, 42, 8, 60]
LONG = SamplingParams(max_new_tokens=300, ignore_eos=True)


async def load(fleet: Fleet, server: Server, versions: Versions, number: int) -> None:
    """A whole update to version 1.number, as the weight sync does it."""
    server.updating = True
    await server.client.pause("retract")
    await server.client.begin_weight_update()
    await server.client.update_weights_from_tensor(versions.bucket(str(number)), f"1.{number}")
    await server.client.end_weight_update()
    await server.client.resume()
    fleet.loaded(server, PolicyVersion(1, number))
    server.updating = False


@pytest.fixture(scope="module")
def under_fire(versions: Versions, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """under_fire(work) runs ``await work(fleet)`` over two servers that hold version 1.0, bounded."""
    folder = tmp_path_factory.mktemp("fleet")

    def run(work: Callable[[Fleet], Awaitable[None]]) -> None:
        held = [HeldPort(), HeldPort()]
        ports = [each.port for each in held]

        def launch(index: int) -> subprocess.Popen[bytes]:
            command = [
                sys.executable,
                "-m",
                "vcpo_megatron.rollout.embedded",
                "--model-path",
                str(versions.folder),
                "--port",
                str(ports[index]),
            ]
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            return start_child(command, env=env, log=folder / f"server.{index}.log")

        async def main() -> None:
            servers = [
                Server(i, ServerClient(f"http://127.0.0.1:{port}", VOCABULARY, 60.0), Path(folder / f"server.{i}.log"))
                for i, port in enumerate(ports)
            ]
            options = FleetOptions(16, 2, 90.0, 120.0, health_interval_s=0.5, health_timeout_s=2.0)
            fleet = Fleet(
                servers,
                options,
                launch=launch,
                changes=Notifier(),
                stop=lambda process: stop_child(process, grace_s=1.0),  # type: ignore[arg-type]
            )

            async def ready() -> None:
                await fleet.answering()
                for server in servers:
                    await load(fleet, server, versions, 0)
                await work(fleet)

            fleet.launch()
            try:
                await run_beside(ready(), fleet.supervise())
            finally:
                await fleet.stop()

        try:
            asyncio.run(asyncio.wait_for(main(), 240))
        finally:
            for each in held:
                each.release()

    return run


def lease_on(fleet: Fleet, index: int) -> Lease:
    lease = fleet.lease(4, among=[fleet.servers[index], *fleet.servers])
    while lease is not None and lease.server.index != index:
        lease = fleet.lease(4)
    assert lease is not None
    return lease


def check(versions: Versions, results: list[GenerateResult]) -> None:
    """All of every answer, each token under the version that sampled it."""
    for result in results:
        assert len(result.output_ids) == LONG.max_new_tokens
        for start, end, version in result.spans:
            tokens = [*PROMPT, *result.output_ids]
            expected = versions.logprobs(version.removeprefix("1."), tokens)[len(PROMPT) - 1 :][start:end]
            assert max(abs(a - b) for a, b in zip(result.logprobs[start:end], expected, strict=True)) < 1e-5


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_struck_server_loses_nothing_and_serves_again_after_all_weights(
    under_fire: Callable[..., None], versions: Versions, signum: int
) -> None:
    async def work(fleet: Fleet) -> None:
        victim = fleet.servers[0]
        lease = lease_on(fleet, 0)
        requests = [asyncio.ensure_future(lease.generate(PROMPT, LONG, f"r{i}")) for i in range(4)]
        await asyncio.sleep(0.1)
        assert victim.process is not None
        os.kill(victim.process.pid, signum)  # type: ignore[attr-defined]
        check(versions, await asyncio.gather(*requests))
        assert lease.server is fleet.servers[1] and victim.load == 0 and fleet.servers[1].load == 4
        lease.release(4)
        await fleet.changes.until(lambda: (victim.starts == 2 and victim.available) or None, 120)
        assert not victim.serving
        await load(fleet, victim, versions, 1)
        check(versions, [await lease_on(fleet, 0).generate(PROMPT, LONG, "again")])

    under_fire(work)


@pytest.mark.slow
def test_a_server_that_refused_an_update_takes_no_request_before_a_whole_one(
    under_fire: Callable[..., None], versions: Versions
) -> None:
    async def work(fleet: Fleet) -> None:
        victim = fleet.servers[0]
        running = asyncio.ensure_future(lease_on(fleet, 0).generate(PROMPT, LONG, "running"))
        await asyncio.sleep(0.1)
        await victim.client.pause("retract")
        with pytest.raises(ServerError, match="/begin_weight_update"):
            await victim.client.update_weights_from_tensor(versions.bucket("1"), "1.1")
        fleet.missed(victim)
        later: Any = asyncio.ensure_future(lease_on(fleet, 1).generate(PROMPT, LONG, "later"))
        assert fleet.lease(1, among=[victim]) is None
        await load(fleet, victim, versions, 1)
        check(versions, [await running, await later])

    under_fire(work)
