"""The orchestrator process: ``python -m vcpo_megatron.orchestrator``, told everything by its environment variables.

Exit codes: 0 the run ended, or was stopped by SIGTERM or SIGINT after a checkpoint; 1 it failed, 2 it refused its
configuration, and the last line of standard error says why.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import traceback
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from ..config.process import ERROR_PREFIX, NOTE_PREFIX, WARNING_PREFIX, ProcessContext
from ..config.schema import RunConfig
from ..environments.base import EnvironmentSetupError
from ..environments.client import EnvironmentClient
from ..environments.workers.pool import WorkerPool
from ..environments.workers.setup import WorkerSetup
from ..models.folder import read_model
from ..models.shape import ModelShape
from ..observability.sinks import JsonlSink, Sink, TensorBoardSink
from ..observability.wandb_sink import WandbRun, WandbSink
from ..rollout.client.http import ServerError, ServerUnavailable, allow_connections
from ..rollout.client.protocol import ProtocolError
from ..rollout.fleet.fleet import FleetError
from ..rollout.fleet.router import sampling_problem
from ..run.errors import ConfigError
from ..run.notifier import Notifier
from ..run.output import exit_now, surviving
from ..run.tasks import RunError, cancel
from ..run.text import one_line
from ..transport.control import ControlServer, finish_sending
from ..transport.messages import ControlError
from .controller import Controller, Parts
from .modes.replay import open_recorded, recorded_steps
from .peers.servers import make_fleet
from .peers.weight_sync import SyncError
from .store.schema import StoreError

#: Characters of the last line: a message with two long paths and its remedy.
LIMIT = 900
#: Ends that a user can do something about: one line, no traceback.
_EXPECTED = (
    RunError,
    ControlError,
    FleetError,
    SyncError,
    StoreError,
    ServerError,
    ServerUnavailable,
    ProtocolError,
)


def make_environment_workers(context: ProcessContext, config: RunConfig) -> WorkerPool:
    """The processes of the environment, not started yet."""
    return WorkerPool(
        WorkerSetup.of(config),
        workers=config.environment.workers,
        start_timeout_s=config.launch.timeout_s,
        log=lambda index: context.directory.log("environment", index),
    )


def make_parts(context: ProcessContext, config: RunConfig, shape: ModelShape, environment: EnvironmentClient) -> Parts:
    """The real parts of a run; errors in what they need are raised before any server starts."""
    sampling = environment.description.sampling
    for note in environment.description.notes:
        print(f"{NOTE_PREFIX}{note}", flush=True)
    if config.rollout.router is not None and (problem := sampling_problem(sampling)) is not None:
        raise ConfigError([problem])
    changes = Notifier()
    recorded = open_recorded(config) if config.rollout.engine == "replay" else None
    steps = recorded_steps(recorded, config, context.resume_step or 0) if recorded else config.train.steps

    def sinks(first_step: int) -> Sequence[Sink]:
        found: list[Sink] = [JsonlSink(context.directory.metrics)]
        if config.observability.tensorboard:
            found.append(TensorBoardSink(context.directory.tensorboard, first_step=first_step))
        if config.observability.wandb_project is not None:
            found.append(WandbSink(wandb_run(context, config), warn=_warn))
        return found

    return Parts(
        environment=environment,
        fleet=None if recorded else make_fleet(context, config, shape.vocab_size, changes),
        recorded=recorded,
        socket=ControlServer(context.control, context.token),
        sinks=sinks,
        changes=changes,
        steps=steps,
        vocab_size=shape.vocab_size,
        context_length=config.rollout.context_length or shape.max_position_embeddings,
    )


def wandb_run(context: ProcessContext, config: RunConfig) -> WandbRun:
    """What this run is at Weights & Biases: named like its directory, its id the run's identity in every attempt."""
    assert config.observability.wandb_project is not None
    return WandbRun(
        project=config.observability.wandb_project,
        mode=config.observability.wandb_mode,
        run_id=context.run,
        name=context.run_dir.name,
        directory=context.run_dir,
        config=config.model_dump(mode="json", exclude_none=True),
    )


def _warn(message: str) -> None:
    print(f"{WARNING_PREFIX}{message}", flush=True)


async def run(context: ProcessContext) -> str:
    """One run from the process's context; returns why it ended well."""
    config = context.config()
    if (problem := allow_connections(config.rollout.fleet_size * config.rollout.max_running_requests)) is not None:
        print(f"{WARNING_PREFIX}{problem}", flush=True)
    shape = read_model(config.model.path)
    async with make_environment_workers(context, config) as environment:
        parts = make_parts(context, config, shape, environment)
        controller = Controller(context, config, parts)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, controller.request_stop, "stopped by signal")
        try:
            return await controller.run()
        finally:
            parts.socket.close()


def main() -> int:
    """Exit code of the process. A full disk under its log ends nothing."""
    with surviving():
        return _run()


def _run() -> int:
    try:
        context = ProcessContext.from_environment()
    except KeyError as error:
        return _fail(f"{error.args[0]} is not set: this process is started by `vcpo train`", 2)
    try:
        print(_complete(run(context)), flush=True)
    except (ConfigError, EnvironmentSetupError) as error:
        return _fail(one_line(error, LIMIT), 2)
    except _EXPECTED as error:
        return _fail(one_line(error, LIMIT), 1)
    except Exception as error:  # fault boundary of the process: a defect; the supervisor shows the last line
        traceback.print_exc()
        return _fail(f"{type(error).__name__}: {one_line(error, LIMIT)}", 1)
    return 0


def _complete(work: Coroutine[Any, Any, str]) -> str:
    """As asyncio.run, but what is left of the work is waited for only as long as ``cancel`` does, and threads not."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(cancel(*asyncio.all_tasks(loop)))


def _fail(message: str, code: int) -> int:
    print(f"{ERROR_PREFIX}{message}", file=sys.stderr, flush=True)
    return code


def _end(code: int) -> NoReturn:
    """End the process when what was sent has gone out."""
    finish_sending()
    exit_now(code)


if __name__ == "__main__":
    _end(main())
