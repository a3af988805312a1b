"""Scale of a group's rewards (VCPO, arXiv 2602.17616; docs/method.md).

The gradient of a group is sum_i (R_i - b) s_i / std, s_i = w_i g_i. The standard deviation is the population one, the
same for every method.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupScale:
    """inverse_std 1/std (1.0 without ``normalize_std``), has_variance: rewards differ by more than rounding.

    A group without variance carries no gradient at all: its coefficients are 0 and its inverse_std is 1.0.
    """

    inverse_std: float
    has_variance: bool


def group_scale(rewards: Tensor, normalize_std: bool, has_variance: bool) -> GroupScale:
    """Scale of one group's rewards, float [n], n > 0; in float64. Whether they differ is the caller's to say
    (``types.has_variance``).

    Raises ValueError when a reward is not finite: no baseline or scale is defined then; and when equal rewards are said
    to differ.
    """
    if rewards.ndim != 1 or not rewards.numel():
        raise ValueError(f"rewards of a group have shape {list(rewards.shape)}, expected [n] with n > 0")
    values = rewards.detach().double()
    if not bool(values.isfinite().all()):
        raise ValueError(f"rewards of a group are {rewards.tolist()}: every reward must be finite")
    offsets = values - values[0]
    if not has_variance:
        return GroupScale(1.0, False)
    if not bool((offsets != 0).any()):
        raise ValueError(f"rewards of a group are {rewards.tolist()}: equal rewards have no variance")
    if not normalize_std:
        return GroupScale(1.0, True)
    # In units of the largest offset, so that squares of tiny differences do not vanish.
    unit = offsets.abs().max()
    return GroupScale(float(1.0 / (unit * (offsets / unit).std(correction=0))), True)
