"""Is a server that says nothing still well? Asked with a deadline, with back-off, never while weights are loaded."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from ..client.http import ServerClient, ServerError, ServerUnavailable
from ..client.protocol import ProtocolError

#: So many failures in a row are taken for a fault: one alone may be a pause of the machine.
FAILURES = 2


@dataclass(eq=False)
class Health:
    """What is known of one server. Times in seconds; ``quiet_since`` is when it last answered anything."""

    interval_s: float
    timeout_s: float
    quiet_since: float = field(default_factory=time.monotonic)
    failures: int = 0
    reason: str = ""  # of the last failure
    fault: str = ""  # what it is, in words that follow the server's name
    _question: asyncio.Task[str] | None = None
    _about: object = None  # the version that was loaded when it was asked

    def answered(self) -> None:
        """It has just answered a request, so it is well."""
        self.quiet_since, self.failures = time.monotonic(), 0

    def forget(self) -> None:
        """It is not to be asked now."""
        if self._question is not None:
            self._question.cancel()
        self._question = None
        self.answered()

    def ask_now(self) -> None:
        """It is in an unknown state: something is wrong with it, or with another server."""
        self.quiet_since = -math.inf

    def look(self, client: ServerClient, version: object) -> str | None:
        """Ask if it is time, read the answer if there is one. The name of the weights that the server says it has,
        if it just said so and ``version`` is still the one that it was asked about; None otherwise. Never waits."""
        if self._question is None:
            if time.monotonic() - self.quiet_since >= self.interval_s or self.failures:
                self._question = asyncio.create_task(client.health(self.timeout_s))
                self._about = version
            return None
        if not self._question.done():
            return None
        question, self._question = self._question, None
        try:
            found = question.result()
        except (ServerUnavailable, ServerError, ProtocolError) as error:
            self.failures += 1
            self.reason = str(error)
            self.fault = "hangs" if isinstance(error, ServerUnavailable) else "is not well"
            return None
        self.answered()
        return found if version == self._about else None

    @property
    def hangs(self) -> bool:
        return self.failures >= FAILURES
