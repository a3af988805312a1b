"""Method presets: what ``algorithm.method`` stands for, without torch.

A preset names the pure functions of ``algorithm`` that the learner calls, and their defaults; the learner never
compares a method's name. Keys that are given in ``[algorithm]`` override single fields of the preset. A new method
whose functions exist is one preset here; a new surrogate is one function in ``algorithm/surrogates.py``.

    weights    what a ratio becomes before it multiplies a gradient (``algorithm.importance.LOG_WEIGHTS``)
    surrogate  token coefficients from ratios and advantages (``algorithm.surrogates.SURROGATES``).
               "weighted" is linear in the advantage, and the only one that OPOB can serve
    statistic  one number of the whole batch that the surrogate needs first, for which every pack takes
               another forward (``algorithm.surrogates.STATISTICS``); "" when none
    ratio_low, ratio_high   bounds of the ratio, absolute (PPO's 1 - eps and 1 + eps)
    whole_batch   the surrogate has terms without an advantage: groups of equal rewards have a gradient, too
    step_bound, spike_clip   bounds of the step beside ESS (``algorithm.step_bounds``)

The papers are cited at the functions. Presets marked *sketch* are written from an abstract, not from code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: Baselines that need per-trajectory gradient norms.
OPOB_BASELINES = ("opob", "opob_leave_one_out")
#: Statistics that ``algorithm.second_moment`` bounds.
SECOND_MOMENTS = ("second_moment", "second_moment_range")
#: Surrogates that look at a trajectory's tokens as a whole or in order.
ORDERED_SURROGATES = ("gspo", "veto", "asymmetric", "ctpo", "fspo", "geometric_mask", "token_veto")
#: Surrogates that look at ``ratio_low`` or ``ratio_high``.
BOUNDED_SURROGATES = (
    *("ppo_clip", "decoupled_ppo", "gspo", "cispo", "veto"),
    *("ctpo", "fspo", "geometric_mask", "token_veto"),
)
#: Surrogates that truncate weights at ``is_threshold``.
TRUNCATED_SURROGATES = ("decoupled_ppo", "geometric_mask", "token_veto")


@dataclass(frozen=True)
class MethodPreset:
    """One method; every field is also the default of the key of that name in ``[algorithm]``."""

    summary: str
    baseline: str = "group_mean"
    is_level: str = "none"
    weights: str = "truncated"
    surrogate: str = "weighted"
    statistic: str = ""
    ess_scaling: bool = False
    normalize_std: bool = True
    loss_normalization: str = "sequence_token_mean"
    ratio_low: float = 0.0
    ratio_high: float = math.inf
    whole_batch: bool = False
    step_bound: str = "off"
    spike_clip: float = 0.0

    @property
    def linear(self) -> bool:
        """True when the gradient is linear in the advantage, as OPOB requires."""
        return self.surrogate == "weighted"

    @property
    def weighs_parts(self) -> bool:
        """True when weights are of parts of a trajectory, tokens or turns, and so inside the norm of its gradient."""
        return self.is_level in ("token", "turn")

    @property
    def bounded(self) -> bool:
        """True when ``ratio_low`` and ``ratio_high`` have an effect."""
        return self.surrogate in BOUNDED_SURROGATES or (self.weights == "band" and self.is_level != "none")

    @property
    def corrected(self) -> bool:
        """True when off-policy data is corrected for: by weights, or by the surrogate's own ratios."""
        return not self.linear or self.is_level != "none"

    @property
    def needs_norms(self) -> bool:
        """True when the baseline is made of per-trajectory gradient norms."""
        return self.baseline in OPOB_BASELINES


METHODS: Mapping[str, MethodPreset] = {
    "vcpo": MethodPreset(
        "OPOB baseline, ESS step size, truncated sequence weights", "opob", "sequence", ess_scaling=True
    ),
    "vcpo_plus": MethodPreset(
        "beyond the paper: VCPO with a trust region over the lag",
        "opob",
        "sequence",
        ess_scaling=True,
        step_bound="relative_kl",
        spike_clip=3.0,
    ),
    "vcpo_ess_only": MethodPreset("VCPO without OPOB: group mean", is_level="sequence", ess_scaling=True),
    "vcpo_opob_only": MethodPreset("VCPO without the ESS step size", "opob", "sequence"),
    "reinforce": MethodPreset(
        "score function, no baseline, no correction",
        "zero",
        normalize_std=False,
        loss_normalization="sequence_token_sum",
    ),
    "rloo": MethodPreset(
        "REINFORCE with a leave-one-out mean",
        "leave_one_out",
        normalize_std=False,
        loss_normalization="sequence_token_sum",
    ),
    "grpo": MethodPreset(
        "group mean and std, clipped token ratios", surrogate="ppo_clip", ratio_low=0.8, ratio_high=1.2
    ),
    "dr_grpo": MethodPreset(
        "GRPO without std and length terms",
        surrogate="ppo_clip",
        normalize_std=False,
        loss_normalization="constant",
        ratio_low=0.8,
        ratio_high=1.2,
    ),
    "ppo_clip": MethodPreset(
        "PPO's clip, token mean, group mean in place of a critic",
        surrogate="ppo_clip",
        loss_normalization="token_mean",
        ratio_low=0.8,
        ratio_high=1.2,
    ),
    "decoupled_ppo": MethodPreset(
        "PPO's clip around the proximal policy, truncated weights to the behaviour",
        surrogate="decoupled_ppo",
        loss_normalization="token_mean",
        ratio_low=0.8,
        ratio_high=1.2,
    ),
    "gspo": MethodPreset(
        "clip of the length-normalised sequence ratio", surrogate="gspo", ratio_low=1 - 3e-4, ratio_high=1 + 4e-4
    ),
    "tis_token": MethodPreset("truncated token weights", is_level="token"),
    "tis_sequence": MethodPreset("truncated sequence weights", is_level="sequence"),
    "mis": MethodPreset("sequence weights, zero above the threshold", is_level="sequence", weights="masked"),
    "icepop": MethodPreset(
        "token weights, zero outside a band", is_level="token", weights="band", ratio_low=0.5, ratio_high=5.0
    ),
    "m2po": MethodPreset(
        "M2PO as its paper words it: tokens of extreme ratio dropped until the second moment is small",
        surrogate="m2po",
        statistic="second_moment",
        loss_normalization="token_mean",
    ),
    "m2po_clip": MethodPreset(
        "M2PO as its authors released it: PPO's clip to one range, solved so that the second moment is small",
        surrogate="m2po_clip",
        statistic="second_moment_range",
        loss_normalization="token_mean",
    ),
    "cispo": MethodPreset(
        "clipped, detached token weights", surrogate="cispo", loss_normalization="token_mean", ratio_high=5.0
    ),
    "p3o": MethodPreset(
        "token ratios capped at the batch's ESS, which also sets the weight of KL to the behaviour",
        surrogate="p3o",
        statistic="token_ess",
        loss_normalization="token_mean",
        whole_batch=True,
    ),
    "mu_grpo": MethodPreset(
        "sketch: wide clip, no updates behind a veto in negative answers",
        surrogate="veto",
        ratio_low=0.2,
        ratio_high=5.0,
    ),
    "asymmetric": MethodPreset("sequence ratios for negative answers only, capped at 1", surrogate="asymmetric"),
    "ctpo": MethodPreset(
        "clip of the ratio of the tokens so far, wider by the root of their number",
        surrogate="ctpo",
        loss_normalization="token_mean",
        ratio_low=math.exp(-0.025),
        ratio_high=math.exp(0.05),
    ),
    "fspo": MethodPreset(
        "sketch: clip of the sequence ratio, wider by the root of its length",
        surrogate="fspo",
        loss_normalization="sequence_token_sum",
        ratio_low=0.95,
        ratio_high=1.05,
    ),
    "mis_geometric": MethodPreset(
        "truncated token weights, answers dropped whose geometric mean ratio leaves a band",
        surrogate="geometric_mask",
        ratio_low=0.999,
        ratio_high=1.001,
    ),
    "tis_veto": MethodPreset(
        "truncated token weights, answers dropped that have a token of vanishing ratio",
        surrogate="token_veto",
        ratio_low=1e-4,
    ),
}
