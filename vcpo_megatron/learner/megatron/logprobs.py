"""Log-probabilities and entropy from vocabulary-parallel logits, in chunks, in fp32.

No full fp32 copy of the logits is ever made: forward and backward walk over the tokens in chunks of
bounded size, and the gradient is written over the logits themselves, which nothing else reads then.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

#: Elements of one fp32 chunk of logits: 64 MiB.
CHUNK_ELEMENTS = 1 << 24


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // max(1, vocabulary))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _scaled(logits: torch.Tensor, temperature: float, real: int) -> torch.Tensor:
    """fp32 copy of a chunk, divided by the temperature, with padded vocabulary rows at -inf."""
    scaled = logits.float() / temperature
    if real < scaled.shape[-1]:
        scaled[:, real:] = float("-inf")
    return scaled


class VocabParallelLogProbs(torch.autograd.Function):
    """log pi(label) and entropy of softmax(logits / temperature).

    logits [T, V/tp] of any float dtype; labels int64 [T], global ids. Returns (logprobs, entropy), both
    float32 [T], and both differentiable. ``vocab_size`` is the number of real tokens: ids
    beyond it are padding of the vocabulary and never take part in the softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, width = logits.shape
        first = dist.get_rank(group) * width
        real = min(max(vocab_size - first, 0), width)
        parallel = dist.get_world_size(group) > 1
        local = labels - first
        here = (local >= 0) & (local < real)
        target = logits.new_zeros(tokens, dtype=torch.float32)
        normalizer = torch.empty_like(target)
        entropy = torch.empty_like(target)
        for cut in _chunks(tokens, width):
            z = _scaled(logits[cut], temperature, real)
            picked = z.gather(1, local[cut].clamp(0, width - 1)[:, None])[:, 0]
            target[cut] = torch.where(here[cut], picked, 0.0)
            top = z.max(dim=1).values
            if parallel:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            z -= top[:, None]
            p = z.exp()
            # sum p and sum p z over the vocabulary; a padded row has p = 0, z = -inf and counts as 0
            sums = torch.stack([p.sum(1), torch.where(p > 0, p * z, 0.0).sum(1), target[cut]])
            if parallel:
                dist.all_reduce(sums, group=group)
            target[cut] = sums[2]
            normalizer[cut] = top + sums[0].log()
            entropy[cut] = sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, here, normalizer, entropy)
        ctx.temperature, ctx.real = temperature, real
        ctx.set_materialize_grads(False)
        return target - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, entropy_grad: torch.Tensor | None) -> Any:
        """d log pi_y / dz = (1[y] - p) / T,  d H / dz = - p (log p + H) / T."""
        logits, local, here, normalizer, entropy = ctx.saved_tensors
        width = logits.shape[1]
        grad = torch.zeros_like(normalizer) if grad is None else grad
        out = logits.detach()  # of the same memory; a second reader of the logits would raise: their version changed
        for cut in _chunks(*logits.shape):
            logp = _scaled(logits[cut], ctx.temperature, ctx.real).sub_(normalizer[cut, None])
            chunk = logp.exp().neg_()
            from_entropy = None
            if entropy_grad is not None:
                g = entropy_grad[cut, None]
                from_entropy = chunk * (logp + entropy[cut, None]) * (g / ctx.temperature)
                from_entropy = torch.where(g == 0, 0.0, from_entropy)
            hit = torch.where(here[cut], 1.0, 0.0)[:, None]
            chunk.scatter_add_(1, local[cut].clamp(0, width - 1)[:, None], hit)
            # a row without gradient stays exactly zero, whatever its logits hold
            g = grad[cut, None]
            chunk = torch.where(g == 0, 0.0, chunk * (g / ctx.temperature))
            if from_entropy is not None:
                padding = chunk[:, ctx.real :]
                chunk += from_entropy
                padding.zero_()  # a padded row has p = 0 and log p = -inf
            out[cut] = chunk.to(out.dtype)
        return out, None, None, None, None


def token_logprobs(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log pi(label), entropy), float32 [T] each, of logits [T, V/tp]; see ``VocabParallelLogProbs``."""
    return VocabParallelLogProbs.apply(logits, labels, temperature, vocab_size, group)


@torch.no_grad()
def squared_score_norms(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocab_size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """|d log pi(label) / d logits|^2 = (1 - 2 p_y + sum_v p_v^2) / T^2, float32 [T]; arguments as above."""
    tokens, width = logits.shape
    first = dist.get_rank(group) * width
    real = min(max(vocab_size - first, 0), width)
    out = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    for cut in _chunks(tokens, width):
        z = _scaled(logits[cut], temperature, real)
        top = z.max(dim=1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        p = z.sub_(top[:, None]).exp_()
        local = labels[cut] - first
        picked = p.gather(1, local.clamp(0, width - 1)[:, None])[:, 0]
        picked = torch.where((local >= 0) & (local < real), picked, 0.0)
        sums = torch.stack([p.sum(1), p.square().sum(1), picked])
        dist.all_reduce(sums, group=group)
        out[cut] = (1.0 - 2.0 * sums[2] / sums[0] + sums[1] / sums[0].square()) / temperature**2
    return out
