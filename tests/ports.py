"""Ports that nobody else can take between their choice and their use."""

from __future__ import annotations

import socket


class HeldPort:
    """A free ``port`` of this host, held by a socket that does not listen: the kernel gives it to nobody, and whoever
    binds to it with SO_REUSEADDR, as servers do, may have it."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])

    def release(self) -> None:
        self._socket.close()
