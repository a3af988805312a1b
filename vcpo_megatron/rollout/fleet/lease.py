"""Places of a group on one server, and its requests: routed, counted, and run again when a server dies.

Behind a router nobody knows which server samples an answer. Its version is that of its tokens, by the answer itself:
one that names no version of the run, or an older one than the group was admitted with, is not taken. A server names a
version only from the first piece of an update of it on, and samples nothing before the last; one whose update was lost
names none before it samples again (``ServerClient.adopt``).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...types import PolicyVersion
from ..client.back_off import BackOff
from ..client.http import ServerError, ServerUnavailable
from ..client.protocol import GENERATE, GenerateResult, SamplingParams

if TYPE_CHECKING:
    from .fleet import Fleet
    from .router import Router, RouterClient
    from .server import Server

#: How often a request is sent again to a server whose process lives but that does not answer it.
_RETRIES = 2
#: Pauses before a router is asked again.
_AGAIN_S = (0.1, 2.0)


@dataclass(eq=False)
class Lease:
    """Places of one group (or one evaluation) on a server, one place a trajectory.

    ``held`` is the version that the server had loaded when the lease was given, and ``version`` its number: what
    admission counted with. No request of the lease goes to an older one, nor to a server outside ``among``. Behind a
    ``router`` it is the ``oldest`` that any server had.

    A place counts as busy from the start, until its first request has been answered; then only while it has a request
    in flight. So a server whose trajectories wait for their environments is given further groups.
    """

    fleet: Fleet
    server: Server
    places: int
    among: Sequence[Server]
    router: Router | None = None
    oldest: PolicyVersion | None = None
    held: PolicyVersion = field(init=False)
    fresh: int = field(init=False)  # places that have not asked for anything yet
    asking: int = 0  # requests in flight

    def __post_init__(self) -> None:
        assert self.server.version is not None
        self.held = self.oldest or self.server.version
        self.fresh = self.places
        self._take(self.server)

    @property
    def version(self) -> int:
        return self.held.number

    def release(self, places: int = 1) -> None:
        """Give ``places`` back; the trajectories that held them have ended."""
        self._give_back()
        self.places -= places
        self.fresh = min(self.fresh, self.places)
        self._take(self.server)
        self.fleet.changes.notify()

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        """Answer of the lease's server; when that one dies the request is run again where the lease moves to.

        ServerUnavailable after repeated failures of a server that lives, or when no server took over in time;
        ServerError when the request was refused.
        """
        self._count(asking=1, fresh=-1 if self.fresh else 0)
        try:
            if self.router is not None:
                return await self._routed(self.router.client, input_ids, sampling, rid)
            return await self._answer(input_ids, sampling, rid)
        finally:
            self._count(asking=-1)
            self.fleet.changes.notify()

    async def _answer(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        failures = 0
        while True:
            server = await self._place()
            incarnation = server.incarnation
            try:
                result = await server.client.generate(input_ids, sampling, rid)
            except (ServerUnavailable, ServerError) as error:
                if isinstance(error, ServerError) and error.status < 500:
                    raise  # the request is at fault
                if self.fleet.unreachable(server, incarnation):
                    failures += 1
                    if failures > _RETRIES:
                        raise
                    await asyncio.sleep(0.1 * failures)
            else:
                server.answered()
                return result

    async def _routed(
        self, router: RouterClient, input_ids: Sequence[int], sampling: SamplingParams, rid: str
    ) -> GenerateResult:
        """Answer of a server behind the router. While that has no server, or does not answer, it is asked again."""
        failures, until, again = 0, math.inf, BackOff(*_AGAIN_S)
        while True:
            if not self.server.serving:
                await self._place()  # where it is counted
            try:
                result = await router.generate(input_ids, sampling, rid)
                if (wrong := _wrong(result, self.version)) is None:
                    return result
                self.fleet.ask_all()
                raise ServerUnavailable(router.base_url, GENERATE, f"a server answered with weights {wrong}")
            except (ServerUnavailable, ServerError) as error:
                if isinstance(error, ServerError) and error.status != 503:
                    failures += 1
                    if error.status < 500 or failures > _RETRIES:
                        raise
                until = min(until, time.monotonic() + self.fleet.options.takeover_timeout_s)
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(again.wait())

    # --- where ----------------------------------------------------------------------------------

    async def _place(self) -> Server:
        """The server of this lease, after moving to another one if it does not serve. While weights are loaded it is
        waited for: what is sent before then could read the cache of the weights that leave."""
        timeout_s = self.fleet.options.takeover_timeout_s

        def serving() -> Server | None:
            own = self.server.serving
            servers = [self.server] if own else self.among
            ready = [
                s
                for s in servers
                if s.version is not None and (own or s.version.number >= self.version) and not s.updating
            ]
            return min(ready, key=lambda s: s.order) if ready else None

        try:
            server = await self.fleet.changes.until(serving, timeout_s)
        except TimeoutError:
            reason = f"no rollout server took over from {self.server.name} within {timeout_s:g} s"
            raise ServerUnavailable(self.server.client.base_url, GENERATE, reason) from None
        if server is not self.server:
            self._give_back()
            self.server = server
            self._take(server)
        return server

    # --- counting -------------------------------------------------------------------------------

    def _count(self, *, asking: int = 0, fresh: int = 0) -> None:
        self._give_back()
        self.asking += asking
        self.fresh += fresh
        self._take(self.server)

    def _take(self, server: Server) -> None:
        server.load += self.places
        server.busy += self.fresh + self.asking

    def _give_back(self) -> None:
        self.server.load -= self.places
        self.server.busy -= self.fresh + self.asking


def _wrong(result: GenerateResult, at_least: int) -> str | None:
    """Name of the weights of an answer that are no version, or one below ``at_least``; None when there are none."""
    for span in result.spans:
        try:
            version = PolicyVersion.parse(span.version)
        except ValueError:
            return repr(span.version)
        if version.number < at_least:
            return f"{version}, older than version {at_least} that its group was admitted with"
    return None
