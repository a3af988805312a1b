"""A worker: ``python -m vcpo_megatron.environments.workers SOCKET PAGE``, two descriptors that its parent made.

It makes the environment and serves episodes until it is told to stop or its parent is gone. What a user's code writes
to standard output or standard error is in the log that these go to; the protocol has a socket of its own. Exit code 0
when it was told to stop, 1 when the environment cannot be made, which it says in its first reply.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import pickle
import resource
import socket
import sys
import time
import traceback

from ...config.process import ERROR_PREFIX
from ...run.output import exit_now
from ...run.text import one_line
from ..base import EnvironmentSetupError
from ..registry import make_environment
from . import values
from .activity import Activity
from .host import EnvironmentHost
from .messages import Channel, Message, MessageError, Unpacker, pack
from .setup import Made, WorkerSetup

#: Seconds that episodes get to release what they hold when the worker is told to stop.
STOP_S = 3.0
_BLOCK = 1 << 16


def _receive_setup(connection: socket.socket) -> WorkerSetup:
    """The parent's first message; EOFError when it has gone."""
    unpacker = Unpacker()
    while data := connection.recv(_BLOCK):
        for message in unpacker.feed(data):
            if message[0] != "setup":
                raise MessageError(f"{message[0]!r} came before the setup")
            setup = pickle.loads(message[1])  # from the process that started this one
            assert isinstance(setup, WorkerSetup)
            return setup
    raise EOFError


def _limit_memory(gib: float | None) -> None:
    """Allocations beyond ``gib`` fail with MemoryError. What is mapped from files or shared does not count."""
    if gib is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _make(setup: WorkerSetup, activity: Activity) -> Made:
    """The environment and what it says of itself; EnvironmentSetupError with all that is wrong."""
    wrong = f"environment.name = {setup.environment.name!r}: "
    phase = "the factory"
    activity.enter(0, phase, 0.0)
    try:
        notes = list[str]()
        environment = make_environment(setup.environment, setup.tokenizer_dir, setup.seed, warn=notes.append)
        phase = "heldout"
        activity.enter(0, phase, 0.0)
        heldout = values.heldout(environment)
        phase = "its description"
        return Made(environment, heldout, values.description(environment, heldout, notes))
    except EnvironmentSetupError as error:
        if error.__cause__ is not None:  # what a user's code raised
            traceback.print_exception(error.__cause__)
        raise
    except values.BadValue as error:
        raise EnvironmentSetupError(f"{wrong}{phase} {error}") from None
    except BaseException as error:  # fault boundary: a user's module, factory or held-out prompts
        traceback.print_exc()
        raise EnvironmentSetupError(f"{wrong}{values.raised(phase, error)}") from error
    finally:
        activity.leave()


def _serve(connection: socket.socket, made: Made, setup: WorkerSetup, activity: Activity) -> None:
    """Answer until told to stop."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    stopped = loop.create_future()

    async def end(host: EnvironmentHost) -> None:
        await host.stop(STOP_S)
        if not stopped.done():
            stopped.set_result(None)

    async def begin() -> None:
        ending: list[asyncio.Task[None]] = []

        def on_message(message: Message) -> None:
            if message == ["stop"]:
                ending.append(loop.create_task(end(host)))
            else:
                host.handle(message)

        def on_lost(why: str) -> None:
            ending.append(loop.create_task(end(host)))

        _, channel = await loop.create_unix_connection(lambda: Channel(on_message, on_lost), sock=connection)
        host = EnvironmentHost(made.environment, made.heldout, setup.episode_timeout_s, channel.send, activity)
        channel.send(["ready", made.description])

    loop.run_until_complete(begin())
    while not stopped.done():
        try:
            loop.run_until_complete(stopped)
        except (SystemExit, KeyboardInterrupt) as error:  # of a task that a user's code left behind
            print(f"{type(error).__name__} of a background task is ignored", flush=True)


def main() -> int:
    socket_fd, page_fd = map(int, sys.argv[1:3])
    for descriptor in (socket_fd, page_fd):
        os.set_inheritable(descriptor, False)
    activity = Activity.opened(page_fd)
    connection = socket.socket(fileno=socket_fd)
    faulthandler.enable()
    try:
        setup = _receive_setup(connection)
    except EOFError:
        return 0
    _limit_memory(setup.environment.worker_memory_gb)
    started = time.monotonic()
    try:
        made = _make(setup, activity)
    except EnvironmentSetupError as error:
        connection.sendall(pack(["refused", list(error.problems)]))
        print(f"{ERROR_PREFIX}{one_line(error)}", flush=True)
        return 1
    print(f"environment {setup.environment.name} made in {time.monotonic() - started:.1f} s", flush=True)
    _serve(connection, made, setup, activity)
    return 0


if __name__ == "__main__":
    exit_now(main())
