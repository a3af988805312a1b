"""One rollout server as the fleet sees it: its process, its state, its version, its load."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from ...types import PolicyVersion
from ..client.back_off import BackOff
from ..client.http import ServerClient
from .health import Health

#: Pauses between questions whether a server is ready, and before further starts of one that dies as it starts.
_ASK_S = (0.05, 1.0)
_RESTART_S = (1.0, 30.0)


class ServerProcess(Protocol):
    """What the fleet needs of a child process (``subprocess.Popen`` has it)."""

    def poll(self) -> int | None: ...


class ServerState(Enum):
    STARTING = "starting"
    EMPTY = "without current weights"
    SERVING = "serving"


@dataclass(eq=False)
class Server:
    """One rollout server.

    ``joined``: it ran already, and has no process here. ``version`` is what it has loaded whole, None unless it is
    SERVING. ``load`` counts the trajectories that hold a place on it, ``busy`` those of them that have a request in
    flight or are about to, ``starts`` its processes so far. ``updating`` is set by the weight sync.
    """

    index: int
    client: ServerClient
    log: Path
    joined: bool = False
    state: ServerState = ServerState.STARTING
    version: PolicyVersion | None = None
    process: ServerProcess | None = None
    starts: int = 0
    incarnation: int = 0  # another number for another process, and for a joined server that was lost and found
    load: int = 0
    busy: int = 0
    updating: bool = False
    ready_by: float = math.inf
    asked: asyncio.Task[bool] | None = None  # whether it is ready, while it starts
    asking: BackOff = field(default_factory=lambda: BackOff(*_ASK_S))
    restarting: BackOff = field(default_factory=lambda: BackOff(*_RESTART_S))
    health: Health = field(default_factory=lambda: Health(math.inf, math.inf))
    ending: asyncio.Task[int] | None = None  # its process is being killed

    @property
    def name(self) -> str:
        return f"rollout server {self.index}"

    @property
    def serving(self) -> bool:
        return self.state is ServerState.SERVING

    @property
    def starting(self) -> bool:
        """It has begun to start, and its deadline for that is not over."""
        return self.state is ServerState.STARTING and time.monotonic() < self.ready_by < math.inf

    @property
    def available(self) -> bool:
        """It answers, so it can be given weights."""
        return self.state is not ServerState.STARTING

    @property
    def order(self) -> tuple[int, int, int]:
        """The least of these is the server to be taken."""
        return self.busy, self.load, self.index

    @property
    def where(self) -> str:
        """Where to look when something is wrong with it."""
        return f"it runs at {self.client.base_url}" if self.joined else f"see {self.log}"

    def answered(self) -> None:
        """It answered a request: it is well."""
        self.health.answered()
