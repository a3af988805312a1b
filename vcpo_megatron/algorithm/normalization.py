"""How the log-probs of a minibatch's sampled tokens are averaged (docs/method.md).

Trajectory i contributes g_i = c_i * sum_t grad log pi_theta(t). The coefficient c_i holds the whole
normalisation, 1/N included, and is always computed over the GLOBAL minibatch, so that gradients do
not depend on how trajectories are divided among ranks, groups or packs:

    sequence_token_mean   1 / (N T_i)          every trajectory counts the same
    token_mean            1 / sum_j T_j        every token counts the same
    sequence_token_sum    1 / N                long trajectories count more
    constant              1 / (N max_new)      the same, with the length budget as the unit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

RULES: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "sequence_token_mean": lambda tokens, max_new: 1.0 / (len(tokens) * tokens.clamp(min=1.0)),
    "token_mean": lambda tokens, max_new: (1.0 / tokens.sum()).expand(len(tokens)),
    "sequence_token_sum": lambda tokens, max_new: torch.full_like(tokens, 1.0 / len(tokens)),
    "constant": lambda tokens, max_new: torch.full_like(tokens, 1.0 / (len(tokens) * max_new)),
}


def loss_coefficients(rule: str, sampled_tokens: Tensor, max_new_tokens: int) -> Tensor:
    """c_i of every trajectory of the global minibatch: float64 [N].

    rule            a key of ``RULES`` (``loss_normalization``)
    sampled_tokens  int [N]  number of sampled (unmasked) tokens T_i; a trajectory with none adds
                             nothing to any sum, so its coefficient is only kept finite
    max_new_tokens  ``rollout.max_new_tokens``; used by "constant" only

    Raises ValueError for an unknown rule, a negative count, or a minibatch without any sampled token
    (which would train on nothing without a word).
    """
    if rule not in RULES:
        raise ValueError(f"loss_normalization = {rule!r}: expected one of {', '.join(RULES)}")
    if sampled_tokens.ndim != 1 or sampled_tokens.dtype.is_floating_point:
        raise ValueError(f"sampled_tokens is {sampled_tokens.dtype}{list(sampled_tokens.shape)}, expected integers [N]")
    if max_new_tokens <= 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: expected a positive number")
    if bool((sampled_tokens < 0).any()):
        raise ValueError(f"sampled_tokens holds {int(sampled_tokens.min())}: a count cannot be negative")
    if not bool((sampled_tokens > 0).any()):
        raise ValueError(
            f"the minibatch of {len(sampled_tokens)} trajectories has no sampled token: every loss mask is empty"
        )
    return RULES[rule](sampled_tokens.double(), max_new_tokens)
