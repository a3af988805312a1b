"""Unfinished trajectories at an orderly stop: their answers so far are kept, and an episode is led through them again.

An environment's own state cannot be kept. Its episode starts anew after the resume and is given the answers that were
sampled before, in place of requests to a server, until there are none left; tokens, log-probs and versions are those of
before. The last one was cut off by the stop, which is an answer that ends with "abort": the rest of it is sampled. An
episode that does not ask for the same tokens again (an observation has changed) drops what is left and samples anew.
"""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..rollout.agent_loop import Generate
from ..rollout.protocol import GenerateResult, SamplingParams, Span
from ..types import PolicyVersion


@dataclass(frozen=True)
class Answer:
    """One answer of a server; ``prompt``: CRC-32 of the tokens that it was given."""

    prompt: int
    result: GenerateResult

    def versions(self) -> list[int]:
        return [PolicyVersion.parse(span.version).number for span in self.result.spans]


def to_text(answers: Sequence[Answer]) -> str:
    """Inverse of ``from_text``; floats come back bit for bit."""
    return json.dumps([[answer.prompt, *_fields(answer.result)] for answer in answers], separators=(",", ":"))


def from_text(text: str) -> tuple[Answer, ...]:
    return tuple(Answer(prompt, _result(*fields)) for prompt, *fields in json.loads(text))


def _fields(result: GenerateResult) -> list[Any]:
    routed = result.routed_experts
    packed = None
    if routed is not None:
        data = base64.b64encode(np.ascontiguousarray(routed).tobytes()).decode()
        packed = [routed.dtype.newbyteorder("=").name, list(routed.shape), data]
    return [result.output_ids, result.logprobs, result.spans, result.finish_reason, packed]


def _result(
    ids: list[int], logprobs: list[float], spans: list[list[Any]], reason: str, packed: list[Any] | None
) -> GenerateResult:
    routed = None
    if packed is not None:
        dtype, shape, data = packed
        routed = np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
    return GenerateResult(tuple(ids), tuple(logprobs), tuple(Span(*span) for span in spans), reason, routed)


def _digest(tokens: Sequence[int]) -> int:
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in tokens))


class Answers:
    """``generate`` of one episode: answers of ``before`` first, then those of ``source``. ``given`` is all of them."""

    def __init__(self, source: Generate, before: Sequence[Answer] = ()) -> None:
        self._source = source
        self._before = deque(before)
        self._parking = False
        self.asking = False  # a server owes an answer
        self.given: list[Answer] = []

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, rid: str) -> GenerateResult:
        prompt = _digest(input_ids)
        if self._fits(prompt, sampling):
            self.given.append(self._before.popleft())
            return self.given[-1].result
        self._before.clear()
        if not self._parking:
            self.asking = True
            try:
                result = await self._source(input_ids, sampling, rid)
            finally:
                self.asking = False
            if result.output_ids:
                self.given.append(Answer(prompt, result))
            if not self._parking or result.finish_reason != "abort":
                return result
        return await asyncio.get_running_loop().create_future()  # until the episode is cancelled

    def park(self) -> None:
        """From now on nothing more is asked for; an answer that is cut off now is the last one."""
        self._parking = True

    def _fits(self, prompt: int, sampling: SamplingParams) -> bool:
        if not self._before:
            return False
        answer = self._before[0]
        return answer.prompt == prompt and len(answer.result.output_ids) <= sampling.max_new_tokens
