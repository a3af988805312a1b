"""How a run and a worker talk: msgpack lists over a socket pair, one request and one reply a turn.

    to the worker                              its reply
    ["setup", pickled WorkerSetup]             ["ready", description] or ["refused", [problem, ...]]
    ["prompt", job, index]                     ["answer", job, prompt_id]
    ["reset", job, stream, index]              ["observed", job, token_ids]
    ["step", job, token_ids, finish_reason]    ["observed", job, token_ids] or ["ended", job, reward, info]
    ["reference", job, [stream, index]]        ["answer", job, token_ids]
    ["close", job]                             none
    ["stop"]                                   none; the worker ends

Whatever goes wrong in a job is ["failed", job, message], its last reply. A job is an episode or a single question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack

#: Bytes of one message at most: prompts of a million tokens are far below.
_LARGEST = 2**31 - 1

Message = list[Any]


class MessageError(ValueError):
    """Bytes that are no message of this protocol."""


def pack(message: Message) -> bytes:
    # A policy may write half a surrogate pair: whatever text there is comes through as it is.
    return bytes(msgpack.packb(message, unicode_errors="surrogatepass"))


class Unpacker:
    """Messages out of bytes as they come."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(max_buffer_size=_LARGEST, unicode_errors="surrogatepass")

    def feed(self, data: bytes) -> list[Message]:
        """Messages that are complete with ``data``; MessageError."""
        self._unpacker.feed(data)
        try:
            messages = list(self._unpacker)
        except (ValueError, msgpack.UnpackException) as error:
            raise MessageError(f"{type(error).__name__}: {error}") from error
        if not all(isinstance(message, list) and message for message in messages):
            raise MessageError("not a list")
        return messages


class Channel(asyncio.Protocol):
    """One end of the socket pair. What is sent within one turn of the event loop goes out in one write.

    ``on_lost(why)`` is called once: the other end is gone, or what came is no message.
    """

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._unpacker = Unpacker()
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()
        self._outbox: list[bytes] = []
        self._why = "closed its connection"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._unpacker.feed(data):
                self._on_message(message)
        except MessageError as error:
            self._why = f"sent what is no message ({error})"
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost(self._why)

    def send(self, message: Message) -> None:
        """Send soon; nothing when the other end is gone."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(pack(message))

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._outbox))
        self._outbox.clear()

    def close(self) -> None:
        """End the connection when what was sent has gone out."""
        if self._transport is not None:
            self._flush()
            self._transport.close()
