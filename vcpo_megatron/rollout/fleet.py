"""The rollout servers of a run: started, watched, restarted, and chosen for requests; no torch.

    STARTING --answers--> EMPTY --full update--> SERVING
       ^                    ^                       |
       |                    +---update missed-------+
       +------ restart (at most rollout.max_restarts times a server) <-- process ended

Only a SERVING server takes requests: it holds a version that the weight sync gave it, whole. A server that
missed or failed an update, or was restarted, is EMPTY until a full update succeeded.

``Fleet.supervise``  consumes: exit codes, readiness    produces: state changes, FleetError when restarts run out
                     waits for: 50 ms                   unblocked by: time
``Lease.generate``   consumes: a request                produces: its result, whatever server gave it
                     waits for: a serving server, then its answer
                     unblocked by: the weight sync (``loaded``), deadlines

A group of samples holds a ``Lease``: all its requests go to one server, and move together when that one dies.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeVar

from ..transport.child import last_error
from ..types import PolicyVersion
from .client import ServerClient, ServerUnavailable
from .protocol import GENERATE, GenerateResult, SamplingParams

_T = TypeVar("_T")

#: Seconds between two looks at the server processes.
_POLL_S = 0.05
#: How often a request is sent again to a server whose process lives but that cannot be reached.
_RETRIES = 2


class FleetError(RuntimeError):
    """The run cannot go on with its rollout servers; the message is one line for the user."""


class Changes:
    """Wakes everyone who waits for something to change; each then looks at its own condition again.

    Used in one event loop: nothing is missed, because between a look and the wait no other task runs.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        #: Changes so far.
        self.count = 0

    def notify(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float = math.inf) -> None:
        """Return after the next ``notify`` or after ``timeout_s`` seconds."""
        event = self._event
        try:
            await asyncio.wait_for(event.wait(), None if math.isinf(timeout_s) else max(0.0, timeout_s))
        except TimeoutError:
            pass

    async def until(self, look: Callable[[], _T | None], timeout_s: float = math.inf) -> _T:
        """The first result of ``look`` that is not None; TimeoutError after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (found := look()) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError
            await self.wait(deadline - time.monotonic())
        return found


class Process(Protocol):
    """What the fleet needs of a child process (``subprocess.Popen`` has it)."""

    def poll(self) -> int | None: ...


class ServerState(Enum):
    STARTING = "starting"
    EMPTY = "without current weights"
    SERVING = "serving"


@dataclass(eq=False)
class Server:
    """One rollout server.

    ``version`` is what it has loaded whole, None unless it is SERVING. ``load`` counts the trajectories that hold
    a place on it, ``starts`` its processes so far. ``updating`` is set by the weight sync.
    """

    index: int
    client: ServerClient
    log: Path
    state: ServerState = ServerState.STARTING
    version: PolicyVersion | None = None
    process: Process | None = None
    starts: int = 0
    load: int = 0
    updating: bool = False
    ready_by: float = math.inf
    asked: asyncio.Task[bool] | None = None  # whether it is ready, while it starts

    @property
    def name(self) -> str:
        return f"rollout server {self.index}"

    @property
    def serving(self) -> bool:
        return self.state is ServerState.SERVING

    @property
    def available(self) -> bool:
        """It answers, so it can be given weights."""
        return self.state is not ServerState.STARTING


@dataclass(frozen=True)
class FleetOptions:
    """``capacity``: trajectories in flight on one server; times in seconds."""

    capacity: int
    max_restarts: int
    start_timeout_s: float
    takeover_timeout_s: float


@dataclass(eq=False)
class Lease:
    """Places of one group (or one evaluation) on a server, one place a trajectory.

    ``version`` is the number of the version that the server had loaded when the lease was given: what admission
    counted with. No request of the lease goes to an older one, nor to a server outside ``among``.
    """

    fleet: Fleet
    server: Server
    places: int
    among: Sequence[Server]
    version: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.server.version is not None
        self.version = self.server.version.number
        self.server.load += self.places

    def release(self, places: int = 1) -> None:
        """Give ``places`` back; the trajectories that held them have ended."""
        self.places -= places
        self.server.load -= places
        self.fleet.changes.notify()

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        """Answer of the lease's server; when that one dies the request is run again where the lease moves to.

        ServerUnavailable after repeated failures of a server that lives, or when no server took over in time;
        ServerError when the request was refused.
        """
        failures = 0
        while True:
            server = await self._place()
            try:
                return await server.client.generate(input_ids, sampling, rid)
            except ServerUnavailable:
                if self.fleet.check(server):
                    failures += 1
                    if failures > _RETRIES:
                        raise
                    await asyncio.sleep(0.1 * failures)

    async def _place(self) -> Server:
        """The server of this lease, after moving to another one if it does not serve."""
        timeout_s = self.fleet.options.takeover_timeout_s

        def serving() -> Server | None:
            if self.server.serving:
                return self.server
            others = [s for s in self.among if s.version is not None and s.version.number >= self.version]
            return min(others, key=lambda s: (s.load, s.index)) if others else None

        try:
            server = await self.fleet.changes.until(serving, timeout_s)
        except TimeoutError:
            reason = f"no rollout server took over from {self.server.name} within {timeout_s:g} s"
            raise ServerUnavailable(self.server.client.base_url, GENERATE, reason) from None
        if server is not self.server:
            self.server.load -= self.places
            server.load += self.places
            self.server = server
        return server


class Fleet:
    """All servers of the run. ``launch(index)`` starts a server's process, ``stop(process)`` ends it."""

    def __init__(
        self,
        servers: Sequence[Server],
        options: FleetOptions,
        *,
        launch: Callable[[int], Process],
        stop: Callable[[Process], int],
        changes: Changes,
    ) -> None:
        self.servers = tuple(servers)
        self.options = options
        self.changes = changes
        self._launch = launch
        self._stop = stop
        self._stopping = False

    # --- life of the processes ----------------------------------------------------------------

    def launch(self) -> None:
        """Start every server's process. Called from the main thread: children die with the thread."""
        for server in self.servers:
            self._start(server)

    async def answering(self) -> None:
        """Wait until every server answers; ``supervise``, running beside, ends this wait when one does not."""
        await self.changes.until(lambda: all(server.available for server in self.servers) or None)

    async def supervise(self) -> None:
        """Restart servers that die until cancelled; FleetError when one may not be restarted, or does not answer."""
        try:
            while True:
                self._look()
                await asyncio.sleep(_POLL_S)
        finally:
            for server in self.servers:
                self._forget_question(server)

    async def stop(self) -> None:
        """End all servers; returns when every process is gone."""
        self._stopping = True
        processes = [server.process for server in self.servers if server.process is not None]
        await asyncio.gather(*(asyncio.to_thread(self._stop, process) for process in processes))
        await asyncio.gather(*(server.client.close() for server in self.servers))

    async def replace(self, server: Server) -> None:
        """Kill a server that lives but no longer does its work; ``supervise`` treats it as dead."""
        self.missed(server)
        if server.process is not None:
            await asyncio.to_thread(self._stop, server.process)

    def check(self, server: Server) -> bool:
        """Whether the server's process lives. Called when it cannot be reached, ahead of the next look."""
        alive = server.process is not None and server.process.poll() is None
        if not alive and server.serving:
            self.missed(server)
        return alive

    def _look(self) -> None:
        for server in self.servers:
            code = server.process.poll() if server.process is not None else None
            if code is not None and not self._stopping:
                self._died(server, code)
            elif server.state is ServerState.STARTING:
                self._look_at_start(server)

    def _look_at_start(self, server: Server) -> None:
        """Never waits for an answer: a server that hangs must not keep the others, or its deadline, from being seen."""
        if server.asked is None:
            server.asked = asyncio.create_task(server.client.ready())
        ready = server.asked.result() if server.asked.done() else None
        if ready is not None:
            server.asked = None
        if ready:
            self._set(server, ServerState.EMPTY)
        elif time.monotonic() > server.ready_by:
            raise FleetError(
                f"{server.name} did not answer within {self.options.start_timeout_s:g} s of its start, see "
                f"{server.log}; rollout.start_timeout_s sets this deadline"
            )

    @staticmethod
    def _forget_question(server: Server) -> None:
        if server.asked is not None:
            server.asked.cancel()
            server.asked = None

    def _start(self, server: Server) -> None:
        self._forget_question(server)
        server.starts += 1
        server.process = self._launch(server.index)
        server.ready_by = time.monotonic() + self.options.start_timeout_s
        self._set(server, ServerState.STARTING)

    def _died(self, server: Server, code: int) -> None:
        """Restart a dead server, or FleetError."""
        self.missed(server)
        if server.starts > self.options.max_restarts:
            raise FleetError(
                f"{server.name} died ({_exit(code, server.log)}), see {server.log}; "
                f"rollout.max_restarts is {self.options.max_restarts}"
            )
        print(f"{server.name} died ({_exit(code, server.log)}): restart {server.starts} of "
              f"{self.options.max_restarts}", flush=True)  # fmt: skip
        self._start(server)

    # --- weights ------------------------------------------------------------------------------

    def loaded(self, server: Server, version: PolicyVersion) -> None:
        """The server holds ``version``, whole: it serves."""
        server.version = version
        self._set(server, ServerState.SERVING)

    def missed(self, server: Server) -> None:
        """The server's weights are not a known version any more: no request until a full update."""
        if server.state is ServerState.SERVING:
            server.version = None
            self._set(server, ServerState.EMPTY)

    def _set(self, server: Server, state: ServerState) -> None:
        server.state = state
        if state is not ServerState.SERVING:
            server.version = None
        self.changes.notify()

    # --- routing ------------------------------------------------------------------------------

    def lease(
        self, places: int, *, among: Sequence[Server] | None = None, allowed: Callable[[int], bool] = lambda v: True
    ) -> Lease | None:
        """``places`` on the least loaded serving server of ``among`` (default: all) with room for them and with
        ``allowed(number of its version)``, or None when there is no such server now.

        A group larger than a whole server's capacity goes to an idle one: the server queues what it cannot run.
        """
        servers = self.servers if among is None else tuple(among)
        room = [
            s for s in servers
            if s.version is not None and allowed(s.version.number)
            and (s.load + places <= self.options.capacity or s.load == 0)
        ]  # fmt: skip
        return Lease(self, min(room, key=lambda s: (s.load, s.index)), places, servers) if room else None

    def describe(self) -> str:
        """One phrase a server, for the watchdog."""
        return "; ".join(
            f"{s.name} {s.state.value}{' (updating)' if s.updating else ''}, version {s.version}, "
            f"{s.load} trajectories"
            for s in self.servers
        )  # fmt: skip


def _exit(code: int, log: Path) -> str:
    error = last_error(log) if code > 0 else None
    return f"exit code {code}: {error}" if error else f"exit code {code}"

