"""The records that travel between processes: trajectories, groups, batches, step results.

Everything here is frozen, made of plain Python and numpy, and free of torch, so that the
orchestrator (which never imports torch) and the learner speak of the same objects.

Positions. A trajectory is one flat token sequence: prompt, then sampled tokens, then (for tool
use) observation tokens, sampled tokens again, and so on. Every per-token array has the length L of
that sequence. ``behavior_logprobs[t]`` is log mu(tokens[t] | tokens[:t]); it is 0.0, and carries no
meaning, where ``loss_mask[t]`` is False.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

#: [RUN.]ATTEMPT.NUMBER; RUN is what ``launch.workspace.run_identity`` makes.
_VERSION = re.compile(r"(?:([0-9a-f]{8})\.)?([0-9]+)\.([0-9]+)")


def routing_dtype(experts: int) -> np.dtype:
    """What expert ids of a model with so many experts are kept as; its largest value stands for "not recorded"."""
    return np.dtype(np.uint8 if experts <= np.iinfo(np.uint8).max else np.uint16)


class PolicyVersion(NamedTuple):
    """Name of one policy: ``number`` optimizer steps since the start, made by attempt ``attempt`` of run ``run``.

    Two attempts of one run may both make a version 17, and so may two runs on one server; their names differ
    ("3f9a21c0.1.17", "3f9a21c0.2.17"), so no two policies ever share one. Staleness compares numbers only. ``run`` is
    the run directory's identity; a policy that belongs to no run (a tool's) has none, and is written ATTEMPT.NUMBER.
    """

    attempt: int
    number: int
    run: str = ""

    def __str__(self) -> str:
        return f"{self.run}.{self.attempt}.{self.number}" if self.run else f"{self.attempt}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of ``str``; raises ValueError naming the text when it is not [RUN.]ATTEMPT.NUMBER."""
        if (match := _VERSION.fullmatch(text)) is None:
            raise ValueError(f"policy version {text!r} is not of the form RUN.ATTEMPT.NUMBER")
        run, attempt, number = match.groups(default="")
        return cls(int(attempt), int(number), run)

    def next(self) -> PolicyVersion:
        """The version that one more step of the same attempt makes."""
        return self._replace(number=self.number + 1)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Token positions [start, end) of a trajectory were sampled by policy ``version``."""

    start: int
    end: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of a rollout server: positions [start, end) were sampled in it. A generation that was aborted and
    taken up again is one answer still.

    ``finish_reason`` is "stop", "length" or "abort". ``spans`` tile [start, end) without gaps.
    """

    start: int
    end: int
    finish_reason: str
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class LearnerRecord:
    """What the learner itself gave a trajectory's tokens when its group was complete: float32 [L], the log-probs of
    ``version`` at the sampling temperature, 0.0 and without meaning where ``loss_mask`` is False."""

    version: PolicyVersion
    logprobs: np.ndarray


@dataclass(frozen=True)
class Trajectory:
    """One finished sample of a prompt.

    tokens             int32   [L]  prompt, sampled tokens and observations, as the server saw them
    loss_mask          bool    [L]  True where the policy sampled the token
    behavior_logprobs  float32 [L]  log mu recorded at sampling, at the sampling temperature
    routed_experts     uint8 or uint16 [L, layers, k], or None: the experts that the server sent each token to, by
                       number; the dtype's largest value where nothing was recorded (the last token at least)
    recorded           the learner's own log-probs, once there are any (``algorithm.mismatch`` = "recorded")
    """

    group_id: int
    sample_index: int
    prompt_id: str
    prompt_length: int
    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    turns: tuple[Turn, ...]
    reward: float
    info: Mapping[str, float] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None
    recorded: LearnerRecord | None = None

    def __post_init__(self) -> None:
        length = len(self.tokens)
        arrays = {"tokens": np.int32, "loss_mask": np.bool_, "behavior_logprobs": np.float32}
        if self.recorded is not None:
            arrays["recorded.logprobs"] = np.float32
        for name, dtype in arrays.items():
            array = operator.attrgetter(name)(self)
            if array.shape != (length,) or array.dtype != dtype:
                raise ValueError(
                    f"trajectory {self.uid}: {name} is {array.dtype}{list(array.shape)}, "
                    f"expected {np.dtype(dtype)}[{length}]"
                )
        routed = self.routed_experts
        if routed is not None and (
            routed.ndim != 3 or len(routed) != length or routed.dtype not in (np.uint8, np.uint16)
        ):
            raise ValueError(
                f"trajectory {self.uid}: routed_experts is {routed.dtype}{list(routed.shape)}, "
                f"expected uint8 or uint16[{length}, layers, k]"
            )
        if not 0 < self.prompt_length <= length or self.loss_mask[: self.prompt_length].any():
            raise ValueError(
                f"trajectory {self.uid}: prompt_length {self.prompt_length} does not fit {length} tokens, "
                "or a prompt token is marked as sampled"
            )

    @property
    def uid(self) -> str:
        """Unique in a run: GROUP/SAMPLE."""
        return f"{self.group_id}/{self.sample_index}"

    @property
    def num_sampled(self) -> int:
        """Number of sampled (trained) tokens."""
        return int(self.loss_mask.sum())

    def sampled_by(self, version: int) -> np.ndarray:
        """bool [L]: True where the token was sampled by the policy of number ``version``."""
        found = np.zeros(len(self.tokens), np.bool_)
        for turn in self.turns:
            for span in turn.spans:
                if span.version.number == version:
                    found[span.start : span.end] = True
        return found & self.loss_mask

    @property
    def turn_of_token(self) -> np.ndarray:
        """int64 [L]: number of the turn that each token is in, -1 outside of all; ValueError where one of those was
        sampled, since it would have no weight."""
        found = np.full(len(self.tokens), -1, np.int64)
        for number, turn in enumerate(self.turns):
            found[turn.start : turn.end] = number
        if (outside := np.flatnonzero(self.loss_mask & (found < 0))).size:
            raise ValueError(f"trajectory {self.uid}: the sampled token at position {outside[0]} is in no turn")
        return found

    @property
    def sampled_by_version(self) -> tuple[tuple[int, int], ...]:
        """(number of the version, tokens that it sampled) of every span in order of position."""
        spans = (span for turn in self.turns for span in turn.spans)
        return tuple((span.version.number, int(self.loss_mask[span.start : span.end].sum())) for span in spans)

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Version of every span in order of position."""
        return tuple(span.version for turn in self.turns for span in turn.spans)

    @property
    def oldest_version(self) -> int:
        """Number of the oldest version that sampled a token: what the staleness bound speaks of."""
        return min(version.number for version in self.versions)

    @property
    def newest_version(self) -> int:
        """Number of the newest version that sampled a token."""
        return max(version.number for version in self.versions)


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, in order of ``sample_index``; the unit that is trained or dropped."""

    group_id: int
    prompt_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def recorded(self) -> bool:
        """Whether the learner's own log-probs are there, of every trajectory."""
        return all(trajectory.recorded is not None for trajectory in self.trajectories)

    def with_recorded(self, version: PolicyVersion, logprobs: np.ndarray) -> Group:
        """The group with what ``version`` gave its tokens: float32, one trajectory after another."""
        ends = np.cumsum([len(trajectory.tokens) for trajectory in self.trajectories])
        parts = np.split(logprobs, ends[:-1])
        members = [
            replace(t, recorded=LearnerRecord(version, own)) for t, own in zip(self.trajectories, parts, strict=True)
        ]
        return replace(self, trajectories=tuple(members))

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def newest_version(self) -> int:
        return max(trajectory.newest_version for trajectory in self.trajectories)


@dataclass(frozen=True)
class Batch:
    """What one optimizer step trains on: whole groups. ``step`` counts from 0."""

    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class TrajectoryResult:
    """What the step found for one trajectory.

    log_ratio  l_i: sum over sampled tokens of log pi_theta - log mu; with ``algorithm.mismatch`` = "recorded" of log
               pi_theta less the learner's recorded log-prob
    weight     w_i, the weight of its gradient by the method: min(exp(log_ratio), is_threshold) of VCPO; 1 where weights
               are of tokens, or there are none
    grad_norm  |g_i|, norm of the score gradient, unweighted but for weights of tokens; nan where no backward was taken
    baseline   b_g of its group; b_i where it leaves the trajectory itself out
    """

    group_id: int
    sample_index: int
    log_ratio: float
    weight: float
    grad_norm: float
    baseline: float


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step. ``version`` is the policy it made, number = step + 1.

    ``skipped`` is "" or the reason ("non-finite step", "vanishing weights") for which parameters were left unchanged.
    ``metrics`` holds the learner's share of the names that ``metrics.jsonl`` documents.
    """

    step: int
    version: PolicyVersion
    skipped: str
    metrics: Mapping[str, float]
    trajectories: tuple[TrajectoryResult, ...]
