"""Unfinished trajectories at an orderly stop: their answers so far are kept, and an episode is led through them again.

An environment's own state cannot be kept. Its episode starts anew after the resume and is given the answers that were
sampled before, in place of requests to a server, until there are none left; tokens, log-probs and versions are those of
before. The last one was cut off by the stop, which is an answer that ends with "abort": the rest of it is sampled. An
episode that does not ask for the same tokens again (an observation has changed) drops what is left and samples anew.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Sequence

from ...rollout.agent_loop import Generate
from ...rollout.client.protocol import GenerateResult, SamplingParams
from ..store.records import Answer


def _digest(tokens: Sequence[int]) -> int:
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in tokens))


class PartialRollout:
    """``generate`` of one episode: answers of ``before`` first, then those of ``source``; ``answers`` is all of them.

    ``waiting``: a server owes it one.
    """

    def __init__(self, source: Generate, before: Sequence[Answer] = ()) -> None:
        self._source = source
        self._before = deque(before)
        self._stopping = False
        self.waiting = False
        self.answers: list[Answer] = []

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        prompt = _digest(input_ids)
        if self._fits(prompt, sampling):
            self.answers.append(self._before.popleft())
            return self.answers[-1].result
        self._before.clear()
        if not self._stopping:
            self.waiting = True
            try:
                result = await self._source(input_ids, sampling, rid)
            finally:
                self.waiting = False
            if result.output_ids:
                self.answers.append(Answer(prompt, result))
            if not self._stopping or result.finish_reason != "abort":
                return result
        return await asyncio.get_running_loop().create_future()  # until the episode is cancelled

    def stop(self) -> None:
        """From now on nothing more is asked for; an answer that is cut off now is the last one."""
        self._stopping = True

    def _fits(self, prompt: int, sampling: SamplingParams) -> bool:
        if not self._before:
            return False
        answer = self._before[0]
        return answer.prompt == prompt and len(answer.result.output_ids) <= sampling.max_new_tokens
