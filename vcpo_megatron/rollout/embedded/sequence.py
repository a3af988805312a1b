"""One answer in the making, as the engine knows it: prompt, sampling, and what was sampled so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..client.protocol import SamplingParams, Span


@dataclass(slots=True, eq=False)
class SequenceState:
    """``seed`` drives its draws; ``stop`` holds the ids that end it; ``score_from`` asks for prompt log-probs.

    ``finish`` is None while it runs, then SGLang's ``finish_reason`` object; ``failure`` is the
    reason why it could not be answered. ``input_logprobs`` [len(prompt) - score_from - 1] are at
    temperature 1; ``length`` counts prompt and answer so far. ``experts`` tile the first ``routed`` tokens.
    """

    rid: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: frozenset[int]
    seed: int
    score_from: int | None = None
    return_experts: bool = False
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    input_logprobs: list[float] | None = None
    experts: list[np.ndarray] = field(default_factory=list)
    routed: int = 0
    retractions: int = 0
    finish: dict[str, Any] | None = None
    failure: str = ""
    arrived: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return self.prompt + tuple(self.output_ids)

    def append(self, token: int, logprob: float) -> None:
        """Takes one sampled token. As in SGLang, a stop token at the last place is a stop."""
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.length += 1
        if token in self.stop:
            self.finish = {"type": "stop", "matched": token}
        elif self.length - len(self.prompt) >= self.sampling.max_new_tokens:
            self.finish = {"type": "length", "length": self.sampling.max_new_tokens}

    def append_experts(self, chosen: np.ndarray) -> None:
        """Takes experts [n, layers, k] of the next n tokens that went through the model. A token that is computed once
        more, after a retraction, keeps its first ones: its log-prob was sampled with them."""
        if self.return_experts:
            self.experts.append(chosen.astype(np.int32))
            self.routed += len(chosen)

    def close_span(self, version: str) -> None:
        """Everything sampled since the last call was sampled by ``version``."""
        start = self.spans[-1].end if self.spans else 0
        end = len(self.output_ids)
        if end == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(Span(start, end, version))
