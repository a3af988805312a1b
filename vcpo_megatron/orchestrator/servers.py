"""The fleet of a run: its embedded servers, as child processes of the orchestrator."""

from __future__ import annotations

import subprocess
import sys

from ..config.models import RunConfig
from ..config.process import ProcessContext
from ..rollout.client import ServerClient
from ..rollout.fleet import Changes, Fleet, FleetOptions, Process, Server
from ..transport.child import start_child, stop_child

_HOST = "127.0.0.1"
#: Seconds that a server gets to end after SIGTERM.
_GRACE_S = 5.0


def server_command(context: ProcessContext, config: RunConfig, index: int) -> list[str]:
    """Command line of embedded server ``index``."""
    command = [
        sys.executable, "-m", "vcpo_megatron.rollout.embedded",
        "--model-path", str(config.model.path),
        "--host", _HOST,
        "--port", str(context.server_ports[index]),
        "--dtype", config.model.dtype,
        "--max-running-requests", str(config.rollout.max_running_requests),
    ]  # fmt: skip
    if config.rollout.context_length is not None:
        command += ["--context-length", str(config.rollout.context_length)]
    if config.staleness.lag == "exact":
        command.append("--enable-deterministic-inference")
    return command


def make_fleet(context: ProcessContext, config: RunConfig, vocab_size: int, changes: Changes) -> Fleet:
    """The servers of a run, not started yet."""
    rollout = config.rollout

    def launch(index: int) -> Process:
        env = {**context.environment(), "RANK": str(index), "PYTHONUNBUFFERED": "1"}
        return start_child(server_command(context, config, index), env=env, log=context.directory.log("server", index))

    def stop(process: Process) -> int:
        assert isinstance(process, subprocess.Popen)
        return stop_child(process, grace_s=_GRACE_S)

    servers = [
        Server(index, ServerClient(f"http://{_HOST}:{port}", vocab_size, rollout.request_timeout_s),
               context.directory.log("server", index))
        for index, port in enumerate(context.server_ports)
    ]  # fmt: skip
    options = FleetOptions(
        capacity=rollout.max_running_requests,
        max_restarts=rollout.max_restarts,
        start_timeout_s=rollout.start_timeout_s,
        takeover_timeout_s=rollout.start_timeout_s + rollout.sync_timeout_s,
    )
    return Fleet(servers, options, launch=launch, stop=stop, changes=changes)
