"""The embedded engine as a process: ``python -m vcpo_megatron.rollout.embedded --model-path DIR --port P``.

Exit status: 0 after SIGTERM or SIGINT, 1 when the model cannot be served, the port is taken or the
engine failed (with one ``vcpo: error:`` line), 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.process import ERROR_PREFIX
from ...run.output import surviving

if TYPE_CHECKING:
    from .api import Service

#: Answers in flight get this long when the server ends.
SHUTDOWN_S = 3.0


class ServeError(RuntimeError):
    """The server cannot start or go on; one line for the user."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vcpo_megatron.rollout.embedded",
        description="Serve a Hugging Face model on CPUs over SGLang's HTTP API.",
        epilog="example: python -m vcpo_megatron.rollout.embedded --model-path models/qwen2-tiny --port 30000",
    )
    parser.add_argument("--model-path", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0: any free port, printed on the ready line")
    parser.add_argument("--max-running-requests", type=_positive, default=128, help="sequences decoded together")
    parser.add_argument("--context-length", type=_positive, help="default: the model's max_position_embeddings")
    parser.add_argument("--random-seed", type=int, help="of requests without a sampling_seed; default: any")
    parser.add_argument("--weight-version", default="default", help="name of the weights in the folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--enable-deterministic-inference",
        action="store_true",
        help="pad every forward to a fixed shape: the same seeded requests give the same bits",
    )
    parser.add_argument(
        "--enable-fp32-lm-head", action="store_true", help="logits in float32 where the model is in bfloat16"
    )
    parser.add_argument(
        "--enable-return-routed-experts",
        action="store_true",
        help="answer return_routed_experts: the experts of every token of a mixture of experts",
    )
    return parser


def serve(argv: Sequence[str] | None = None) -> int:
    """Runs the server until a signal; returns the exit status."""
    options = make_parser().parse_args(argv)
    with surviving():
        logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
        try:
            with _listener(options.host, options.port) as listener:
                asyncio.run(_serve(options, listener))
        except ServeError as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
            return 1
        except KeyboardInterrupt:  # before the signal handlers stand
            return 0
        return 0


def _listener(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet: a taken port is told before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServeError(f"cannot listen on {host}:{port}: {reason}; pass another --port") from error
    return listener


async def _serve(options: argparse.Namespace, listener: socket.socket) -> None:
    from aiohttp import web

    from .api import make_app
    from .errors import ModelError

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        service = make_service(options, on_failure=stop.set)
    except ModelError as error:
        raise ServeError(str(error)) from error
    service.engine.start()
    runner = web.AppRunner(make_app(service), access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    host, port = listener.getsockname()[:2]
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
    except OSError as error:  # bound by two programs, as SO_REUSEADDR lets them; one alone may listen
        await runner.cleanup()
        await service.engine.stop(SHUTDOWN_S)
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error
    print(f"vcpo: serving {options.model_path} at http://{host}:{port}", flush=True)
    await stop.wait()
    await service.engine.stop(SHUTDOWN_S)
    await runner.cleanup()
    if service.engine.failure:
        raise ServeError(service.engine.failure)


def make_service(options: argparse.Namespace, on_failure: Callable[[], None]) -> Service:
    """Loads the model and puts the parts together; ModelError when the folder cannot be served."""
    from .api import Service
    from .engine import Engine
    from .loading import context_length, load_model, load_tokenizer, read_config, stop_tokens
    from .model import build, keep_fp32_logits
    from .requests import RequestParser
    from .runner import Runner
    from .scheduler import Scheduler
    from .weight_groups import WeightGroups
    from .weights import Parameters, UpdateSession, named_tensors

    folder = options.model_path
    config = read_config(folder)
    length = context_length(config, options.context_length)
    model = load_model(folder, options.dtype)
    if options.enable_fp32_lm_head:
        keep_fp32_logits(model)
    packed = build(model, length, routed_experts=options.enable_return_routed_experts)
    runner = Runner(packed, options.max_running_requests, length, options.enable_deterministic_inference)
    scheduler = Scheduler(runner, options.weight_version)
    seed = secrets.randbits(31) if options.random_seed is None else options.random_seed
    parameters = Parameters(dict(named_tensors(model)))
    return Service(
        engine=Engine(scheduler, on_failure),
        scheduler=scheduler,
        parser=RequestParser(
            packed.vocab_size,
            length,
            stop_tokens(folder, config),
            load_tokenizer(folder),
            random.Random(seed),
            options.enable_return_routed_experts,
        ),
        parameters=parameters,
        session=UpdateSession(parameters),
        groups=WeightGroups(),
        model_path=str(folder),
        dtype=options.dtype,
        info={
            "engine": "embedded",
            "model_path": str(folder),
            "max_running_requests": options.max_running_requests,
            "context_length": length,
            "random_seed": seed,
            "dtype": options.dtype,
            "enable_fp32_lm_head": options.enable_fp32_lm_head,
            "enable_deterministic_inference": options.enable_deterministic_inference,
            "enable_return_routed_experts": options.enable_return_routed_experts,
        },
    )
