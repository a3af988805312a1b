"""Drawing tokens: one uniform number a token from a counter-based generator, then inverse CDF.

The number for (seed, position) is a pure function, so a seeded request draws the same tokens
whatever else is in the batch. The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014), applied to the seed and to the position in turn.
"""

from __future__ import annotations

import numpy as np
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def splitmix64(state: np.ndarray) -> np.ndarray:
    """Output of SplitMix64 at ``state`` (uint64 array): its finalizer of state + gamma, modulo 2^64."""
    return _mix(state + _GAMMA)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) (float64 [B]) for ``seeds`` and ``positions`` (uint64 [B]): 53 bits each."""
    bits = splitmix64(splitmix64(seeds) + positions * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor | None, numbers: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row.

    logits [B, V]; temperatures float32 [B], None when all are 1, 0 for greedy; numbers float64 [B]
    in [0, 1). Returns ids int64 [B] and log-probs float32 [B]: log_softmax(logits / temperature) in
    float32 at the id (temperature 1 for greedy rows). The CDF is summed in float64, so that a large
    vocabulary's tail keeps its probability.
    """
    logits = logits.float()
    greedy = None
    if temperatures is not None:
        greedy = temperatures == 0
        logits = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    cdf = logprobs.exp().double().cumsum_(-1)
    targets = torch.from_numpy(numbers)[:, None] * cdf[:, -1:]
    ids = torch.searchsorted(cdf, targets, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]
    if greedy is not None and bool(greedy.any()):
        ids = torch.where(greedy, logits.argmax(-1), ids)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def input_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits [L, V]) in float32 at ``tokens`` [L]: float32 [L], temperature 1."""
    return torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[:, None])[:, 0]
