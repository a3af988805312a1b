"""The rollout servers of a run: started or joined, watched, restarted, and chosen for requests; no torch.

    STARTING --answers, can what training needs--> EMPTY --full update--> SERVING
       ^                                             ^                       |
       |                                             +---update missed, -----+
       |                                                 other weights found
       +-- restart (at most rollout.max_restarts times a server) <-- process ended, or hung and was killed
       +-- a joined server cannot be reached

Only a SERVING server takes requests: it holds a version that the weight sync gave it, whole. A server that
missed or failed an update, or was restarted, is EMPTY until a full update succeeded. A SERVING server that has
answered nothing for a while is asked whether it is well (``health``); one that does not say so in time, twice, is
killed, and a joined one is left alone until it answers again.

``Fleet.supervise``  consumes: exit codes, readiness    produces: state changes, FleetError when restarts run out
                     waits for: 50 ms                   unblocked by: time
``Lease.generate``   consumes: a request                produces: its result, whatever server gave it
  (lease.py)         waits for: a serving server, then its answer
                     unblocked by: the weight sync (``loaded``), deadlines

A group of samples holds a ``Lease``: all its requests go to one server, whose cache then holds their prompt, and move
together when that one dies. The least busy server is taken, by its requests in flight.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.process import NOTE_PREFIX
from ...run.notifier import Notifier
from ...transport.child import last_error
from ...types import PolicyVersion
from ..client.http import ServerError, ServerUnavailable
from ..client.protocol import GenerateResult, SamplingParams
from ..client.replies import UnsupportedServer
from .health import Health
from .lease import Lease
from .router import Router
from .server import Server, ServerProcess, ServerState
from .trust import Asked, Doubt, Held, Question, ask_again, ended_in_doubt, is_certain, label_doubt, logprobs_doubt

#: Seconds between two looks at the server processes.
_POLL_S = 0.05
#: A server whose word was doubted after so many loads is given up: it was updated in full, and asked again, in between.
MOST_DOUBTS = 3
#: Trajectories that hold a place on a server, for each that it can decode: those that wait for their environments
#: leave room for others, which must not be too many when all come back.
_PLACES = 2


class FleetError(RuntimeError):
    """The run cannot go on with its rollout servers; the message is one line for the user."""


@dataclass(frozen=True)
class FleetOptions:
    """``capacity``: requests in flight on one server; times in seconds, those of ``health`` by rollout.health_*."""

    capacity: int
    max_restarts: int
    start_timeout_s: float
    takeover_timeout_s: float
    health_interval_s: float = math.inf
    health_timeout_s: float = math.inf


class Fleet:
    """All servers of the run. ``launch(index)`` starts a server's process, ``stop(process)`` ends it. ``router``: what
    requests go through, if anything."""

    def __init__(
        self,
        servers: Sequence[Server],
        options: FleetOptions,
        *,
        launch: Callable[[int], ServerProcess],
        stop: Callable[[ServerProcess], int],
        changes: Notifier,
        router: Router | None = None,
    ) -> None:
        self.servers = tuple(servers)
        self.router = router
        self.options = options
        self.changes = changes
        self._launch = launch
        self._stop = stop
        self._stopping = False
        self._complete = False  # all servers have answered once
        self._fault: str | None = None  # found beside ``supervise``, which raises it
        for server in self.servers:
            server.health = Health(options.health_interval_s, options.health_timeout_s)

    # --- processes ----------------------------------------------------------------------------

    def launch(self) -> None:
        """Start every server's process. Called from the main thread: children die with the thread."""
        for server in self.servers:
            self._start(server)

    async def answering(self) -> None:
        """Wait until every server answers, and the router; ``supervise``, running beside, ends this wait when one does
        not."""

        def look() -> bool | None:
            known = self.router is None or self.router.members is not None
            return (known and all(server.available for server in self.servers)) or None

        await self.changes.until(look)
        self._complete = True

    async def supervise(self) -> None:
        """Restart servers that die or hang until cancelled; FleetError when one may not be restarted, does not answer,
        or cannot do what training needs."""
        try:
            while True:
                if self._fault is not None:
                    raise FleetError(self._fault)
                for server in self.servers:
                    self._look(server)
                self._look_at_router()
                await asyncio.sleep(_POLL_S)
        finally:
            for server in self.servers:
                self._forget_questions(server)
            if self.router is not None:
                self.router.forget()

    async def stop(self) -> None:
        """End all servers that were started here; returns when every process is gone."""
        self._stopping = True
        await asyncio.gather(*(server.ending for server in self.servers if server.ending is not None))
        processes = [server.process for server in self.servers if server.process is not None]
        await asyncio.gather(*(asyncio.to_thread(self._stop, process) for process in processes))
        await asyncio.gather(*(server.client.close() for server in self.servers))
        if self.router is not None:
            await self.router.client.close()

    async def replace(self, server: Server) -> None:
        """Kill a server that lives but no longer does its work; ``supervise`` treats it as dead. A joined one is left
        alone until it answers again."""
        self.missed(server)
        if server.joined:
            self._lost(server)
        elif server.process is not None:
            await asyncio.to_thread(self._stop, server.process)

    def unreachable(self, server: Server, incarnation: int) -> bool:
        """The server, in its ``incarnation``, did not answer: whether it is alive, so that asking again makes sense. A
        joined one has no process to look at: it counts as lost, and must answer, and get all weights, before it serves
        again."""
        if server.joined and server.incarnation == incarnation:
            self._lost(server)
        return self.check(server, incarnation)

    def check(self, server: Server, incarnation: int) -> bool:
        """Whether the server is alive in its ``incarnation``, as far as it is known, ahead of the next look. What was
        asked of an earlier one, and failed, says nothing of the process that is there now."""
        if server.incarnation != incarnation:
            return False
        if server.joined:
            return server.available
        alive = server.process is not None and server.process.poll() is None
        if not alive and server.serving:
            self.missed(server)
        return alive

    def _look(self, server: Server) -> None:
        """Never waits for an answer: a server that hangs must not keep the others, or its deadline, from being seen."""
        code = server.process.poll() if server.process is not None else None
        if code is not None:
            if not self._stopping:
                self._died(server, code)
        elif server.ending is not None:
            self._look_at_end(server, server.ending)
        elif server.state is ServerState.STARTING:
            self._look_at_start(server)
        elif server.serving and not server.updating:
            self._look_at_health(server)
        else:  # the weight sync talks to it, with deadlines of its own
            server.health.forget()

    def _look_at_router(self) -> None:
        if self.router is None:
            return
        try:
            changed = self.router.look([server.client.base_url for server in self.servers if server.serving])
        except UnsupportedServer as error:
            raise FleetError(str(error)) from error
        if changed:
            self.changes.notify()

    def ask_all(self) -> None:
        """Some server, it is not known which, has not the weights that it was given: all are in an unknown state."""
        for server in self.servers:
            server.health.ask_now()

    def _look_at_start(self, server: Server) -> None:
        if server.process is None and not server.joined:
            if server.restarting.due:
                server.restarting.wait()
                self._start(server)
            return
        if server.asked is None and server.asking.due:
            server.asked = asyncio.create_task(_begin(server))
        if server.asked is not None and server.asked.done():
            asked, server.asked = server.asked, None
            try:
                ready = asked.result()
            except UnsupportedServer as error:
                raise FleetError(f"{server.name}: {error}") from error
            if ready:
                self._set(server, ServerState.EMPTY)
                return
            server.asking.wait()
        if time.monotonic() > server.ready_by:
            self._late(server)

    def _late(self, server: Server) -> None:
        """It did not answer in time. A run that has begun goes on without a joined one while others serve."""
        server.ready_by = math.inf
        problem = f"{server.name} did not answer within {self.options.start_timeout_s:g} s"
        if not server.joined:
            raise FleetError(f"{problem} of its start, {server.where}; rollout.start_timeout_s sets this deadline")
        if not self._complete:
            raise FleetError(f"{problem}; {server.where}; leave it out of rollout.addresses, or start it")
        if not any(other.available for other in self.servers):
            raise FleetError(f"{problem}, and no other does; {server.where}")
        print(f"{problem}; {server.where}; the run goes on without it until it answers", flush=True)

    def _look_at_health(self, server: Server) -> None:
        held = server.held
        found = server.health.look(server.client, held.version)
        if found is not None and (doubt := label_doubt(found, held.version)) is not None:
            self.doubt(server, held, doubt)
        elif server.health.hangs:
            print(f"{server.name} {server.health.fault} ({server.health.reason}): it is given up", flush=True)
            server.health.forget()
            if server.joined:
                self._lost(server)
            else:
                self._kill(server)

    def _kill(self, server: Server) -> None:
        """End its process, without waiting for that; it gets neither requests nor weights meanwhile."""
        if server.process is not None:
            server.ending = asyncio.create_task(asyncio.to_thread(self._stop, server.process))
            self._set(server, ServerState.STARTING)

    @staticmethod
    def _look_at_end(server: Server, ending: asyncio.Task[int]) -> None:
        """It is being killed; its exit is seen as any other."""
        if ending.done() and (error := ending.exception()) is not None:
            raise FleetError(f"{server.name} hangs and cannot be killed: {error}, {server.where}")

    def _forget_questions(self, server: Server) -> None:
        server.health.forget()
        _cancel(server.asked, server.vouching, server.softmax)
        server.asked = None

    def _start(self, server: Server) -> None:
        self._forget_questions(server)
        if not server.joined:
            server.starts += 1
            server.process = self._launch(server.index)
        self._await_start(server)

    def _await_start(self, server: Server) -> None:
        server.incarnation += 1
        server.doubts = 0
        server.ready_by = time.monotonic() + self.options.start_timeout_s
        server.asking.reset()
        self._set(server, ServerState.STARTING)

    def _lost(self, server: Server) -> None:
        """A joined server cannot be reached: wait until it answers."""
        if server.available:
            print(f"{server.name} cannot be reached, {server.where}; it gets no requests until it answers", flush=True)
            self._await_start(server)

    def _died(self, server: Server, code: int) -> None:
        """Restart a dead server, after a while if it died before it ever served, or FleetError."""
        self._forget_questions(server)
        server.ending = None
        if server.starts > self.options.max_restarts:
            self.missed(server)
            raise FleetError(
                f"{server.name} died ({_exit(code, server.log)}), see {server.log}; "
                f"rollout.max_restarts is {self.options.max_restarts}"
            )
        print(
            f"{server.name} died ({_exit(code, server.log)}): restart {server.starts} of {self.options.max_restarts}",
            flush=True,
        )
        if server.process is not None:
            self._stop(server.process)  # what it left in its process group: a scheduler may still hold the GPU
        server.process = None
        self._set(server, ServerState.STARTING)

    # --- weights ------------------------------------------------------------------------------

    def loaded(self, server: Server, version: PolicyVersion, vouch: Question | None = None) -> None:
        """The server has taken ``version``, whole: it serves, unless it was lost since. What it samples is believed
        once ``vouch``, if given, has found that it computes with those weights."""
        if not server.available:
            return
        server.give(version)
        server.loads += 1
        _cancel(server.vouching, server.softmax)
        server.vouching = server.softmax = None
        server.version = version
        if vouch is not None:
            server.vouching = self._ask(server, server.held, vouch)
        server.client.cache_key = str(version)
        server.restarting.reset()
        server.health.forget()
        self._set(server, ServerState.SERVING)

    def missed(self, server: Server) -> None:
        """The server's weights are not a known version any more: no request until a full update."""
        if server.state is ServerState.SERVING:
            server.version = None
            self._set(server, ServerState.EMPTY)

    def _ask(self, server: Server, held: Held, question: Question) -> Asked:
        """A question about what the server computes; its answer, if that is a doubt, is acted on."""

        async def ask() -> Doubt | None:
            if (doubt := await ask_again(question)) is not None:
                self.doubt(server, held, doubt)
            return doubt

        task = asyncio.create_task(ask())
        task.add_done_callback(lambda _: self.changes.notify())
        return task

    def doubt(self, server: Server, held: Held, doubt: Doubt) -> None:
        """The server, asked when it ``held`` that, said what cannot be. It counts as having missed its update: it gets
        the weights again, in full, before it is asked anything. After ``MOST_DOUBTS`` it is given up: killed, where it
        may be restarted, else the run ends. Where it names another run's weights the run ends at once: two runs on one
        server cannot keep their updates apart.

        What was asked before its present load says nothing of it.
        """
        if doubt.other_run is not None:
            self.refuse_run(f"{server.name} at {server.client.base_url}", doubt.reason, doubt.other_run)
        if self._fault is not None:  # the run is about to end
            return self.missed(server)
        if held.load != server.loads or not server.serving:
            return
        server.doubted()
        if server.doubts < MOST_DOUBTS:
            print(f"{server.name} {doubt.reason}; it gets its weights again, in full", flush=True)
            self.missed(server)
            return
        problem = f"{server.name} {doubt.reason}, after {server.doubts} full updates; {server.where}"
        if server.joined:
            self._fault = f"{problem}; leave it out of rollout.addresses, or restart it"
            self.missed(server)
        elif server.starts > self.options.max_restarts:
            self._fault = f"{problem}; rollout.max_restarts is {self.options.max_restarts}"
            self.missed(server)
        else:
            print(f"{problem}: it is given up", flush=True)
            self._kill(server)

    def refuse_run(self, who: str, reason: str, run: str) -> None:
        """End the run: a server answers another one."""
        self._fault = self._fault or (
            f"{who} {reason}: run {run} uses it, too; give each run servers of its own (rollout.addresses), and resume "
            "this one"
        )

    async def believes(
        self, server: Server, held: Held, answers: Sequence[GenerateResult], samplings: Sequence[SamplingParams]
    ) -> bool:
        """Whether ``answers`` of the server, which ``held`` that when it was asked, may be used; else it is doubted,
        and they are to be asked for again. Waits until it is known with which weights the server computes."""
        incarnation = server.incarnation
        for label in sorted({span.version for answer in answers for span in answer.spans}):
            if (doubt := label_doubt(label, held.version, server.given)) is not None:
                self.doubt(server, held, doubt)
                return False
        if await ended_in_doubt(lambda: server.vouching):
            return False
        if any(map(is_certain, answers, samplings)):
            if server.softmax is None and server.serving:
                server.softmax = self._ask(server, server.held, lambda: logprobs_doubt(server.client))
            if server.softmax is None or await ended_in_doubt(lambda: server.softmax):
                return False
        if server.incarnation == incarnation:
            server.answered()
        return self._fault is None

    async def routed_doubt(self, held: PolicyVersion, answer: GenerateResult) -> Doubt | None:
        """Why an answer that came through the router cannot be used, asked for by a group that was admitted when every
        server ``held`` that at least; all servers are then asked what they have. Any may have given it, so it waits
        until it is known of each with which weights it computes."""
        doubt = next(
            (found for span in answer.spans if (found := label_doubt(span.version, held, _Given(self.servers)))), None
        )
        for server in [server for server in self.servers if not server.vouched]:
            if await ended_in_doubt(lambda server=server: server.vouching):  # type: ignore[misc]
                doubt = doubt or Doubt("may not compute with the weights that it was given")
        if doubt is not None:
            self.ask_all()
            if doubt.other_run is not None:
                self.refuse_run("a server behind rollout.router", doubt.reason, doubt.other_run)
        return doubt

    def _set(self, server: Server, state: ServerState) -> None:
        server.state = state
        if state is not ServerState.SERVING:
            server.version = None
        self.changes.notify()

    # --- routing ------------------------------------------------------------------------------

    def lease(
        self, places: int, *, among: Sequence[Server] | None = None, allowed: Callable[[int], bool] = lambda v: True
    ) -> Lease | None:
        """``places`` on the least busy serving server of ``among`` (default: all) with room for them and with
        ``allowed(number of its version)``, or None when there is no such server now.

        A group larger than a whole server's capacity goes to an idle one: the server queues what it cannot run.

        Behind a router any server may answer, so the oldest version counts, and places are only counted on one.
        ``among`` passes the router by: those servers are asked themselves.
        """
        servers, capacity = self.servers if among is None else tuple(among), self.options.capacity
        router = self.router if among is None else None
        held = [server.version for server in servers if server.version is not None]
        if not held or (router is not None and not router.members):
            return None
        oldest = min(held, key=lambda version: version.number) if router is not None else None
        room = [
            s
            for s in servers
            if s.version is not None
            and allowed((oldest or s.version).number)
            and (s.load == 0 or s.busy + places <= capacity and s.load + places <= _PLACES * capacity)
        ]
        return Lease(self, min(room, key=lambda s: s.order), places, servers, router, oldest) if room else None

    def describe(self) -> str:
        """One phrase a server, for the watchdog."""
        return "; ".join(
            f"{s.name} {s.state.value}{' (updating)' if s.updating else ''}, version {s.version}, "
            f"{s.load} trajectories, {s.busy} of them busy"
            for s in self.servers
        )


async def _begin(server: Server) -> bool:
    """Whether the server is ready; UnsupportedServer when it cannot do what training needs."""
    try:
        if server.joined:  # while it is paused it says that it is not ready
            if (former := await server.client.adopt()) is not None:
                print(f"{NOTE_PREFIX}{server.name} held weights of run {former}, which asks it nothing", flush=True)
        if not await server.client.ready():
            return False
        await server.client.check_capabilities()
    except (ServerError, ServerUnavailable):  # not yet; the deadline of its start bounds this
        return False
    return True


class _Given:
    """The versions that any of ``servers`` was given."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers

    def __contains__(self, version: object) -> bool:
        return any(version in server.given for server in self._servers)


def _cancel(*tasks: asyncio.Task[Any] | None) -> None:
    for task in tasks:
        if task is not None:
            task.cancel()


def _exit(code: int, log: Path) -> str:
    error = last_error(log) if code > 0 else None
    return f"exit code {code}: {error}" if error else f"exit code {code}"
