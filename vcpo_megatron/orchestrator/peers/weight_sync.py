"""Weights from the learner to the rollout servers: which server needs which version, and whose turn it is.

    learner --WeightsReady--> offer --> newest --+                   +--> wave: pause ... continue --> fleet.loaded
                               |                 +--> target(server) +--> wave ...
                               +--> held --------+
                              (an evaluation is due at this version)

``offer``              consumes: WeightsReady           produces: the newest weights; those held for evaluation, if due
``run``                consumes: servers' targets       produces: ``fleet.loaded``, which wakes admission
                       waits for: a target that a server does not hold, and its turn
                       unblocked by: offer, end_evaluation, a restart (the server is EMPTY), the end of a wave
``evaluation_loaded``  waits for: the evaluating servers at the version held for them    unblocked by: ``run``

Updates roll: at most ``wave`` servers are paused at a time, those without a version first, then the oldest; all at
once while none serves. Every server has a version of its own, and skips versions that came while others were updated.
An evaluating server's target stays the version held for evaluation until ``end_evaluation``: its updates are deferred,
not missed. A refused update is tried once more, whole; then the run ends. A server that does not take an update within
``rollout.sync_timeout_s`` is replaced if it may be restarted, else the run ends. Of a wave that shares what is sent it
is not known for certain who failed: its servers are then updated again, one by one, unless all but one had answered
when time ran out. A server that NCCL left in a broadcast which was given up (``Transport.strands``) is replaced in any
case.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ...rollout.client.http import ServerUnavailable
from ...rollout.fleet.fleet import Fleet
from ...rollout.fleet.server import Server
from ...run.tasks import cancel
from ...transport.messages import WeightsReady
from ...types import PolicyVersion
from ...weight_sync.orchestrator import Updater
from ...weight_sync.wave import Wave, WaveFailed
from .probe import Prober

#: Seconds between the end of a killed server's connections and its exit, which can be seen only then.
_EXIT_S = 1.0


class SyncError(RuntimeError):
    """A server does not take new weights; the message is one line for the user."""


class WeightSync:
    """``evaluators`` are the servers whose updates wait while a version is held for evaluation;
    ``evaluation_due(number)`` says which versions are. ``prober`` finds out whether a server that took weights computes
    with them; its requests wait for nothing meanwhile, their answers do."""

    def __init__(
        self,
        fleet: Fleet,
        updater: Updater,
        *,
        wave: int,
        timeout_s: float,
        evaluators: Sequence[Server] = (),
        evaluation_due: Callable[[int], bool] = lambda number: False,
        prober: Prober | None = None,
    ) -> None:
        self._fleet = fleet
        self._prober = prober
        self._updater = updater
        self._wave = wave
        self._timeout_s = timeout_s
        self.evaluators = tuple(evaluators)
        self._evaluation_due = evaluation_due
        self._newest: WeightsReady | None = None
        self._for_evaluation: WeightsReady | None = None
        self._offered: dict[PolicyVersion, WeightsReady] = {}  # and not released
        self._waves: dict[asyncio.Task[None], Wave[Server] | None] = {}  # None: a release
        self._one_by_one: set[Server] = set()
        self._lost_senders = 0  # failures of the learner's in a row that left servers in a broadcast
        self._refusals: dict[tuple[Server, int], int] = {}  # by server and incarnation
        self._seconds = 0.0

    # --- what is to be loaded -----------------------------------------------------------------

    def offer(self, weights: WeightsReady) -> None:
        """Take over the learner's newest weights; the ones before are forgotten unless they are held for evaluation."""
        self._newest = self._offered[weights.version] = weights
        if self._evaluation_due(weights.version.number):
            if (held := self._for_evaluation) is not None:
                raise SyncError(
                    f"an evaluation is due at version {weights.version} while that of {held.version} still runs"
                )
            self._for_evaluation = weights
        self._fleet.changes.notify()

    def end_evaluation(self) -> None:
        """No version is held for evaluation any more: its servers catch up with the newest one."""
        self._for_evaluation = None
        self._fleet.changes.notify()

    def _target(self, server: Server) -> WeightsReady | None:
        held = self._for_evaluation
        return held if held is not None and server in self.evaluators else self._newest

    @property
    def newest(self) -> PolicyVersion | None:
        return self._newest.version if self._newest else None

    # --- waiting ------------------------------------------------------------------------------

    async def evaluation_loaded(self, version: int) -> None:
        """Wait until every evaluating server holds ``version``, which is held for them. Updates and restarts end by
        themselves, or end the run, within their own deadlines."""

        def look() -> bool | None:
            held = self._for_evaluation
            if held is None or held.version.number != version:
                return None
            return all(server.version == held.version for server in self.evaluators) or None

        await self._fleet.changes.until(look)

    async def all_loaded(self, version: int) -> None:
        """Wait until every server holds version ``version``, and it is known that it does; bounded as
        ``evaluation_loaded`` is."""

        def look() -> bool | None:
            held = [server.version for server in self._fleet.servers if server.vouched]
            return (
                len(held) == len(self._fleet.servers)
                and all(loaded is not None and loaded.number == version for loaded in held)
            ) or None

        await self._fleet.changes.until(look)

    def take_metrics(self) -> dict[str, float]:
        """Seconds of the longest update since the last call, 0.0 when there was none, and how many were verified."""
        found, self._seconds = {"time/sync": self._seconds}, 0.0
        if (verifier := self._updater.verifier) is not None:
            found["sync/verified"], verifier.verified = verifier.verified, 0
        return found

    # --- whose turn it is ---------------------------------------------------------------------

    async def run(self) -> None:
        """Keep every server at its target until cancelled; SyncError when one cannot be."""
        try:
            while True:
                for task in [task for task in self._waves if task.done()]:
                    del self._waves[task]
                    task.result()
                if (wave := self._next_wave()) is not None:
                    for server in wave.servers:
                        server.updating = True
                    self._start(self._update(wave), wave)
                elif (old := self._unused()) is not None:
                    self._start(self._updater.transport(old).release(old), None)
                else:
                    await self._fleet.changes.wait()
        finally:
            await cancel(*self._waves)
            await self._updater.leave([server for server in self._fleet.servers if server.joined])

    def _start(self, work: Coroutine[Any, Any, None], wave: Wave[Server] | None) -> None:
        task = asyncio.ensure_future(work)
        self._waves[task] = wave
        task.add_done_callback(lambda _: self._fleet.changes.notify())

    def _unused(self) -> WeightsReady | None:
        """Weights, no longer held, that nobody will be given any more."""
        used = {wave.weights.version for wave in self._waves.values() if wave is not None}
        used |= {weights.version for weights in (self._newest, self._for_evaluation) if weights is not None}
        version = next((version for version in self._offered if version not in used), None)
        return None if version is None else self._offered.pop(version)

    def _next_wave(self) -> Wave[Server] | None:
        servers = self._fleet.servers
        due = [(server, target) for server in servers if (target := self._due(server)) is not None]
        if not due:
            return None
        due.sort(key=lambda pair: (_age(pair[0]), pair[0].index))
        rolls = any(server.serving for server in servers)
        busy = sum(server.updating for server in servers)
        if busy >= (self._wave if rolls else len(servers)):
            return None
        first, target = due[0]
        if not self._updater.transport(target).together:
            return Wave([first], target)
        if busy:  # the learner sends to one wave at a time
            return None
        if first in self._one_by_one:
            return Wave([first], target)
        chosen = [server for server, wanted in due if wanted is target and server not in self._one_by_one]
        if rolls:  # the same servers together every time, so that their group is used again
            chosen = [server for server in chosen if server.index // self._wave == first.index // self._wave]
        return Wave(sorted(chosen, key=lambda server: server.index), target)

    def _due(self, server: Server) -> WeightsReady | None:
        """What ``server`` is to be given now, if anything."""
        target = self._target(server)
        if target is None or not server.available or server.updating or server.version == target.version:
            return None
        return target if self._fleet.check(server, server.incarnation) else None

    # --- one wave -----------------------------------------------------------------------------

    async def _update(self, wave: Wave[Server]) -> None:
        started = time.monotonic()
        for server in wave.servers:
            server.give(wave.weights.version)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._updater.run(wave)
        except WaveFailed as failure:
            await self._failed(wave, failure.cause, by_learner=failure.server is None)
        except TimeoutError as error:
            await self._failed(wave, error)
        else:
            self._seconds = max(self._seconds, time.monotonic() - started)
            self._lost_senders = 0
            for server, incarnation in zip(wave.servers, wave.incarnations, strict=True):
                self._refusals.pop((server, incarnation), None)
                self._one_by_one.discard(server)
                if server.incarnation == incarnation:
                    question = None if self._prober is None else self._prober.question(server, wave.weights)
                    self._fleet.loaded(server, wave.weights.version, question)
        finally:
            for server in wave.servers:
                server.updating = False
            self._miss_suspects()

    def _miss_suspects(self) -> None:
        """Servers that hold other weights than one that was verified later get theirs again."""
        if self._updater.verifier is None:
            return
        suspects = self._updater.verifier.take_suspects()
        for server in self._fleet.servers:
            if server.name in suspects and not server.updating:
                print(f"{server.name} may hold wrong weights: it gets them again", flush=True)
                self._fleet.missed(server)

    async def _failed(self, wave: Wave[Server], error: Exception, *, by_learner: bool = False) -> None:
        """The wave's servers hold no known version. Which of them failed is known when there is only one, or when time
        ran out for only one."""
        for server in wave.servers:
            self._fleet.missed(server)
        await self._replace_stranded(wave, error, by_learner=by_learner)
        version = wave.weights.version
        late = wave.waits_for if isinstance(error, TimeoutError) else set()
        if len(wave.servers) > 1 and len(late) != 1:
            self._one_by_one |= set(wave.servers)
            names = ", ".join(server.name for server in wave.servers)
            print(f"weights {version} did not reach {names} ({_why(wave, error)}); trying them one by one", flush=True)
            return
        server = next(iter(late), wave.servers[0])
        incarnation = wave.incarnations[wave.servers.index(server)]
        exit_s = _EXIT_S if isinstance(error, ServerUnavailable) else 0.0
        if await self._has_died(server, incarnation, exit_s):
            return  # supervision restarts it, or has done so, or ends the run by the name of its exit
        if isinstance(error, ServerUnavailable | TimeoutError):
            await self._unreachable(server, wave, error)
            return
        refusals = self._refusals[server, incarnation] = self._refusals.get((server, incarnation), 0) + 1
        what = f"{server.name} refused weights {version}"
        if by_learner:
            what = f"weights {version} did not reach {server.name}"
        if refusals > 1:
            raise SyncError(f"{what} twice: {error}" + ("" if by_learner else f", {server.where}")) from error
        print(f"{what} ({error}); trying once more", flush=True)

    async def _replace_stranded(self, wave: Wave[Server], error: Exception, *, by_learner: bool) -> None:
        """Servers that wait in a broadcast which nobody will end, and which they do not notice, are of no use."""
        if not self._updater.transport(wave.weights).strands or not wave.receiving:
            return
        stranded = sorted(wave.receiving, key=lambda server: server.index)
        names = ", ".join(server.name for server in stranded)
        self._lost_senders += by_learner
        if self._lost_senders > 1:
            raise SyncError(f"weights {wave.weights.version} did not reach {names} twice: {error}") from error
        print(f"{names}: left in a broadcast that was given up ({_why(wave, error)}); to be replaced", flush=True)
        incarnations = dict(zip(wave.servers, wave.incarnations, strict=True))
        alive = [server for server in stranded if self._fleet.check(server, incarnations[server])]
        await asyncio.gather(*(self._unreachable(server, wave, error) for server in alive))

    async def _has_died(self, server: Server, incarnation: int, within_s: float) -> bool:
        """Whether its process has ended, or does within ``within_s``."""
        deadline = time.monotonic() + within_s
        while self._fleet.check(server, incarnation):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _unreachable(self, server: Server, wave: Wave[Server], error: Exception) -> None:
        """The server lives and does not answer: it is replaced if that is allowed."""
        if server.starts > self._fleet.options.max_restarts:
            limit = f"within {self._timeout_s:g} s (rollout.sync_timeout_s) in step: {wave.at}"
            raise SyncError(
                f"{server.name} did not take weights {wave.weights.version} "
                f"{limit if isinstance(error, TimeoutError) else f'({error})'}, {server.where}; "
                f"rollout.max_restarts is {self._fleet.options.max_restarts}"
            ) from error
        await self._fleet.replace(server)


def _age(server: Server) -> int:
    """Number of the version, -1 without one: lower is more urgent."""
    return -1 if server.version is None else server.version.number


def _why(wave: Wave[Server], error: Exception) -> str:
    return f"out of time in step: {wave.at}" if isinstance(error, TimeoutError) else str(error)
