"""One episode against one server: prompt, answer, observation, answer, ..., reward.

Everything is token ids. The trajectory holds exactly what the server was given and what it
sampled, with the log-probs recorded while sampling; prompt and observation tokens are masked out.

A generation that the server aborts (a weight update in mode "abort", a shutdown that was revoked) is
resumed with the tokens it had: they keep their log-probs and versions, the rest of the answer is
sampled by whatever the server holds then, and the answer's budget goes on where it was.

Bounds. ``sampling.max_new_tokens`` bounds the sampled tokens of the whole episode,
``environment.sampling["max_new_tokens"]`` those of every single answer, ``context_length`` the whole
sequence. When nothing is left, the environment is told by an empty ``Action`` (see environments.base).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..environments.base import Outcome
from ..environments.client import Blame, EnvironmentClient, EpisodeClient, EpisodeFailure, Prompt
from ..types import PolicyVersion, Trajectory, Turn, VersionSpan
from .client.protocol import GenerateResult, ProtocolError, SamplingParams

#: (tokens so far, sampling parameters, request id) -> answer
Generate = Callable[[Sequence[int], SamplingParams, str], Awaitable[GenerateResult]]

#: A generation that is aborted this often in a row without a single token is given up.
MAX_EMPTY_ABORTS = 100

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that different offsets give different seeds


class EpisodeError(RuntimeError):
    """This trajectory failed; the message names environment, prompt and cause. Others are unaffected.

    ``blame``: whether it is its own fault, or that of another one in the same worker.
    """

    def __init__(self, message: str, blame: Blame = "own") -> None:
        super().__init__(message)
        self.blame: Blame = blame


@dataclass
class _Record:
    """The growing trajectory. ``spans`` are those of the turn in progress; ``experts`` tile its first tokens."""

    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    turns: list[Turn] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    sampled: int = 0
    experts: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def of_prompt(cls, prompt: Sequence[int]) -> _Record:
        return cls(list(prompt), [False] * len(prompt), [0.0] * len(prompt))

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def append(self, result: GenerateResult) -> None:
        """Take over sampled tokens; spans move from positions in the answer to positions in the sequence."""
        offset = len(self.tokens)
        try:
            versions = [PolicyVersion.parse(span.version) for span in result.spans]
        except ValueError as error:
            raise EpisodeError(f"the server answered: {error}") from error
        self.spans += [
            VersionSpan(offset + span.start, offset + span.end, version)
            for span, version in zip(result.spans, versions, strict=True)
        ]
        self.tokens += result.output_ids
        self.mask += [True] * len(result.output_ids)
        self.logprobs += result.logprobs
        self.sampled += len(result.output_ids)
        if result.routed_experts is not None:
            # The first record of a token stays: it is the one that its log-prob, or those after it, were sampled with.
            self.experts.append(result.routed_experts[sum(map(len, self.experts)) :])

    def routed_experts(self) -> np.ndarray | None:
        """[L, layers, k], with the dtype's largest value where nothing was recorded."""
        if not self.experts:
            return None
        known = np.concatenate(self.experts)
        missing = len(self.tokens) - len(known)
        return np.pad(known, ((0, missing), (0, 0), (0, 0)), constant_values=np.iinfo(known.dtype).max)

    def end_turn(self, start: int, finish_reason: str) -> None:
        self.turns.append(Turn(start, len(self.tokens), finish_reason, tuple(self.spans)))
        self.spans = []


@dataclass
class _Runner:
    """The state of one ``run_episode`` call."""

    generate: Generate
    environment: EnvironmentClient
    episode: EpisodeClient
    sampling: SamplingParams
    context_length: int
    seed_for_turn: Callable[[int], int | None]
    request_id: str

    async def run(self) -> tuple[_Record, Outcome]:
        record = _Record.of_prompt(await self.episode.reset())
        if self._budget(record) < 1:
            raise EpisodeError(
                f"the prompt of {len(record.tokens)} tokens leaves no room for an answer in a context of "
                f"{self.context_length} tokens; shorten the prompts or take a longer context"
            )
        while True:
            answer, reason = await self._answer(record)
            result = await self.episode.step(answer, reason)
            if isinstance(result, Outcome):
                return record, result
            if self._budget(record, upcoming=len(result.token_ids)) < 1:
                return record, await self._final_outcome()
            record.observe(result.token_ids)

    def _budget(self, record: _Record, upcoming: int = 0) -> int:
        """Tokens that the next answer may have, after ``upcoming`` observation tokens."""
        cap = self.environment.description.sampling.get("max_new_tokens", self.sampling.max_new_tokens)
        left = self.sampling.max_new_tokens - record.sampled
        return min(cap, left, self.context_length - len(record.tokens) - upcoming)

    async def _answer(self, record: _Record) -> tuple[Sequence[int], str]:
        """Sample one answer into ``record``, resuming it after every abort; its tokens, and why it ended."""
        turn, start, budget = len(record.turns), len(record.tokens), self._budget(record)
        seed = self.seed_for_turn(turn)
        attempt = empty = 0
        while True:
            offset = len(record.tokens) - start
            left = budget - offset
            request_id = f"{self.request_id}/{turn}.{attempt}"
            result = await self.generate(tuple(record.tokens), self._parameters(left, seed, offset), request_id)
            record.append(result)
            if result.finish_reason != "abort":
                reason = result.finish_reason
                break
            if len(record.tokens) - start == budget:
                reason = "length"
                break
            attempt += 1
            empty = 0 if result.output_ids else empty + 1
            if empty == MAX_EMPTY_ABORTS:
                raise EpisodeError(f"the server aborted the generation {empty} times in a row without a token")
        if len(record.tokens) == start:
            raise EpisodeError(f"the server answered no token (finish reason {reason!r})")
        record.end_turn(start, reason)
        return record.tokens[start:], reason

    def _parameters(self, max_new_tokens: int, seed: int | None, offset: int) -> SamplingParams:
        """``offset`` tokens of the answer exist already: servers count a seed's positions from 0 in every request, so
        a resumed one moves the seed on instead of drawing the same random numbers again."""
        sampling = self.environment.description.sampling
        extra: dict[str, Any] = {**sampling, "max_new_tokens": max_new_tokens}
        if seed is not None:
            extra["sampling_seed"] = (seed + offset * _SEED_STRIDE) % 2**31
        try:
            return replace(self.sampling, **extra)
        except (TypeError, ProtocolError) as error:
            raise EpisodeError(f"its sampling parameters {dict(sampling)}: {error}") from error

    async def _final_outcome(self) -> Outcome:
        result = await self.episode.step((), "length")
        if not isinstance(result, Outcome):
            raise EpisodeError("step returned an Observation although no room was left; it must return an Outcome")
        return result


async def run_episode(
    generate: Generate,
    environment: EnvironmentClient,
    prompt: Prompt,
    *,
    group_id: int,
    sample_index: int,
    sampling: SamplingParams,
    context_length: int,
    seed_for_turn: Callable[[int], int | None],
) -> Trajectory:
    """Run one episode of ``prompt`` to its end and return its trajectory.

    ``seed_for_turn(turn)`` is the sampling seed of answer ``turn`` = 0, 1, ..., or None to send none.

    Raises EpisodeError when the environment or the server's answer is at fault; what ``generate``
    raises passes unchanged. The episode is closed in every case, cancellation included.
    """
    label = f"environment {environment.description.name}, prompt {prompt.prompt_id}, sample {group_id}/{sample_index}"
    request_id = f"{prompt.prompt_id}/{group_id}/{sample_index}"
    episode = environment.episode(prompt)
    try:
        runner = _Runner(generate, environment, episode, sampling, context_length, seed_for_turn, request_id)
        record, outcome = await runner.run()
    except (EpisodeError, EpisodeFailure) as error:
        raise EpisodeError(f"{label}: {error}", error.blame) from error
    finally:
        episode.close()
    return Trajectory(
        group_id=group_id,
        sample_index=sample_index,
        prompt_id=prompt.prompt_id,
        prompt_length=record.turns[0].start,
        tokens=np.asarray(record.tokens, dtype=np.int32),
        loss_mask=np.asarray(record.mask, dtype=np.bool_),
        behavior_logprobs=np.asarray(record.logprobs, dtype=np.float32),
        turns=tuple(record.turns),
        reward=outcome.reward,
        info=outcome.info,
        routed_experts=record.routed_experts(),
    )
