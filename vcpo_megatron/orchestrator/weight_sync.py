"""Weights from the learner to the rollout servers: one owner, one state machine a server.

    learner --WeightsReady--> offer --> newest --+                   +--> server: pause, begin, buckets,
                               |                 +--> target(server) +     end, continue --> fleet.loaded
                               +--> pinned ------+                   +--> ...
                              (an evaluation is due at this version)

``offer``              consumes: WeightsReady           produces: the newest payload; a pinned one if evaluation is due
``_keep_current``      consumes: a server's target      produces: ``fleet.loaded``, which wakes admission
  (one a server)       waits for: a target that the server does not hold
                       unblocked by: offer, unpin, a restart (the server is EMPTY)
``pinned_loaded``      waits for: the evaluating servers at the pinned version    unblocked by: ``_keep_current``

Servers are updated independently of each other; a slow one skips versions. An evaluating server's target stays
the pinned version until ``unpin``: its updates are deferred, not missed. A refused update is tried once more, whole;
then the run ends. A server that does not take an update within ``rollout.sync_timeout_s`` is replaced if it may be
restarted, else the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from ..rollout.client import ServerClient, ServerError, ServerUnavailable
from ..rollout.fleet import Fleet, Server
from ..rollout.protocol import PauseMode, ProtocolError
from ..transport.control import WeightsReady
from ..types import PolicyVersion
from .tasks import run_all


class SyncError(RuntimeError):
    """A server does not take new weights; the message is one line for the user."""


class WeightSync:
    """``evaluators`` are the servers whose updates wait while an evaluation is pinned to a version;
    ``is_pinned(number)`` says for which versions one is due."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        pause_mode: PauseMode,
        timeout_s: float,
        evaluators: Sequence[Server] = (),
        is_pinned: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._fleet = fleet
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s
        self.evaluators = tuple(evaluators)
        self._is_pinned = is_pinned
        self._newest: WeightsReady | None = None
        self._pinned: WeightsReady | None = None
        self._seconds = 0.0

    # --- what is to be loaded -----------------------------------------------------------------

    def offer(self, weights: WeightsReady) -> None:
        """Take over the learner's newest weights; the ones before are forgotten unless they are pinned."""
        self._newest = weights
        if self._is_pinned(weights.version.number):
            if self._pinned is not None:
                raise SyncError(
                    f"an evaluation is due at version {weights.version} while that of {self._pinned.version} still runs"
                )
            self._pinned = weights
        self._fleet.changes.notify()

    def unpin(self) -> None:
        """The pinned evaluation is done: its servers catch up with the newest version."""
        self._pinned = None
        self._fleet.changes.notify()

    def _target(self, server: Server) -> WeightsReady | None:
        return self._pinned if self._pinned is not None and server in self.evaluators else self._newest

    @property
    def newest(self) -> PolicyVersion | None:
        return self._newest.version if self._newest else None

    # --- waiting ------------------------------------------------------------------------------

    async def pinned_loaded(self, version: int) -> None:
        """Wait until every evaluating server holds the pinned version ``version``. Updates and restarts end by
        themselves, or end the run, within their own deadlines."""

        def look() -> bool | None:
            pinned = self._pinned
            if pinned is None or pinned.version.number != version:
                return None
            return all(server.version == pinned.version for server in self.evaluators) or None

        await self._fleet.changes.until(look)

    async def all_loaded(self, version: int) -> None:
        """Wait until every server holds version ``version``; bounded as ``pinned_loaded`` is."""

        def look() -> bool | None:
            versions = [server.version for server in self._fleet.servers]
            return all(loaded is not None and loaded.number == version for loaded in versions) or None

        await self._fleet.changes.until(look)

    def take_seconds(self) -> float:
        """Seconds of the longest update since the last call, 0.0 when there was none."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    # --- the loops ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep every server at its target until cancelled; SyncError when one cannot be."""
        await run_all(*(self._keep_current(server) for server in self._fleet.servers))

    async def _keep_current(self, server: Server) -> None:
        refusals = 0

        def work() -> WeightsReady | None:
            target = self._target(server)
            if target is None or not server.available or server.version == target.version:
                return None
            return target if self._fleet.check(server) else None

        while True:
            target = await self._fleet.changes.until(work)
            started, process = time.monotonic(), server.process
            server.updating = True
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._push(server.client, target)
            except (ServerError, ProtocolError) as error:
                self._fleet.missed(server)
                refusals += 1
                if refusals > 1:
                    raise SyncError(
                        f"{server.name} refused weights {target.version} twice: {error}, see {server.log}"
                    ) from error
                print(f"{server.name} refused weights {target.version} ({error}); trying once more", flush=True)
            except (ServerUnavailable, TimeoutError) as error:
                self._fleet.missed(server)
                await self._unreachable(server, target, error)
            else:
                refusals = 0
                self._seconds = max(self._seconds, time.monotonic() - started)
                if server.process is process:
                    self._fleet.loaded(server, target.version)
            finally:
                server.updating = False

    async def _unreachable(self, server: Server, target: WeightsReady, error: Exception) -> None:
        """The server died (supervision restarts it), or it lives and is replaced if that is allowed."""
        if not self._fleet.check(server):
            return
        if server.starts > self._fleet.options.max_restarts:
            what = f"within {self._timeout_s:g} s (rollout.sync_timeout_s)" if isinstance(error, TimeoutError) else ""
            raise SyncError(
                f"{server.name} did not take weights {target.version} {what or f'({error})'}, see {server.log}; "
                f"rollout.max_restarts is {self._fleet.options.max_restarts}"
            ) from error
        await self._fleet.replace(server)

    async def _push(self, client: ServerClient, weights: WeightsReady) -> None:
        """One whole update. After a refusal the server stays paused: what it holds is no version."""
        await client.pause(self._pause_mode)
        await client.begin_weight_update()
        try:
            for bucket in weights.buckets:
                await client.update_weights_from_tensor(bucket, str(weights.version), flush_cache=False)
        except (ServerError, ProtocolError):
            with contextlib.suppress(ServerError, ProtocolError):  # so that the next begin is not refused
                await client.end_weight_update()
            raise
        await client.end_weight_update()
        await client.resume()
