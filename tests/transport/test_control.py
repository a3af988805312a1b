"""Control sockets carry every message; strangers neither get in nor disturb."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import msgpack
import pytest
import zmq

from tests.ports import HeldPort
from tests.transport.samples import MESSAGES, TOKEN, same
from vcpo_megatron.transport import messages
from vcpo_megatron.transport.control import ControlClient, ControlServer, Received
from vcpo_megatron.transport.frames import encode
from vcpo_megatron.transport.messages import (
    ControlError,
    Error,
    Heartbeat,
    Hello,
    Message,
    ReleaseWeights,
    Stop,
    SyncDone,
)
from vcpo_megatron.types import (
    PolicyVersion,
)

PATIENCE_S = 30.0


@pytest.fixture
def address() -> Iterator[str]:
    held = HeldPort()
    yield f"tcp://127.0.0.1:{held.port}"
    held.release()


def run(scenario: Callable[[ControlServer], Awaitable[None]], address: str) -> None:
    async def bounded() -> None:
        server = ControlServer(address, TOKEN)
        try:
            await asyncio.wait_for(scenario(server), PATIENCE_S)
        finally:
            server.close()

    asyncio.run(bounded())


@pytest.fixture
def client(address: str) -> Iterator[ControlClient]:
    """Without heartbeats while a test lasts."""
    client = ControlClient(address, heartbeat_s=1000.0)
    yield client
    client.close()


def arrived(received: Received | None) -> Message | None:
    return None if received is None else received.message


HELLO = Hello(TOKEN, PolicyVersion(1, 0), 2)


def test_every_message_in_both_directions(address: str, client: ControlClient) -> None:
    async def scenario(server: ControlServer) -> None:
        client.send(HELLO)
        assert await server.receive() == HELLO
        for message in MESSAGES:
            client.send(message)
            assert same(await server.receive(), message)
            await server.send(message)
            if isinstance(message, messages.FOR_SENDER):
                assert same(await asyncio.to_thread(client.receive_for_sender, PATIENCE_S), message)
                continue
            received = await asyncio.to_thread(client.receive, PATIENCE_S)
            assert received is not None and same(received.message, message)
            assert received.frames == [bytes(frame) for frame in encode(message)]  # to be passed on

    run(scenario, address)


def test_messages_for_the_sender_of_weights_do_not_wait_for_the_main_thread(
    address: str, client: ControlClient
) -> None:
    version = PolicyVersion(1, 1)

    async def scenario(server: ControlServer) -> None:
        client.send(HELLO)
        await server.receive()
        for message in (Stop("done"), ReleaseWeights(version), SyncDone(version)):
            await server.send(message)
        assert await asyncio.to_thread(client.receive_for_sender, PATIENCE_S) == ReleaseWeights(version)
        assert await asyncio.to_thread(client.receive_for_sender, PATIENCE_S) == SyncDone(version)
        assert arrived(client.receive(0.0)) == Stop("done") and client.receive_for_sender(0.0) is None

    run(scenario, address)


def test_client_gives_up_after_its_timeout(client: ControlClient) -> None:
    start = time.monotonic()
    assert client.receive(0.05) is None
    assert time.monotonic() - start < PATIENCE_S


def test_heartbeats_go_out_while_the_learner_is_busy(address: str) -> None:
    """From before the Hello, where they are ignored, and with what the learner does at the time."""
    client = ControlClient(address, sender="learner rank 0", heartbeat_s=0.05)

    async def scenario(server: ControlServer) -> None:
        await asyncio.sleep(0.3)
        client.send(HELLO)
        assert await server.receive() == HELLO
        client.doing = "step 3"
        time.sleep(0.3)  # neither end does anything meanwhile
        beats = [await server.receive() for _ in range(6)]
        assert set(beats) <= {Heartbeat("learner rank 0", "starting"), Heartbeat("learner rank 0", "step 3")}
        assert beats[-1] == Heartbeat("learner rank 0", "step 3")

    try:
        run(scenario, address)
    finally:
        client.close()


def test_close_delivers_what_was_sent(address: str) -> None:
    async def scenario(server: ControlServer) -> None:
        client = ControlClient(address, heartbeat_s=1000.0)
        client.send(HELLO)
        client.send(Error("learner rank 0", "out of memory"))
        await asyncio.to_thread(client.close)
        assert [await server.receive(), await server.receive()] == [HELLO, Error("learner rank 0", "out of memory")]

    run(scenario, address)


def test_server_cannot_send_before_hello(address: str) -> None:
    async def scenario(server: ControlServer) -> None:
        with pytest.raises(ControlError, match="hello"):
            await server.send(Stop("x"))

    run(scenario, address)


def test_address_in_use_is_named(address: str) -> None:
    async def scenario(server: ControlServer) -> None:
        with pytest.raises(ControlError, match=address):
            ControlServer(address, TOKEN)

    run(scenario, address)


STRANGERS: dict[str, list[bytes]] = {
    "no hello": [bytes(frame) for frame in encode(Heartbeat("me", "nothing"))],
    "another token": [bytes(frame) for frame in encode(Hello("guess", PolicyVersion(1, 0), 2))],
    "unknown message": [msgpack.packb({"kind": "Launch", "body": {}})],
    "not msgpack": [b"GET / HTTP/1.1\r\n\r\n"],
    "empty frame": [b""],
    "not a map": [msgpack.packb([1, 2])],
    "hello without a body": [msgpack.packb({"kind": "Hello", "body": {}})],
}


@pytest.mark.parametrize("frames", STRANGERS.values(), ids=STRANGERS.keys())
def test_strangers_are_ignored(address: str, client: ControlClient, frames: list[bytes]) -> None:
    """Before and after the learner's Hello; the learner keeps its place."""
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(address)

    async def scenario(server: ControlServer) -> None:
        stranger.send_multipart(frames)
        await asyncio.sleep(0.1)
        client.send(HELLO)
        assert await server.receive() == HELLO
        stranger.send_multipart(frames)
        await asyncio.sleep(0.1)
        client.send(Heartbeat("learner rank 0", "steps"))
        assert await server.receive() == Heartbeat("learner rank 0", "steps")
        await server.send(Stop("end"))
        assert arrived(await asyncio.to_thread(client.receive, PATIENCE_S)) == Stop("end")
        assert not stranger.poll(50)

    try:
        run(scenario, address)
    finally:
        stranger.close()


def test_learner_that_speaks_wrongly_is_an_error(address: str) -> None:
    socket_ = zmq.Context.instance().socket(zmq.DEALER)
    socket_.setsockopt(zmq.LINGER, 0)
    socket_.connect(address)

    async def scenario(server: ControlServer) -> None:
        socket_.send_multipart(encode(HELLO))
        await server.receive()
        socket_.send_multipart([b"\xc1"])
        with pytest.raises(ControlError):
            await server.receive()

    try:
        run(scenario, address)
    finally:
        socket_.close()
