"""An sglang-router in front of joined servers, which chooses the one that samples; written for 0.3.2.

    serving servers --> look --> POST / DELETE /workers --> members, those that it sends requests to
    waits for: its answer about its workers, never a request     unblocked by: the answer, or its deadline

Only a server that serves is left among its workers: one that was lost, or missed an update, is taken out, and put back
when it holds a whole version again. Both take effect a little later, and a router may be restarted with workers of its
own: what makes an answer exact is the version that the answer itself names for its tokens (``lease.py``).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping
from typing import Any

from ..client import protocol
from ..client.back_off import BackOff
from ..client.http import STATUS_TIMEOUT_S, ServerClient, ServerError, ServerUnavailable
from ..client.protocol import ProtocolError
from ..client.replies import UnsupportedServer, router_workers

#: Pauses between questions about its workers while they are not those that it should have.
_ASK_S = (0.25, 5.0)
#: Sampling parameters whose log-probs need a field that it drops.
_RESTRICTING = ("top_p", "top_k", "min_p")


def sampling_problem(sampling: Mapping[str, Any]) -> str | None:
    """Why an environment's ``sampling`` parameters cannot go through a router, if so."""
    if not (found := [name for name in _RESTRICTING if name in sampling]):
        return None
    return (
        f"rollout.router: the environment samples with {', '.join(found)}, and an sglang-router drops "
        "return_sampling_mask, without which their log-probs are not known; remove rollout.router"
    )


class RouterClient(ServerClient):
    """The router's own endpoints; ``generate`` is that of a server."""

    async def workers(self) -> dict[str, str]:
        """Address -> id of each of its workers; UnsupportedServer when it is no router."""
        try:
            reply = await self._request("GET", protocol.WORKERS, None, STATUS_TIMEOUT_S)
        except ServerError as error:
            if error.status >= 500:
                raise
            reply = None
        if (found := router_workers(reply)) is None:
            raise UnsupportedServer(f"rollout.router = {self.base_url}: what answers there is no sglang-router")
        return found

    async def add(self, address: str) -> None:
        """It asks the server at ``address``, and sends it requests once that answered."""
        await self._post(protocol.WORKERS, {"url": address})

    async def remove(self, worker: str) -> None:
        """No new request is sent to it; what it computes already comes to its end."""
        try:
            await self._request("DELETE", f"{protocol.WORKERS}/{worker}", None, STATUS_TIMEOUT_S)
        except ServerError as error:
            if error.status != 404:  # it is gone
                raise


class Router:
    """The router of a run. ``addresses`` are all servers of the run, ``members`` its workers as it last told them, None
    before it has. It is asked every ``interval_s``, and must answer, and have a server that serves, within
    ``timeout_s`` seconds."""

    def __init__(self, client: RouterClient, addresses: Collection[str], *, interval_s: float, timeout_s: float):
        self.client = client
        self.members: frozenset[str] | None = None
        self._addresses = frozenset(addresses)
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._asked: asyncio.Task[frozenset[str]] | None = None
        self._asking = BackOff(*_ASK_S)
        self._last = -math.inf  # when it last told its workers
        self._well_by = math.inf

    def look(self, serving: Collection[str]) -> bool:
        """Bring its workers to ``serving``, those servers that serve now; whether ``members`` changed. Never waits.

        UnsupportedServer when it has workers that are not the run's, or when it is not well within its deadline.
        """
        wanted, now, before = frozenset(serving), time.monotonic(), self.members
        if self._asked is None:
            if self._asking.due and (wanted != self.members or now - self._last >= self._interval_s):
                self._asked = asyncio.create_task(self._settle(wanted))
                self._well_by = min(self._well_by, now + self._timeout_s)
            return False
        if not self._asked.done():
            return False
        asked, self._asked, problem = self._asked, None, ""
        try:
            self.members = asked.result()
            self._last = now
        except (ServerError, ServerUnavailable, ProtocolError) as error:
            problem = str(error)
        else:
            if wanted and not wanted & self.members:
                problem = f"it has none of the servers that serve, {', '.join(sorted(wanted))}; can it reach them?"
        if not problem:
            self._well_by = math.inf
        elif now > self._well_by:
            limit = f"within {self._timeout_s:g} s (rollout.start_timeout_s)"
            raise UnsupportedServer(f"the sglang-router at {self.client.base_url} does not work {limit}: {problem}")
        if problem or wanted != self.members:
            self._asking.wait()
        else:
            self._asking.reset()
        return self.members != before

    async def _settle(self, wanted: frozenset[str]) -> frozenset[str]:
        """Its workers, some of which it was asked to add or to remove just now."""
        found = await self.client.workers()
        if strangers := sorted(set(found) - self._addresses):
            raise UnsupportedServer(
                f"the sglang-router at {self.client.base_url} has workers that are not in rollout.addresses, so they "
                f"would answer with other weights: {', '.join(strangers)}; remove them, or give the run a router of "
                "its own"
            )
        for address in sorted(set(found) - wanted):
            await self.client.remove(found[address])
        for address in sorted(wanted - set(found)):
            await self.client.add(address)
        return frozenset(found)

    def forget(self) -> None:
        """Nothing is to be asked any more."""
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None
