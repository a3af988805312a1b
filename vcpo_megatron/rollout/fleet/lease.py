"""Places of a group on one server, and its requests: routed, counted, and run again when a server dies.

The version of an answer is that of its tokens, by the answer itself, and it is held against what the server was given
(``trust``): an answer that cannot be right is not taken, nor counted against its prompt. The server is doubted, gets
its weights in full, and is asked again. A server names a version only from the first piece of an update of it on, and
samples nothing before the last; one whose update was lost names none before it samples again (``ServerClient.adopt``).
Behind a router nobody knows which server samples an answer: then all are asked what they have.
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
from ..client.protocol import GENERATE, GenerateResult, ImpossibleLogprobs, SamplingParams
from .trust import impossible

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
            incarnation, held = server.incarnation, server.held
            try:
                result = await server.client.generate(input_ids, sampling, rid)
            except ImpossibleLogprobs as error:
                self.fleet.doubt(server, held, impossible(error))
            except (ServerUnavailable, ServerError) as error:
                if isinstance(error, ServerError) and error.status < 500:
                    raise  # the request is at fault
                if self.fleet.unreachable(server, incarnation):
                    failures += 1
                    if failures > _RETRIES:
                        raise
                    await asyncio.sleep(0.1 * failures)
            else:
                if await self.fleet.believes(server, held, [result], [sampling]):
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
                if (doubt := await self.fleet.routed_doubt(self.held, result)) is None:
                    return result
                raise ServerUnavailable(router.base_url, GENERATE, f"a server behind it {doubt.reason}")
            except (ServerUnavailable, ServerError, ImpossibleLogprobs) as error:
                if isinstance(error, ImpossibleLogprobs):
                    self.fleet.ask_all()
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
