"""When an episode waited for servers: noted around its ``generate``, kept in the store for whoever looks at the run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...rollout.agent_loop import Generate
from ...rollout.client.protocol import GenerateResult, SamplingParams
from ..store.records import EpisodeTimes


class Timed:
    """``generate`` of one episode, which begins now; ``times()`` when it has ended.

    One clock of the machine says when it began, one that never jumps says what came after that.
    """

    def __init__(self, source: Generate) -> None:
        self._source = source
        self._began = time.time()
        self._offset = self._began - time.monotonic()
        self._answers: list[tuple[float, float]] = []

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        started = self._now()
        try:
            return await self._source(input_ids, sampling, rid)
        finally:
            self._answers.append((started, self._now()))

    def times(self) -> EpisodeTimes:
        """Those of an episode that ends now."""
        return EpisodeTimes(self._began, self._now(), tuple(self._answers))

    def _now(self) -> float:
        return time.monotonic() + self._offset
