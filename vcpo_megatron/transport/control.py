"""Control messages between the orchestrator and learner rank 0, over ZeroMQ; no torch.

    orchestrator (ROUTER, asyncio)                    learner rank 0 (DEALER, blocking)
        <-- Hello        once, with the run's token
        <-- Loaded       once, when its parameters are those of that version
        <-- WeightsReady after the start and after every step, followed by its buckets
        --> SyncDone     the weights were taken over; the next ones may come
        --> OpenGroup    <-- GroupOpened    rollout.sync = "distributed": servers and sender meet at an address
        --> SendWeights  <-- WeightsSent    all buckets of a version, broadcast in the order of its plan
        --> CloseGroups, ReleaseWeights     <-- GroupsLost
        --> Probe        <-- ProbeResult
        --> BatchReady   <-- StepDone, or StepLeft
        --> LeaveStep    asks for StepLeft; StepDone comes all the same when the step is too far
        --> Checkpoint   <-- CheckpointDone
        --> Stop         the learner ends with exit code 0
        <-> Error        the run ends; <-> Heartbeat

A message is a multipart frame: a msgpack header, then raw little-endian buffers (arrays, bytes).
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from ..types import Batch, Group, PolicyVersion, StepResult, Trajectory, TrajectoryResult, Turn, VersionSpan


class ControlError(RuntimeError):
    """The peer is silent past a deadline, speaks wrongly, or reported an error."""


@dataclass(frozen=True)
class Hello:
    """First message of the learner. ``version`` is the policy that its parameters are to be."""

    token: str
    version: PolicyVersion
    world_size: int


@dataclass(frozen=True)
class Loaded:
    """All ranks hold ``version``: what a resumed run goes back to could be read, and is what was written."""

    version: PolicyVersion


@dataclass(frozen=True)
class WeightsReady:
    """All tensors of ``version`` under Hugging Face names can be had, in one of three ways.

    buckets    rollout.sync = "tensor": serialized, opaque; each is what SGLang's ``update_weights_from_tensor`` takes
               as one element of ``serialized_named_tensors`` (base64 text as bytes), forwarded unread
    path       "disk": a folder of safetensors, complete
    plan       "distributed": buckets in the order in which they will be broadcast, each a list of
               [name, dtype, shape]
    checksums  name of a server's parameter -> checksum, with ``rollout.verify_sync``; for "distributed" they come
               with WeightsSent
    """

    version: PolicyVersion
    buckets: tuple[bytes, ...] = ()
    path: str = ""
    plan: list[Any] = field(default_factory=list)
    checksums: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SyncDone:
    version: PolicyVersion


@dataclass(frozen=True)
class OpenGroup:
    """Asks the sender to wait, as rank 0, for the servers of group ``name``; ``world_size`` counts it."""

    name: str
    world_size: int


@dataclass(frozen=True)
class GroupOpened:
    """The servers of group ``name`` are awaited at ``address``:``port``; ``backend`` is torch's."""

    name: str
    address: str
    port: int
    backend: str


@dataclass(frozen=True)
class SendWeights:
    """Asks the sender to broadcast all buckets of ``version`` in group ``name``."""

    name: str
    version: PolicyVersion


@dataclass(frozen=True)
class WeightsSent:
    """Every bucket has left. ``checksums`` as in WeightsReady."""

    name: str
    version: PolicyVersion
    checksums: dict[str, Any]


@dataclass(frozen=True)
class CloseGroups:
    """Ends every group at once, also in the middle of a broadcast."""

    reason: str


@dataclass(frozen=True)
class GroupsLost:
    """A broadcast failed; no group is left."""

    reason: str


@dataclass(frozen=True)
class ReleaseWeights:
    """``version`` will not be asked for any more."""

    version: PolicyVersion


@dataclass(frozen=True)
class Probe:
    """Asks for log-probs of ``tokens`` [L] (int32) under the current parameters."""

    tokens: np.ndarray


@dataclass(frozen=True)
class ProbeResult:
    """``logprobs`` [L-1] (float32): log pi(tokens[t] | tokens[:t]) for t = 1..L-1."""

    logprobs: np.ndarray


@dataclass(frozen=True)
class BatchReady:
    batch: Batch


@dataclass(frozen=True)
class StepDone:
    result: StepResult


@dataclass(frozen=True)
class LeaveStep:
    """Asks to leave ``step`` without its optimizer step. It may be done already: StepDone is then the answer."""

    step: int


@dataclass(frozen=True)
class StepLeft:
    """``step`` was left: parameters and optimizer are as before it."""

    step: int


@dataclass(frozen=True)
class Checkpoint:
    """Asks for a checkpoint of the current parameters as ``step``; ``state`` goes into its manifest."""

    step: int
    state: dict[str, Any]


@dataclass(frozen=True)
class CheckpointDone:
    step: int
    seconds: float


@dataclass(frozen=True)
class Stop:
    reason: str


@dataclass(frozen=True)
class Error:
    """Fatal: the sender is about to end. ``message`` is one line for the user."""

    sender: str
    message: str


@dataclass(frozen=True)
class Heartbeat:
    """``doing`` says what the sender does or waits for."""

    sender: str
    doing: str


Message = (
    Hello | Loaded | WeightsReady | SyncDone | Probe | ProbeResult | BatchReady | StepDone | LeaveStep | StepLeft
    | Checkpoint | CheckpointDone | Stop | Error | Heartbeat | OpenGroup | GroupOpened | SendWeights | WeightsSent
    | CloseGroups | GroupsLost | ReleaseWeights
)  # fmt: skip
#: What the learner's sender of weights reads, whatever its main thread does meanwhile.
FOR_SENDER = (SyncDone, OpenGroup, SendWeights, CloseGroups, ReleaseWeights)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}


# --- encoding ---------------------------------------------------------------------------------


@dataclass
class _Buffers:
    frames: list[Any] = field(default_factory=list)

    def put(self, value: Any) -> int:
        self.frames.append(value)
        return len(self.frames) - 1


def _pack_array(array: np.ndarray, buffers: _Buffers) -> list[Any]:
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return [buffers.put(little.tobytes()), little.dtype.str, list(little.shape)]


def _unpack_array(packed: list[Any], frames: list[Any]) -> np.ndarray:
    index, dtype, shape = packed
    array = np.frombuffer(frames[index], dtype=dtype).reshape(shape)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _pack_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "sample": trajectory.sample_index,
        "prompt_length": trajectory.prompt_length,
        "length": len(trajectory.tokens),
        "turns": [
            [turn.start, turn.end, turn.finish_reason, [[s.start, s.end, str(s.version)] for s in turn.spans]]
            for turn in trajectory.turns
        ],
        "reward": trajectory.reward,
        "info": dict(trajectory.info),
        "routed": trajectory.routed_experts is not None,
    }


def _pack_batch(batch: Batch, buffers: _Buffers) -> dict[str, Any]:
    """Per-token arrays of all trajectories go as concatenated buffers, one a kind."""
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    routed = [t.routed_experts for t in trajectories if t.routed_experts is not None]

    def joined(name: str, dtype: Any) -> list[Any]:
        arrays = [getattr(trajectory, name) for trajectory in trajectories]
        return _pack_array(np.concatenate(arrays) if arrays else np.zeros(0, dtype), buffers)

    return {
        "step": batch.step,
        "groups": [[g.group_id, g.prompt_id, [_pack_trajectory(t) for t in g.trajectories]] for g in batch.groups],
        "tokens": joined("tokens", np.int32),
        "loss_mask": joined("loss_mask", np.bool_),
        "behavior_logprobs": joined("behavior_logprobs", np.float32),
        "routed_experts": _pack_array(np.concatenate(routed), buffers) if routed else None,
    }


def _unpack_turns(rows: list[Any]) -> tuple[Turn, ...]:
    return tuple(
        Turn(start, end, reason, tuple(VersionSpan(a, b, PolicyVersion.parse(v)) for a, b, v in spans))
        for start, end, reason, spans in rows
    )


def _unpack_batch(packed: dict[str, Any], frames: list[Any]) -> Batch:
    names = ("tokens", "loss_mask", "behavior_logprobs")
    arrays = {name: _unpack_array(packed[name], frames) for name in names}
    experts = None if packed["routed_experts"] is None else _unpack_array(packed["routed_experts"], frames)
    position = routed = 0
    groups = []
    for group_id, prompt_id, rows in packed["groups"]:
        members = []
        for row in rows:
            cut = slice(position, position + row["length"])
            position = cut.stop
            own = None
            if row["routed"]:
                assert experts is not None
                own, routed = experts[routed : routed + row["length"]], routed + row["length"]
            members.append(
                Trajectory(
                    group_id=group_id, sample_index=row["sample"], prompt_id=prompt_id,
                    prompt_length=row["prompt_length"], turns=_unpack_turns(row["turns"]),
                    reward=row["reward"], info=row["info"], routed_experts=own,
                    **{name: arrays[name][cut] for name in names},
                )
            )  # fmt: skip
        groups.append(Group(group_id, prompt_id, tuple(members)))
    return Batch(packed["step"], tuple(groups))


def _pack_value(value: Any, buffers: _Buffers) -> Any:
    match value:
        case PolicyVersion():
            return str(value)
        case np.ndarray():
            return _pack_array(value, buffers)
        case Batch():
            return _pack_batch(value, buffers)
        case StepResult():
            rows = [list(asdict(row).values()) for row in value.trajectories]
            return [value.step, str(value.version), value.skipped, dict(value.metrics), rows]
        case tuple():  # of bytes
            return [buffers.put(item) for item in value]
        case _:
            return value


def _unpack_value(kind: str, value: Any, frames: list[Any]) -> Any:
    match kind:
        case "PolicyVersion":
            return PolicyVersion.parse(value)
        case "np.ndarray":
            return _unpack_array(value, frames)
        case "Batch":
            return _unpack_batch(value, frames)
        case "StepResult":
            step, version, skipped, metrics, rows = value
            results = tuple(TrajectoryResult(*row) for row in rows)
            return StepResult(step, PolicyVersion.parse(version), skipped, metrics, results)
        case "tuple[bytes, ...]":
            return tuple(bytes(frames[index]) for index in value)
        case _:
            return value


def encode(message: Message) -> list[Any]:
    """Frames of one message: header first."""
    buffers = _Buffers()
    body = {f.name: _pack_value(getattr(message, f.name), buffers) for f in fields(message)}
    return [msgpack.packb({"kind": type(message).__name__, "body": body}), *buffers.frames]


def decode(frames: list[Any]) -> Message:
    """Inverse of ``encode``; ControlError when the frames are no known message."""
    try:
        header = msgpack.unpackb(bytes(frames[0]), strict_map_key=False)
        kind = _KINDS[header["kind"]]
        values = {f.name: _unpack_value(str(f.type), header["body"][f.name], frames[1:]) for f in fields(kind)}
        return kind(**values)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ControlError(f"malformed control message ({type(error).__name__}: {error})") from error


# --- sockets ----------------------------------------------------------------------------------


class ControlServer:
    """The orchestrator's end: one learner, known by the run's token in its Hello."""

    def __init__(self, address: str, token: str) -> None:
        """Bind to ``address`` ("tcp://host:port"); ControlError when the port is taken."""
        self._token = token
        self._peer: bytes | None = None
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ControlError(f"cannot bind the control socket to {address}: {error.strerror}") from error

    async def receive(self) -> Message:
        """Next message of the learner. Strangers (no token, another token, garbage) are ignored."""
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                message = decode(frames)
            except ControlError:
                if peer == self._peer:
                    raise
                continue
            if isinstance(message, Hello):
                if message.token != self._token:
                    continue
                self._peer = peer
            if peer == self._peer:
                return message

    async def send(self, message: Message) -> None:
        """Send to the learner; ControlError before its Hello."""
        if self._peer is None:
            raise ControlError("the learner has not said hello yet")
        await self._socket.send_multipart([self._peer, *encode(message)])

    def close(self) -> None:
        self._socket.close()


class ControlClient:
    """Learner rank 0's end: ``receive`` is for its main thread, ``receive_for_sender`` for the one that sends weights,
    ``send`` for both.

    A thread of its own owns the socket, so that a Heartbeat goes out every ``heartbeat_s`` seconds
    however long a step takes; ``doing`` is what it says. A hung collective is not hidden by that: it
    ends by its own deadline.
    """

    def __init__(self, address: str, *, sender: str = "learner", heartbeat_s: float = 2.0) -> None:
        self.doing = "starting"
        self._sender = sender
        self._heartbeat_s = heartbeat_s
        self._context = zmq.Context()
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._sender_inbox: queue.Queue[Message] = queue.Queue()
        self._malformed: ControlError | None = None
        self._sending = threading.Lock()
        self._outbox = self._context.socket(zmq.PAIR)
        self._outbox.bind("inproc://outbox")
        self._thread = threading.Thread(target=self._pump, args=(address,), name="control", daemon=True)
        self._thread.start()

    def _pump(self, address: str) -> None:
        """Carry frames between the main thread and the orchestrator until an empty message says close."""
        outgoing = self._context.socket(zmq.PAIR)
        outgoing.connect("inproc://outbox")
        wire = self._context.socket(zmq.DEALER)
        wire.setsockopt(zmq.LINGER, 2000)
        wire.setsockopt(zmq.SNDHWM, 0)
        wire.setsockopt(zmq.RCVHWM, 0)
        wire.connect(address)
        poller = zmq.Poller()
        poller.register(outgoing, zmq.POLLIN)
        poller.register(wire, zmq.POLLIN)
        last = time.monotonic()
        while True:
            ready = dict(poller.poll(max(0, int(1000 * (last + self._heartbeat_s - time.monotonic())))))
            if outgoing in ready:
                frames = outgoing.recv_multipart()
                if frames == [b""]:
                    break
                wire.send_multipart(frames)
            if wire in ready:
                self._sort(wire.recv_multipart())
            if time.monotonic() >= last + self._heartbeat_s:
                wire.send_multipart(encode(Heartbeat(self._sender, self.doing)))
                last = time.monotonic()
        outgoing.close()
        wire.close()

    def _sort(self, frames: list[bytes]) -> None:
        """To the thread that a message is for; one that is malformed is the main thread's to report."""
        try:
            message = decode(frames)
        except ControlError as error:
            self._malformed = error
            message = Heartbeat("control", "a malformed message")  # wakes the main thread
        (self._sender_inbox if isinstance(message, FOR_SENDER) else self._inbox).put(message)

    def send(self, message: Message) -> None:
        frames = encode(message)
        with self._sending:
            self._outbox.send_multipart(frames)

    def receive(self, timeout_s: float) -> Message | None:
        """Next message for the main thread, or None when none came in ``timeout_s`` seconds.

        ControlError when it is malformed.
        """
        try:
            message = self._inbox.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None
        if self._malformed is not None:
            raise self._malformed
        return message

    def post_to_sender(self, message: Message) -> None:
        """Give the sender of weights a message of this process."""
        self._sender_inbox.put(message)

    def receive_for_sender(self, timeout_s: float) -> Message | None:
        """Next message that concerns the sending of weights, or None when none came in ``timeout_s`` seconds."""
        try:
            return self._sender_inbox.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Send what is left (2 s at most) and end the thread."""
        with self._sending:
            self._outbox.send(b"")
        self._thread.join()
        self._outbox.close()
        self._context.term()
