"""KL to a reference and entropy: terms of the loss that no reward, weight or baseline ever scales.

    L_reg = sum_i c_i sum_t [ kl_coef k3_t - entropy_coef H_t ],   k3 = exp(d) - d - 1,  d = log ref - log pi

over ALL trajectories of the batch, groups without variance included, c_i the update's own normalisation.
k3 is Schulman's estimator of KL(pi || ref) on the sampled token (http://joschu.net/blog/kl-approx.html,
as in GRPO, arXiv 2402.03300 eq. 4); H_t is exact, over the whole vocabulary. The terms are in no
trajectory's |g_i|: with exact norms they take a backward through a forward of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...algorithm.importance import TOKEN_LIMIT, bounded_exp


def regularizer(
    kl_coef: float, entropy_coef: float, logprobs: Tensor, entropy: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(kl_coef k3 - entropy_coef H, k3 detached), [T] each, of log-probs, entropies and reference log-probs [T].

    k3 = exp(d) - d - 1 with d = log pi_ref - log pi; exp goes on along its tangent from d = ``TOKEN_LIMIT`` on: a
    token that the policy has left is pulled back, and no token's gradient is infinite.
    Masked positions may hold anything: select with ``torch.where`` afterwards.
    """
    k3 = torch.zeros_like(logprobs)
    if reference is not None:
        difference = reference - logprobs
        beyond = torch.relu(difference - TOKEN_LIMIT)
        k3 = bounded_exp(difference) + math.exp(TOKEN_LIMIT) * beyond - difference - 1.0
    return kl_coef * k3 - entropy_coef * entropy, k3.detach()


class ReferenceWeights:
    """This rank's parameters as they were when this object was made, on the host; ``swapped`` exchanges them.

    No device memory beyond one tensor: every parameter changes places with its copy, and back, bit for bit.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._copies = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @property
    def bytes(self) -> int:
        """Host memory that this rank's copy takes."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model is the reference inside the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            held = parameter.detach().to("cpu", copy=True)
            parameter.copy_(copy)
            copy.copy_(held)
