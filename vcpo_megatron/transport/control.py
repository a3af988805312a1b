"""The control sockets of the orchestrator and of learner rank 0, over ZeroMQ; no torch."""

from __future__ import annotations

import queue
import threading
import time
from typing import NamedTuple

import zmq
import zmq.asyncio

from .frames import decode, encode
from .messages import FOR_SENDER, ControlError, Heartbeat, Hello, Message

#: A socket that is closed sends what it still holds for so long.
LINGER_MS = 2000


class Received(NamedTuple):
    """A message, and the frames that it came as."""

    message: Message
    frames: list[bytes]


def finish_sending() -> None:
    """Close the sockets of this process's ``ControlServer``s and wait until what they were given is sent, ``LINGER_MS``
    at most."""
    zmq.asyncio.Context.instance().destroy(linger=LINGER_MS)


class ControlServer:
    """The orchestrator's end: one learner, known by the run's token in its Hello."""

    def __init__(self, address: str, token: str) -> None:
        """Bind to ``address`` ("tcp://host:port"); ControlError when the port is taken."""
        self._token = token
        self._peer: bytes | None = None
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
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
        self._inbox: queue.Queue[Received] = queue.Queue()
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
        wire.setsockopt(zmq.LINGER, LINGER_MS)
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
                frames = outgoing.recv_multipart(copy=False)  # a bucket of weights is large
                if not frames[0].bytes:
                    break
                wire.send_multipart(frames, copy=False)
                del frames  # else a bucket would be kept until there is something else to say
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
        if isinstance(message, FOR_SENDER):
            self._sender_inbox.put(message)
        else:
            self._inbox.put(Received(message, frames))

    def send(self, message: Message) -> None:
        frames = encode(message)
        with self._sending:
            self._outbox.send_multipart(frames, copy=False)

    def receive(self, timeout_s: float) -> Received | None:
        """Next message for the main thread with its frames, which may be passed on as they are; None when none came in
        ``timeout_s`` seconds.

        ControlError when it is malformed.
        """
        try:
            received = self._inbox.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            return None
        if self._malformed is not None:
            raise self._malformed
        return received

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
