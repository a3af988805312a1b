"""Unfinished trajectories: their answers so far are kept, and an episode is led through them again.

An environment's own state cannot be kept. Its episode starts anew after the resume and is given the answers that were
sampled before, in place of requests to a server, until there are none left; tokens, log-probs and versions are those of
before. The last one was cut off by the stop, which is an answer that ends with "abort": the rest of it is sampled. An
episode that does not ask for the same tokens again (an observation has changed) drops what is left and samples anew.

So it is, within a run, with an episode that is lost with its environment worker by another one's fault, where nothing
may be missing: in exact lag and in evaluations (``led_through``). The others of a round in exact lag do not notice it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ...rollout.agent_loop import EpisodeError, Generate
from ...rollout.client.protocol import GenerateResult, SamplingParams
from ...types import Trajectory
from ..store.records import Answer

#: An episode that is lost so often with its environment worker, by the fault of others, has failed.
MOST_LOSSES = 100


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

    def again(self) -> PartialRollout:
        """For an episode that begins anew: led through all answers that are here."""
        return PartialRollout(self._source, (*self.answers, *self._before))

    def stop(self) -> None:
        """From now on nothing more is asked for; an answer that is cut off now is the last one."""
        self._stopping = True

    def _fits(self, prompt: int, sampling: SamplingParams) -> bool:
        if not self._before:
            return False
        answer = self._before[0]
        return answer.prompt == prompt and len(answer.result.output_ids) <= sampling.max_new_tokens


async def led_through(generate: Generate, play: Callable[[Generate], Awaitable[Trajectory]]) -> Trajectory:
    """The trajectory of ``play(generate)``, an episode, which begins anew when it is lost with its environment worker
    and is not to blame. EpisodeError when it fails itself, or is lost ``MOST_LOSSES`` times."""
    rollout, losses = PartialRollout(generate), 0
    while True:
        try:
            return await play(rollout.generate)
        except EpisodeError as error:
            losses += 1
            if error.blame != "none" or losses == MOST_LOSSES:
                raise
        rollout = rollout.again()
