"""What is known of one batch: its trajectories' numbers as named tensors, which all ranks come to hold alike.

A rank fills in the samples that it computes. One SUM over all ranks, in which every sample has one owner, then gives
every rank all of them: from there on nothing depends on who computed what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from ...algorithm import baselines, importance, normalization
from ...algorithm.advantages import GroupScale, group_scale
from ...config.schema import AlgorithmConfig
from ...types import has_variance
from ..batch.packing import Sample
from ..megatron import platform
from ..megatron.parallel import Parallel, agree_sum

#: Tensors of ``BatchState`` that ranks agree on, in the order in which they are summed.
_AGREED = (
    "owners",
    "log_ratio",
    "logprob_sum",
    "entropy_sum",
    "weight_sum",
    "has_norm",
    "grad_norm",
    "baseline",
    "fell_back",
    "kl_sum",
    "mismatch_sum",
    "mismatch_max",
    "mismatch_tokens",
    "noise_sum",
    "noise_squares",
    "mismatch_log_ratio",
)


@dataclass(frozen=True)
class RankSums:
    """What a rank found as a whole; after ``BatchState.agree`` the sums over all ranks.

    aborted                 1: the rank has aborted the step
    non_finite_gradients    1: one of its gradients is not finite
    padded_tokens           tokens of padding that it put through the model; 0 on all ranks but one of those that share
                            packs
    accumulator_error, accumulator_size  squared error of accumulators of less than fp32, and the squared size of the
                            rows that were probed for it
    """

    aborted: float = 0.0
    non_finite_gradients: float = 0.0
    padded_tokens: float = 0.0
    accumulator_error: float = 0.0
    accumulator_size: float = 0.0


@dataclass(frozen=True)
class SampleNumbers:
    """What is known of some samples before their backward, float64 [n] where they are multiplied; ``has_variance``
    bool [n]. As of ``BatchState``."""

    rewards: Tensor
    baseline: Tensor
    inverse_std: Tensor
    loss_coefficients: Tensor
    threshold_growth: Tensor
    has_variance: Tensor
    anchor: float


@dataclass
class BatchState:
    """N samples, numbered 0 to N-1 group by group. Tensors lie on the CPU; [N] and float64 where nothing else is said.

    Known before the step, on all ranks:

    rewards             R_i
    inverse_std         1 / std of the group's rewards, 1 where the method does not divide by it
    has_variance        bool; False in a zero-variance group, which has no advantage. The others are the trained groups
    loss_coefficients   c_i: the whole normalisation of the loss
    sampled_tokens      T_i
    threshold_growth    factor on log c of the trajectory's weight, by T_i; 1 where it does not grow
    scales              of every group, [groups]; group_sizes  samples of every group, [groups]
    anchor              a: the behaviour anchor's coefficient

    Found in the step; ``agree`` gives all ranks what the owners know:

    owners              int64: 1 on a rank that computed the sample; agreed: how many ranks did
    log_ratio           l_i = sum over sampled tokens of (log pi_theta - log mu); of the lag alone with a record
    mismatch_log_ratio  with a record: sum over sampled tokens of (what the learner recorded - log mu); else 0
    logprob_sum         sum of v_t log pi_t over sampled tokens, v as of ``Objective.reported``
    entropy_sum         sum over sampled tokens
    weight_sum          sum over sampled tokens of ``Objective.token_ratios``; 0 where tokens have no weights
    kl_sum              sum over sampled tokens of the estimates of KL to the reference
    mismatch_sum, mismatch_max, mismatch_tokens  of |log pi - log mu| over sampled tokens of the current version
    noise_sum, noise_squares  of log pi - log mu over the same tokens
    has_norm            bool: the exact |g_i| is known, and the step depends on it
    grad_norm           the exact |g_i|, nan where it is not known
    baseline            b_i as far as it is known: from rewards at first, from norms once they are found
    fell_back           bool: norms gave no baseline for the sample's group, or for one of it, and a mean was taken
    ranks               what ranks found as a whole

    Found in the step, never agreed on:

    statistic           the batch's number that the method asks for; nan until it is set
    token_log_ratios    [M] log pi_theta - log mu of the batch's M sampled tokens, while the statistic is not known
    estimated_norm      estimate of |g_i| from logits, nan where there is none
    reference_logprobs  id of a pack of this rank -> log pi_ref of its labels, float32 [T], on the device
    """

    rewards: Tensor
    inverse_std: Tensor
    has_variance: Tensor
    loss_coefficients: Tensor
    sampled_tokens: Tensor
    threshold_growth: Tensor
    baseline: Tensor
    scales: tuple[GroupScale, ...]
    group_sizes: tuple[int, ...]
    anchor: float = 0.0
    owners: Tensor = field(init=False)
    log_ratio: Tensor = field(init=False)
    logprob_sum: Tensor = field(init=False)
    entropy_sum: Tensor = field(init=False)
    weight_sum: Tensor = field(init=False)
    kl_sum: Tensor = field(init=False)
    mismatch_sum: Tensor = field(init=False)
    mismatch_max: Tensor = field(init=False)
    mismatch_tokens: Tensor = field(init=False)
    noise_sum: Tensor = field(init=False)
    noise_squares: Tensor = field(init=False)
    mismatch_log_ratio: Tensor = field(init=False)
    has_norm: Tensor = field(init=False)
    grad_norm: Tensor = field(init=False)
    fell_back: Tensor = field(init=False)
    ranks: RankSums = RankSums()
    statistic: float = math.nan
    token_log_ratios: Tensor = field(init=False)
    estimated_norm: Tensor = field(init=False)
    reference_logprobs: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.rewards)
        for name in ("log_ratio", "logprob_sum", "entropy_sum", "weight_sum", "kl_sum"):
            setattr(self, name, torch.zeros(n, dtype=torch.float64))
        for name in ("mismatch_sum", "mismatch_max", "mismatch_tokens", "mismatch_log_ratio"):
            setattr(self, name, torch.zeros(n, dtype=torch.float64))
        for name in ("noise_sum", "noise_squares"):
            setattr(self, name, torch.zeros(n, dtype=torch.float64))
        self.owners = torch.zeros(n, dtype=torch.int64)
        self.has_norm, self.fell_back = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
        for name in ("grad_norm", "estimated_norm"):
            setattr(self, name, torch.full((n,), math.nan, dtype=torch.float64))
        self.token_log_ratios = torch.zeros(int(self.sampled_tokens.sum()), dtype=torch.float64)

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Sample]],
        algorithm: AlgorithmConfig,
        max_new_tokens: int,
        previous_ess: float = 1.0,
    ) -> BatchState:
        """What is known before the step. ``previous_ess``: ESS ratio of the step before."""
        method = algorithm.preset
        rewards = [torch.tensor([s.trajectory.reward for s in group], dtype=torch.float64) for group in groups]
        scales = tuple(group_scale(r, method.normalize_std, has_variance(r.tolist())) for r in rewards)
        before = [baselines.before_norms(method.baseline, values) for values in rewards]
        sampled = torch.tensor([s.trajectory.num_sampled for group in groups for s in group])
        sizes = torch.tensor([len(group) for group in groups], dtype=torch.int64)

        def of_members(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes)

        return cls(
            rewards=torch.cat(rewards),
            inverse_std=of_members([scale.inverse_std for scale in scales]),
            has_variance=of_members([float(scale.has_variance) for scale in scales]) > 0,
            loss_coefficients=normalization.loss_coefficients(method.loss_normalization, sampled, max_new_tokens),
            sampled_tokens=sampled.double(),
            threshold_growth=importance.threshold_growth(sampled, algorithm.is_threshold_length),
            baseline=torch.cat(before),
            scales=scales,
            group_sizes=tuple(sizes.tolist()),
            anchor=algorithm.behavior_anchor * (1.0 - previous_ess),
        )

    # --- samples of groups ----------------------------------------------------------------------

    @property
    def first_members(self) -> Tensor:
        """Number of every group's first sample: int64 [groups]."""
        return torch.tensor([0, *self.group_sizes[:-1]]).cumsum(0)

    def members(self, group: int) -> list[int]:
        """Numbers of the samples of group number ``group``."""
        start = sum(self.group_sizes[:group])
        return list(range(start, start + self.group_sizes[group]))

    def of_samples(self, index: Sequence[int], device: torch.device | None = None) -> SampleNumbers:
        """Numbers of the samples ``index`` on ``device`` (None: the CPU), by one copy that nobody waits for."""
        chosen = list(index)
        names = ("rewards", "baseline", "inverse_std", "loss_coefficients", "threshold_growth")
        table = torch.stack([*(getattr(self, name)[chosen] for name in names), self.has_variance[chosen].double()])
        if device is not None:
            table = platform.to_device(table, device)
        rewards, baseline, inverse_std, loss_coefficients, growth, varies = table.unbind()
        return SampleNumbers(rewards, baseline, inverse_std, loss_coefficients, growth, varies > 0, self.anchor)

    def token_slice(self, sample: int) -> slice:
        """Where in ``token_log_ratios`` the tokens of a sample are."""
        start = int(self.sampled_tokens[:sample].sum())
        return slice(start, start + int(self.sampled_tokens[sample]))

    # --- agreement ------------------------------------------------------------------------------

    def agree(self, parallel: Parallel) -> None:
        """Every sample's numbers on every rank, by one SUM. RuntimeError when a sample has no owner, or several."""
        if not parallel.reports_trajectories:
            self.owners.zero_()
        self.unpack(agree_sum(self.packed(), parallel))

    def packed(self) -> Tensor:
        """One vector to be summed over ranks; samples that another rank owns are left out."""
        table = torch.stack([getattr(self, name).double() for name in _AGREED], dim=1)
        owned = torch.where(self.owners[:, None] > 0, table, 0.0)
        return torch.cat([owned.reshape(-1), torch.tensor(astuple(self.ranks), dtype=torch.float64)])

    def unpack(self, summed: Tensor) -> None:
        """Take what all ranks agree on; RuntimeError when a sample has no owner or several, but for an aborted step."""
        numbers = len(astuple(self.ranks))
        self.ranks = RankSums(*summed[-numbers:].tolist())
        for name, column in zip(_AGREED, summed[:-numbers].view(-1, len(_AGREED)).unbind(1), strict=True):
            setattr(self, name, column.to(getattr(self, name).dtype))
        if not self.aborted and not bool((self.owners == 1).all()):
            raise RuntimeError("a trajectory of the batch was computed by no rank, or by several")

    @property
    def aborted(self) -> bool:
        """Whether any rank has aborted the step: then nothing that was found means anything."""
        return self.ranks.aborted > 0

    @property
    def finite(self) -> bool:
        """True when every log ratio, norm and gradient on every rank is finite."""
        norms = self.grad_norm[self.has_norm]
        return bool(self.log_ratio.isfinite().all() and norms.isfinite().all()) and not self.ranks.non_finite_gradients
