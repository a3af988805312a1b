"""Baselines of a prompt group: OPOB and its controls (VCPO, arXiv 2602.17616; docs/method.md).

OPOB is the constant b that minimises sum_i u_i^2 (R_i - b)^2 |g_i|^2, the second moment of the
group's gradient estimate:

    b = sum_i p_i R_i,    p = softmax(2 log u_i + 2 log |g_i|)

The weight u enters once: |g_i| is the norm of the unweighted score gradient. (With token weights,
pass log u = 0 and the norm of the weighted one.) Everything stays in log space and b is taken as
R_1 + sum_i p_i (R_i - R_1): scaling all norms or all weights leaves b unchanged, equal rewards give
b = R to the last bit, and no epsilon pulls b towards zero.

A trajectory with zero norm or zero weight has log -inf and takes no part. Where p does not exist
(every term -inf, or any term nan or +inf) the group mean is used and reported as a fallback; a
non-finite norm moreover makes the learner skip the step, so nothing may raise here. ``from_norms`` stays where its
arguments are: on a device nothing of it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Baseline:
    """b of one group; ``fell_back`` tells that OPOB was undefined and the group mean was taken."""

    value: float
    fell_back: bool


@dataclass(frozen=True, slots=True)
class TrajectoryBaselines:
    """One b for each trajectory, float64 [n]; ``plain`` bool [n]: those that are plain means."""

    values: Tensor
    plain: Tensor

    @property
    def fallbacks(self) -> int:
        """How many are plain means."""
        return int(self.plain.sum())


def opob(log_u: Tensor, log_grad_norm: Tensor, rewards: Tensor) -> Baseline:
    """The optimal constant baseline of one group.

    log_u          float [n]  log of the weight, raw (l_i) or truncated (min(l_i, log c))
    log_grad_norm  float [n]  log |g_i|, unweighted; -inf for a zero gradient
    rewards        float [n]

    Computed in float64. Raises ValueError on shapes that differ or n = 0.
    """
    value, fell_back = _opob(log_u, log_grad_norm, rewards)
    return Baseline(float(value), bool(fell_back))


def _opob(log_u: Tensor, log_grad_norm: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """b float64 and whether it is the mean, bool: scalars where the arguments are."""
    _require_group(log_u=log_u, log_grad_norm=log_grad_norm, rewards=rewards)
    rewards = rewards.detach().double()
    probability = torch.softmax(_log_terms(log_u, log_grad_norm), dim=0)
    defined = probability.isfinite().all()
    return torch.where(defined, _average(probability, rewards), _mean(rewards)), ~defined


def leave_one_out_opob(log_u: Tensor, log_grad_norm: Tensor, rewards: Tensor) -> TrajectoryBaselines:
    """OPOB of each trajectory's group without that trajectory: unbiased, and noisier: one
    that dominates its group gets the baseline of those that tell little of it.

    Arguments as for ``opob``. Where the others have no usable term, the mean of the others is taken
    (the trajectory's own reward in a group of one) and counted.
    """
    _require_group(log_u=log_u, log_grad_norm=log_grad_norm, rewards=rewards)
    rewards = rewards.detach().double()
    n = len(rewards)
    itself = torch.eye(n, dtype=torch.bool, device=rewards.device)
    others = torch.softmax(_log_terms(log_u, log_grad_norm).expand(n, n).masked_fill(itself, -torch.inf), dim=1)
    usable = others.isfinite().all(dim=1, keepdim=True)
    plain = (~itself).double() / max(n - 1, 1)
    # In a group of one both rows are empty, so the average below is the reference reward: its own.
    values = _average(torch.where(usable, others, plain), rewards)
    return TrajectoryBaselines(values, ~usable[:, 0])


def group_mean(rewards: Tensor) -> Baseline:
    """The plain mean of rewards [n] (the control: GRPO's baseline)."""
    _require_group(rewards=rewards)
    return Baseline(float(_mean(rewards.detach().double())), False)


def zero(rewards: Tensor) -> Baseline:
    """No baseline; takes rewards [n] so that the controls are called alike."""
    _require_group(rewards=rewards)
    return Baseline(0.0, False)


def leave_one_out(rewards: Tensor) -> TrajectoryBaselines:
    """Mean reward of the other trajectories of the group [n] (RLOO, arXiv 2402.14740); its own in a group of one."""
    _require_group(rewards=rewards)
    values = rewards.detach().double()
    n = len(values)
    plain = torch.full_like(values, n == 1, dtype=torch.bool)
    if n == 1:
        return TrajectoryBaselines(values, plain)
    offsets = values - values[0]  # equal rewards stay exact
    return TrajectoryBaselines(values[0] + (offsets.sum() - offsets) / (n - 1), plain)


def before_norms(name: str, rewards: Tensor) -> Tensor:
    """b of each trajectory of a group as far as rewards give it: float64 [n].

    That is the baseline itself; for the two OPOB ones, which norms will give, the mean.
    """
    if name == "leave_one_out":
        return leave_one_out(rewards).values
    centre = zero(rewards) if name == "zero" else group_mean(rewards)
    return torch.full((len(rewards),), centre.value, dtype=torch.float64, device=rewards.device)


def from_norms(name: str, log_u: Tensor, log_grad_norm: Tensor, rewards: Tensor) -> TrajectoryBaselines:
    """b of each trajectory of a group by "opob" or "opob_leave_one_out"; arguments as for ``opob``."""
    if name == "opob_leave_one_out":
        return leave_one_out_opob(log_u, log_grad_norm, rewards)
    value, fell_back = _opob(log_u, log_grad_norm, rewards)
    return TrajectoryBaselines(value.expand(len(rewards)), fell_back.expand(len(rewards)))


def _log_terms(log_u: Tensor, log_grad_norm: Tensor) -> Tensor:
    return 2 * log_u.detach().double() + 2 * log_grad_norm.detach().double()


def _average(probability: Tensor, rewards: Tensor) -> Tensor:
    """R_1 + sum_i p_i (R_i - R_1) over the last dimension: exact for equal rewards."""
    return rewards[0] + (probability * (rewards - rewards[0])).sum(dim=-1)


def _mean(rewards: Tensor) -> Tensor:
    return _average(torch.full_like(rewards, 1.0 / len(rewards)), rewards)


def _require_group(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = next(iter(shapes.values()))
    if len(set(shapes.values())) != 1 or len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"expected tensors of one shape [n] with n > 0 for a group, got {shapes}")
