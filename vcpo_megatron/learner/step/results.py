"""What a step found, row by row: agreed on by one reduction, then turned into metrics and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...algorithm.advantages import GroupScale
from ...types import Batch, TrajectoryResult
from ..batch.packing import Sample


class RowTable:
    """Numbers of the N trajectories of a batch, float64 on the CPU; a rank fills the rows that it knows.

    Columns: owners (how many ranks claim the row), log_ratio, logprob_sum (sum of v_t log pi_t over
    sampled tokens, see ``Objective.reported``), entropy_sum, has_norm, grad_norm, has_baseline, baseline,
    fell_back, kl_sum (estimates of KL to the reference over sampled tokens), and of |log pi - log mu| on the
    tokens of the current version mismatch_sum, mismatch_max and mismatch_tokens.
    """

    _COLUMNS = (
        "owners",
        "log_ratio",
        "logprob_sum",
        "entropy_sum",
        "has_norm",
        "grad_norm",
        "has_baseline",
        "baseline",
        "fell_back",
        "kl_sum",
        "mismatch_sum",
        "mismatch_max",
        "mismatch_tokens",
    )
    _RANK_NUMBERS = 5

    def __init__(self, rows: int) -> None:
        self._values = torch.zeros(rows, len(self._COLUMNS), dtype=torch.float64)
        self._left = 0.0
        self._non_finite_gradients = 0.0
        self._padded_tokens = 0.0
        self._accumulator_error = (0.0, 0.0)

    def record_forward(
        self, rows: Sequence[int], log_ratio: torch.Tensor, logprob_sum: torch.Tensor, entropy_sum: torch.Tensor
    ) -> None:
        """What a forward of these rows gave, float64 [n] each."""
        ones = torch.ones(len(rows), dtype=torch.float64)
        self._values[list(rows), :4] = torch.stack([ones, log_ratio, logprob_sum, entropy_sum], dim=1)

    def record_norms(self, rows: Sequence[int], norms: torch.Tensor) -> None:
        """Exact |g_i| float64 [n]."""
        self._values[list(rows), 4:6] = torch.stack([torch.ones_like(norms), norms], dim=1).double()

    def record_baselines(self, rows: Sequence[int], baselines: torch.Tensor, fell_back: bool) -> None:
        """b_i float64 [n] of one group, found from norms or from their proxy."""
        ones = torch.ones_like(baselines)
        self._values[list(rows), 6:9] = torch.stack([ones, baselines, ones * float(fell_back)], dim=1).double()

    def record_kl(self, rows: Sequence[int], kl_sum: torch.Tensor) -> None:
        """Sums of the KL estimates of these rows, float64 [n]."""
        self._values[list(rows), 9] = kl_sum

    def record_mismatch(self, rows: Sequence[int], found: torch.Tensor) -> None:
        """Sum, largest and number of |log pi - log mu| on tokens of the current version, float64 [n, 3]."""
        self._values[list(rows), 10:13] = found

    def record_rank(
        self,
        *,
        gradients_are_finite: bool,
        padded_tokens: int,
        accumulator_error: tuple[float, float] = (0.0, 0.0),
        left: bool = False,
    ) -> None:
        """What this rank found as a whole; ``padded_tokens`` is 0 on all ranks but one of those that share packs.
        ``left``: it has left the step before its end."""
        self._left = float(left)
        self._non_finite_gradients = 0.0 if gradients_are_finite else 1.0
        self._padded_tokens = float(padded_tokens)
        self._accumulator_error = accumulator_error

    def packed(self) -> torch.Tensor:
        """One vector to be summed over ranks; rows that another rank claims are left out."""
        values = torch.where(self._values[:, :1] > 0, self._values, 0.0)
        numbers = [self._left, self._non_finite_gradients, self._padded_tokens, *self._accumulator_error]
        return torch.cat([values.reshape(-1), torch.tensor(numbers, dtype=torch.float64)])

    @classmethod
    def from_sum(cls, packed: torch.Tensor) -> RowTable:
        """The table that all ranks agree on; RuntimeError when a row has no owner or several, but for a step
        that was left."""
        table = cls(0)
        table._values = packed[: -cls._RANK_NUMBERS].reshape(-1, len(cls._COLUMNS))
        left, finite, padded, error, size = packed[-cls._RANK_NUMBERS :].tolist()
        table._left = left
        table._non_finite_gradients, table._padded_tokens, table._accumulator_error = finite, padded, (error, size)
        if not table.left and not bool((table._column("owners") == 1).all()):
            raise RuntimeError("a trajectory of the batch was computed by no rank, or by several")
        return table

    def _column(self, name: str) -> torch.Tensor:
        return self._values[:, self._COLUMNS.index(name)]

    @property
    def log_ratio(self) -> torch.Tensor:
        """l_i; a view that may be written."""
        return self._column("log_ratio")

    @property
    def logprob_sum(self) -> torch.Tensor:
        return self._column("logprob_sum")

    @property
    def entropy_sum(self) -> torch.Tensor:
        return self._column("entropy_sum")

    @property
    def grad_norm(self) -> torch.Tensor:
        """|g_i|; nan for a trajectory without exact norm."""
        return torch.where(self._column("has_norm") > 0, self._column("grad_norm"), math.nan)

    @property
    def baseline(self) -> torch.Tensor:
        """b_i found from norms or their proxy; nan where none was."""
        return torch.where(self._column("has_baseline") > 0, self._column("baseline"), math.nan)

    @property
    def kl_sum(self) -> torch.Tensor:
        return self._column("kl_sum")

    @property
    def mismatch(self) -> torch.Tensor:
        """(sum, largest, number) of |log pi - log mu| on tokens of the current version: float64 [N, 3]."""
        return self._values[:, 10:13]

    @property
    def accumulator_error(self) -> float:
        """Relative error of accumulators of less than fp32, on the rows that are probed."""
        error, size = self._accumulator_error
        return math.sqrt(error / size) if size > 0 else 0.0

    @property
    def fell_back(self) -> torch.Tensor:
        return self._column("fell_back") > 0

    @property
    def left(self) -> bool:
        """Whether any rank has left the step: it does not count then, and nothing else here means anything."""
        return self._left > 0

    @property
    def padded_tokens(self) -> float:
        """Tokens of padding that went through the model, on all replicas."""
        return self._padded_tokens

    @property
    def finite(self) -> bool:
        """True when every log ratio, norm and gradient on every rank is finite."""
        norms = self._column("grad_norm")[self._column("has_norm") > 0]
        return bool(self.log_ratio.isfinite().all() and norms.isfinite().all()) and self._non_finite_gradients == 0.0


@dataclass(frozen=True)
class RowFacts:
    """What is known of the N rows before the step, in the order of the batch.

    rewards, inverse_std, centre, token_coefficients, sampled_tokens: float64 [N];
    has_variance: bool [N], of the row's group. ``centre`` is the baseline where norms give none.
    ``linear``: the method's gradient is linear in the advantage.
    """

    rewards: torch.Tensor
    inverse_std: torch.Tensor
    centre: torch.Tensor
    has_variance: torch.Tensor
    token_coefficients: torch.Tensor
    sampled_tokens: torch.Tensor
    group_sizes: tuple[int, ...]
    linear: bool = True

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Sample]],
        scales: Sequence[GroupScale],
        centres: torch.Tensor,
        coefficients: torch.Tensor,
        *,
        linear: bool = True,
    ) -> RowFacts:
        """Facts of the rows of ``groups``; ``scales`` has one entry a group, ``centres`` and ``coefficients`` one
        a row."""
        rows = [row.trajectory for group in groups for row in group]
        sizes = torch.tensor([len(group) for group in groups], dtype=torch.int64)

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes)

        return cls(
            rewards=torch.tensor([t.reward for t in rows], dtype=torch.float64),
            inverse_std=column([scale.inverse_std for scale in scales]),
            centre=centres,
            has_variance=column([float(scale.has_variance) for scale in scales]) > 0,
            token_coefficients=coefficients,
            sampled_tokens=torch.tensor([t.num_sampled for t in rows], dtype=torch.float64),
            group_sizes=tuple(sizes.tolist()),
            linear=linear,
        )

    def rows_of(self, group: int) -> list[int]:
        """Rows of the batch that group number ``group`` holds."""
        start = sum(self.group_sizes[:group])
        return list(range(start, start + self.group_sizes[group]))

    def baselines(self, table: RowTable) -> torch.Tensor:
        """b of every row: what norms gave where they did, else what rewards gave."""
        return torch.where(table.baseline.isnan(), self.centre, table.baseline)


def step_metrics(
    table: RowTable,
    facts: RowFacts,
    weights: torch.Tensor,
    *,
    ess_ratio: float,
    ess_ratio_truncated: float,
    ess_scale: float,
    learning_rate: float,
    total_norm: float,
    skipped: bool,
    seconds: float,
) -> dict[str, float]:
    """The learner's share of a row of ``metrics.jsonl``."""
    advantage = (facts.rewards - facts.baselines(table)) * facts.inverse_std * weights
    # a method that is not linear in the advantage has it in its token coefficients already, zeros included
    factor = torch.where(facts.has_variance, advantage, 0.0) if facts.linear else torch.ones_like(advantage)
    norms = table.grad_norm[~table.grad_norm.isnan()]
    tokens = facts.sampled_tokens.sum()
    starts = torch.tensor([0, *facts.group_sizes[:-1]]).cumsum(0)
    return {
        "loss": -float((factor * facts.token_coefficients * table.logprob_sum).sum()),
        "reward/mean": float(facts.rewards.mean()),
        "ess/ratio": ess_ratio,
        "ess/ratio_truncated": ess_ratio_truncated,
        "ess/lr_scale": ess_scale,
        "lr/effective": learning_rate,
        "weight/max": float(weights.max()),
        "grad_norm/total": total_norm,
        "grad_norm/trajectory_mean": float(norms.mean()) if len(norms) else math.nan,
        "grad_norm/trajectory_max": float(norms.max()) if len(norms) else math.nan,
        "baseline/fallbacks": float(table.fell_back[starts].sum()),
        "baseline/accumulator_error": table.accumulator_error,
        "groups/zero_variance": float((~facts.has_variance)[starts].sum()),
        "kl/behavior": -float(table.log_ratio.sum() / tokens),
        "kl/reference": float(table.kl_sum.sum() / tokens),
        "entropy": float(table.entropy_sum.sum() / tokens),
        "tokens/trained": float(tokens),
        "tokens/padded": table.padded_tokens,
        "time/forward_backward": seconds,
        "step/skipped": float(skipped),
    }


def trajectory_results(
    table: RowTable, facts: RowFacts, weights: torch.Tensor, batch: Batch
) -> tuple[TrajectoryResult, ...]:
    """One result a trajectory, in the order of the batch."""
    rows = zip(
        (t for group in batch.groups for t in group.trajectories),
        table.log_ratio.tolist(),
        weights.tolist(),
        table.grad_norm.tolist(),
        facts.baselines(table).tolist(),
        strict=True,
    )
    return tuple(
        TrajectoryResult(t.group_id, t.sample_index, log_ratio, weight, norm, baseline)
        for t, log_ratio, weight, norm, baseline in rows
    )
