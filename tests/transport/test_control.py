"""Control messages keep every value and type over the wire; strangers neither get in nor disturb."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from vcpo_megatron.transport import control
from vcpo_megatron.transport.control import (
    BatchReady,
    Checkpoint,
    CheckpointDone,
    CloseGroups,
    ControlClient,
    ControlError,
    ControlServer,
    Error,
    GroupOpened,
    GroupsLost,
    Heartbeat,
    Hello,
    Loaded,
    OpenGroup,
    Probe,
    ProbeResult,
    ReleaseWeights,
    SendWeights,
    StepDone,
    Stop,
    SyncDone,
    WeightsReady,
    WeightsSent,
    decode,
    encode,
)
from vcpo_megatron.types import (
    Batch,
    Group,
    PolicyVersion,
    StepResult,
    Trajectory,
    TrajectoryResult,
    Turn,
    VersionSpan,
)

PATIENCE_S = 10.0
TOKEN = "secret"


def trajectory(group: int, sample: int, tokens: list[int], mask: list[bool], logprobs: list[float]) -> Trajectory:
    start = mask.index(True)
    end = len(mask)
    return Trajectory(
        group_id=group,
        sample_index=sample,
        prompt_id=f"prompt-{group}",
        prompt_length=start,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.bool_),
        behavior_logprobs=np.array(logprobs, np.float32),
        turns=(
            Turn(start, end, "length", (VersionSpan(start, start + 1, PolicyVersion(1, 16)),
                                        VersionSpan(start + 1, end, PolicyVersion(2, 17)))),
        ),
        reward=0.5,
        info={"format": 1.0, "correct": 0.0},
    )  # fmt: skip


T, F = True, False
BATCH = Batch(
    step=17,
    groups=(
        Group(3, "prompt-3", (
            trajectory(3, 0, [1, 2, 3, 4], [F, F, T, T], [0.0, 0.0, -0.25, -1.5]),
            trajectory(3, 1, [7, 151935, 2147483647], [F, T, T], [0.0, -1e-7, -60.0]),
        )),
        Group(9, "prompt-9", (trajectory(9, 0, [5, 6, 7, 8, 9], [F, T, T, F, T], [0.0, -1.0, -2.0, 0.0, -3.0]),)),
    ),
)  # fmt: skip

EXPERTS = np.arange(2 * 3 * 2, dtype=np.uint16).reshape(2, 3, 2)
#: Of three trajectories the second has a record of its experts.
ROUTED = Batch(
    step=18,
    groups=(
        Group(4, "prompt-4", (
            trajectory(4, 0, [1, 2, 3], [F, T, T], [0.0, -0.25, -1.5]),
            replace(trajectory(4, 1, [7, 8], [F, T], [0.0, -1e-7]), routed_experts=EXPERTS),
            trajectory(4, 2, [1, 2], [F, T], [0.0, -0.25]),
        )),
    ),
)  # fmt: skip

MESSAGES: list[Any] = [
    Hello(TOKEN, PolicyVersion(2, 40), 4),
    Loaded(PolicyVersion(2, 40)),
    WeightsReady(PolicyVersion(1, 3), (b"first\x00bucket", b"", b"\xff" * 1000)),
    WeightsReady(PolicyVersion(1, 0), ()),
    SyncDone(PolicyVersion(10, 123456)),
    Probe(np.array([1, 2, 3, 2147483647], np.int32)),
    Probe(np.zeros(0, np.int32)),
    ProbeResult(np.array([-0.5, -1e-30, -np.inf], np.float32)),
    BatchReady(BATCH),
    BatchReady(ROUTED),
    BatchReady(Batch(0, ())),
    control.LeaveStep(7),
    control.StepLeft(7),
    StepDone(
        StepResult(
            step=17,
            version=PolicyVersion(1, 18),
            skipped="non-finite step",
            metrics={"loss": -0.125, "ess/ratio": math.inf},
            trajectories=(TrajectoryResult(3, 0, -0.5, 0.6065, 2.5, 0.25), TrajectoryResult(3, 1, 9.0, 8.0, 0.0, 0.25)),
        )
    ),
    Checkpoint(20, {"cursor": 12, "open": [1, 2], "nested": {"a": None, "b": [True, 0.5, "x"]}}),
    CheckpointDone(20, 1.75),
    Stop("done"),
    Error("learner rank 1", "out of memory: 3 GiB asked for"),
    Heartbeat("learner rank 0", "waits for a batch (step 3)"),
    OpenGroup("vcpo-1", 3),
    GroupOpened("vcpo-1", "10.0.0.1", 4711, "gloo"),
    SendWeights("vcpo-1", PolicyVersion(2, 7)),
    WeightsSent("vcpo-1", PolicyVersion(2, 7), {"a.weight": "00ff"}),
    CloseGroups("server 1 refused"),
    GroupsLost("connection reset"),
    ReleaseWeights(PolicyVersion(2, 6)),
]



def same(a: Any, b: Any) -> bool:
    """Equal in value, type, dtype and order, arrays and tuples included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def test_same_tells_apart() -> None:
    """The comparison that the tests below rest on."""
    assert same(np.float32([0.0]), np.float32([0.0])) and not same(np.float32([0.0]), np.float32([-0.0]))
    assert not same(np.zeros(2, np.int32), np.zeros(2, np.int64)) and not same((1,), [1])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip_through_bytes(message: Any) -> None:
    frames = [bytes(frame) for frame in encode(message)]
    assert same(decode(frames), message)


def test_every_kind_of_message_is_tested() -> None:
    assert {type(message) for message in MESSAGES} == set(control.Message.__args__)


def test_nan_survives() -> None:
    result = TrajectoryResult(1, 0, math.nan, 1.0, math.nan, 0.0)
    message = StepDone(StepResult(0, PolicyVersion(1, 1), "", {"loss": math.nan}, (result,)))
    got = decode(encode(message)).result  # type: ignore[union-attr]
    assert math.isnan(got.metrics["loss"]) and math.isnan(got.trajectories[0].log_ratio)
    assert math.isnan(got.trajectories[0].grad_norm) and got.trajectories[0].weight == 1.0


def test_arrays_travel_as_raw_little_endian_buffers() -> None:
    header, buffer = encode(Probe(np.array([1, 258], ">i4")))
    assert bytes(buffer) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert msgpack.unpackb(header)["kind"] == "Probe"
    _, *buffers = encode(BatchReady(BATCH))
    assert [len(bytes(frame)) for frame in buffers] == [12 * 4, 12, 12 * 4]
    assert bytes(buffers[0])[:8] == b"\x01\x00\x00\x00\x02\x00\x00\x00"


def test_non_contiguous_arrays() -> None:
    tokens = np.arange(10, dtype=np.int32)[::3]
    assert decode(encode(Probe(tokens))).tokens.tolist() == [0, 3, 6, 9]  # type: ignore[union-attr]


def test_unknown_message_is_named() -> None:
    with pytest.raises(ControlError, match="'Launch'"):
        decode([msgpack.packb({"kind": "Launch", "body": {}})])


# --- sockets ----------------------------------------------------------------------------------


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


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


HELLO = Hello(TOKEN, PolicyVersion(1, 0), 2)


def test_every_message_in_both_directions(address: str, client: ControlClient) -> None:
    async def scenario(server: ControlServer) -> None:
        client.send(HELLO)
        assert await server.receive() == HELLO
        for message in MESSAGES:
            client.send(message)
            assert same(await server.receive(), message)
            await server.send(message)
            for_sender = isinstance(message, control.FOR_SENDER)
            receive = client.receive_for_sender if for_sender else client.receive
            assert same(await asyncio.to_thread(receive, PATIENCE_S), message)

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
        assert client.receive(0.0) == Stop("done") and client.receive_for_sender(0.0) is None

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
        assert await asyncio.to_thread(client.receive, PATIENCE_S) == Stop("end")
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


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import vcpo_megatron.transport.control"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
