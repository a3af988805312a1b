"""Norms and the embedding: gradients that are sums over tokens, without a matrix product."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Parameter

from ..megatron.latent import LatentNorm
from ..megatron.parallel import Parallel
from .pack_scores import PackScores, ScoreSwitch, gather_rows
from .tied import receive_tied_rows, token_pairs


@dataclass(frozen=True)
class _Norm:
    """Constants of one call of a norm."""

    scores: PackScores
    name: str
    weight: Parameter
    eps: float
    kind: str
    ids: Tensor


class _ScoredNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, in fp32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: _Norm) -> Any:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + norm.eps)
        ctx.save_for_backward(x, rstd)
        ctx.norm = norm
        return (x.float() * rstd).to(x.dtype) * norm.weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, rstd = ctx.saved_tensors
        norm: _Norm = ctx.norm
        normalized = x.float() * rstd
        g = grad.float() * norm.weight.float()
        dx = rstd * (g - normalized * (g * normalized).mean(-1, keepdim=True))
        rows = (grad.float() * normalized).reshape(x.shape[0], -1, x.shape[-1]).sum(1)
        norm.scores.add_vector(norm.name, norm.weight, rows, norm.ids, norm.kind)
        return dx.to(x.dtype), None


def attach_norm(module: Any, switch: ScoreSwitch, names: dict[int, str], path: str, parallel: Parallel) -> None:
    """An RMSNorm of hidden states, or of the heads that this tensor rank holds."""
    original = module.forward
    of_heads = path.endswith(("q_layernorm", "k_layernorm")) and not isinstance(module, LatentNorm)
    sequence_parallel = parallel.sequence_parallel and not of_heads
    kind = "partial" if sequence_parallel or of_heads else "replicated"
    name = names[id(module.weight)]

    def forward(self: Any, x: Tensor) -> Tensor:
        scores = switch.active()
        if scores is None:
            return original(x)
        ids = scores.sequence if sequence_parallel else scores.dense
        return _ScoredNorm.apply(x, _Norm(scores, name, self.weight, self.eps, kind, ids))

    module.forward = types.MethodType(forward, module)


@dataclass(frozen=True)
class _Lookup:
    """Constants of one call of the embedding. ``tied``: the output layer is the same parameter."""

    scores: PackScores
    name: str
    weight: Parameter
    first: int
    tied: bool


class _ScoredEmbedding(torch.autograd.Function):
    """Embedding lookup of this rank's share of the vocabulary; tokens of other ranks read as zeros."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, ids: Tensor, lookup: _Lookup) -> Any:
        """``ids`` int64 [T]: tokens; ``start``: a scalar that makes autograd come back here."""
        ctx.lookup = lookup
        local = ids - lookup.first
        inside = (local >= 0) & (local < len(lookup.weight))
        out = torch.nn.functional.embedding(torch.where(inside, local, 0), lookup.weight)
        return out.masked_fill(~inside[:, None], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        lookup: _Lookup = ctx.lookup
        scores, parallel = lookup.scores, lookup.scores.parallel
        pairs = token_pairs(scores, lookup.first, len(lookup.weight))
        whole = gather_rows(grad, parallel.context_group) if parallel.context_size > 1 else grad
        rows = grad.new_zeros(len(pairs.token), grad.shape[1], dtype=torch.float32)
        rows.index_add_(0, pairs.inverse, whole[pairs.tokens].float())
        if lookup.tied:
            cross = (rows * receive_tied_rows(scores, pairs, grad.shape[1])).double().sum(1)
            scores.owned.index_add_(0, pairs.owner, 2 * cross)
        # every context-parallel rank has the whole rows now: each keeps its share of them
        mine = slice(parallel.context_rank, None, parallel.context_size)
        rows, owner, token = rows[mine], pairs.owner[mine], pairs.token[mine]
        scores.owned.index_add_(0, owner, rows.double().square().sum(1))
        scores.gradients.rows(scores, lookup.name, lookup.weight, owner, token, rows)
        return None, None, None


def attach_embedding(module: Any, switch: ScoreSwitch, names: dict[int, str], *, tied: bool) -> None:
    """The vocabulary-parallel embedding."""
    original = module.forward
    name = names[id(module.weight)]
    start = torch.zeros((), requires_grad=True, device=module.weight.device)

    def forward(self: Any, input_: Tensor) -> Tensor:
        scores = switch.active()
        if scores is None:
            return original(input_)
        lookup = _Lookup(scores, name, self.weight, self.vocab_start_index, tied)
        out = _ScoredEmbedding.apply(start, input_.reshape(-1), lookup).view(*input_.shape, -1)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(out.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(out, group=self.tp_group)

    module.forward = types.MethodType(forward, module)
