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
from .trust import Asked, Held

#: Pauses between questions whether a server is ready, and before further starts of one that dies as it starts.
_ASK_S = (0.05, 1.0)
_RESTART_S = (1.0, 30.0)
#: Versions that a request may have been sent before: more than any request lasts.
_REMEMBERED = 1000
#: Answers in a row that make up for a doubt. One address with two servers behind it never has so many.
TRUSTED_AFTER = 100


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

    ``given`` are the versions that it was sent, the newest last, and ``loads`` counts those that it took whole; with
    ``version`` they are the book that its answers are held against. ``doubts`` counts the loads after which it said
    something else, since it was last believed ``TRUSTED_AFTER`` times in a row.
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
    given: dict[PolicyVersion, None] = field(default_factory=dict)
    loads: int = 0
    doubts: int = 0
    believed: int = 0  # answers since the last doubt
    vouching: Asked | None = None  # whether it computes with the weights that it took last
    softmax: Asked | None = None  # whether its log-probs are those of a softmax

    @property
    def name(self) -> str:
        return f"rollout server {self.index}"

    @property
    def serving(self) -> bool:
        return self.state is ServerState.SERVING

    @property
    def idle(self) -> bool:
        """It takes no requests and has none in flight: it may be asked to do something without a pause."""
        return not self.serving and self.busy == 0

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

    @property
    def held(self) -> Held:
        """What it holds now; it has to be SERVING."""
        assert self.version is not None
        return Held(self.version, self.loads)

    @property
    def vouched(self) -> bool:
        """Nothing is being found out about its weights."""
        return self.vouching is None or self.vouching.done()

    def answered(self) -> None:
        """It answered a request as it should: it is well."""
        self.health.answered()
        self.believed += 1
        if self.believed >= TRUSTED_AFTER:
            self.doubts = 0

    def doubted(self) -> None:
        """It said something that cannot be, after its last load."""
        self.doubts += 1
        self.believed = 0

    def give(self, version: PolicyVersion) -> None:
        """``version`` is on its way to the server, which may name it from now on."""
        self.given.pop(version, None)
        self.given[version] = None
        while len(self.given) > _REMEMBERED:
            del self.given[next(iter(self.given))]
