"""What an unfinished trajectory has of answers at an orderly stop, as the store keeps it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...rollout.client.protocol import GenerateResult, Span
from ...types import PolicyVersion


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
