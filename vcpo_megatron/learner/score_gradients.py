"""Exact per-trajectory squared gradient norms, and weighted gradient sums, in one backward pass.

Every parameter of Megatron's local layers gets its gradient in one of three places: a tensor-parallel
linear layer (and its bias), the vocabulary-parallel embedding, an RMSNorm. ``attach`` replaces the
computation of exactly these on the module INSTANCES; no class and no Megatron source is changed. The
activations' gradients are what Megatron computes. The weight gradient is formed trajectory by
trajectory: with G_i, A_i the output gradients and inputs of trajectory i's tokens, its share is
W_i = G_i^T A_i, from which |g_i|^2 += |W_i|^2 (never scaled by w, R or std). What else becomes of W_i is
in ``weight_gradients``.

What is recorded belongs to one pack, so several packs may be in flight in a pipeline.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from .layers import RMSNorm
from .packing import Pack
from .weight_gradients import Accumulator, NormsOnly, WeightGradients


class UnsupportedLayer(RuntimeError):
    """A parameter whose gradient cannot be separated by trajectory."""


@dataclass
class PackScores:
    """What this rank's share of one pack's backward needs and finds.

    gradients               what becomes of weight gradients, set before the backward
    factors                 r and q, n numbers each, set before the backward where sums are accumulated
    accumulator             S_g of the group, set before the backward where sums are accumulated
    kept                    functions of the final coefficients [n] that finish the gradient, where it is deferred
    owned                   float64 [n]  squared norms over parameters that this tensor rank alone holds
    replicated              float64 [n]  squared norms over parameters that every tensor rank holds whole
    partial                 list of [n, d]: gradients of replicated parameters of which this tensor rank
                            saw only a part (norms under sequence parallelism, q/k norms under tensor
                            parallelism): to be summed over tensor ranks before they are squared
    """

    pack: Pack
    gradients: WeightGradients = field(default_factory=NormsOnly)
    factors: tuple[list[float], list[float]] = ([], [])
    accumulator: Accumulator = field(default_factory=Accumulator)
    kept: list[Callable[[torch.Tensor], object]] = field(default_factory=list)
    owned: torch.Tensor = field(init=False)
    replicated: torch.Tensor = field(init=False)
    partial: list[torch.Tensor] = field(default_factory=list)
    tied_ids: list[torch.Tensor] | None = None
    tied_rows: list[torch.Tensor] | None = None
    _buckets: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owned = torch.zeros(self.n, dtype=torch.float64, device=self.pack.tokens.device)
        self.replicated = torch.zeros_like(self.owned)

    @property
    def n(self) -> int:
        return len(self.pack.rows)

    def segment(self, i: int) -> slice:
        return slice(self.pack.boundaries[i], self.pack.boundaries[i + 1])

    def length(self, i: int) -> int:
        return self.pack.boundaries[i + 1] - self.pack.boundaries[i]

    def squared_norms(self, tensor_group: dist.ProcessGroup) -> torch.Tensor:
        """This pipeline stage's share of |g_i|^2, to be summed over tensor ranks and stages: float64 [n].

        Replicated parameters are counted on tensor rank 0 alone.
        """
        if self.partial:
            whole = torch.cat(self.partial, dim=1)
            if dist.get_world_size(tensor_group) > 1:
                dist.all_reduce(whole, group=tensor_group)
            self.replicated += whole.double().square().sum(1)
            self.partial.clear()
        return self.owned + self.replicated if dist.get_rank(tensor_group) == 0 else self.owned

    def on_tokens(self, factors: Sequence[float], segments: torch.Tensor) -> torch.Tensor:
        """One factor a trajectory -> one a token of ``segments``; 0 for padding. fp32."""
        return torch.tensor([*factors, 0.0], dtype=torch.float32).to(segments.device)[segments]

    def gram_buckets(self, members: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Trajectories ``members`` by length rounded up to a power of two.

        Each bucket is (trajectories int64 [m], token positions int64 [m, t]); position T stands for a
        row of zeros that fills up a shorter trajectory.
        """
        key = tuple(members)
        if key not in self._buckets:
            by_length: dict[int, list[int]] = {}
            uniform = len({self.length(i) for i in members}) == 1
            for i in members:
                length = self.length(i)
                by_length.setdefault(length if uniform else 1 << (length - 1).bit_length(), []).append(i)
            device = self.pack.tokens.device
            self._buckets[key] = [
                (torch.tensor(chosen, device=device), self._positions(chosen, width, device))
                for width, chosen in sorted(by_length.items())
            ]
        return self._buckets[key]

    def _positions(self, members: list[int], width: int, device: torch.device) -> torch.Tensor:
        start = torch.tensor([self.pack.boundaries[i] for i in members], device=device)[:, None]
        end = torch.tensor([self.pack.boundaries[i + 1] for i in members], device=device)[:, None]
        position = start + torch.arange(width, device=device)
        return torch.where(position < end, position, self.pack.length)


class ScoreSwitch:
    """Which pack the forward that runs now belongs to; None: plain Megatron gradients."""

    def __init__(self) -> None:
        self.current: PackScores | None = None

    def active(self) -> PackScores | None:
        return self.current if torch.is_grad_enabled() else None


# --- the kinds of weight gradient ---------------------------------------------------------


def _vector_gradient(scores: PackScores, name: str, rows: torch.Tensor, segments: torch.Tensor, kind: str) -> None:
    """A vector parameter from its per-token gradients ``rows`` [T', d].

    ``kind`` says how its norm is summed over tensor ranks: owned, replicated or partial.
    """
    per = rows.new_zeros(scores.n + 1, rows.shape[1], dtype=torch.float32)
    per = per.index_add_(0, segments, rows.float())[: scores.n]
    if kind == "partial":
        scores.partial.append(per)
    else:
        getattr(scores, kind).add_(per.double().square().sum(1))
    scores.gradients.vector(scores, name, per)


def _tied_rows(scores: PackScores, inputs: torch.Tensor, grads: torch.Tensor) -> list[torch.Tensor]:
    """Rows of each W_i that the same trajectory's embedding gradient will meet: [u_i, d] each."""
    assert scores.tied_ids is not None
    return [grads[scores.segment(i)][:, ids].t() @ inputs[scores.segment(i)] for i, ids in enumerate(scores.tied_ids)]


class _ScoredLinear(torch.autograd.Function):
    """A tensor-parallel linear layer: Megatron's forward and input gradient, our weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: _Linear) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        total = _gather(x, layer.group) if layer.sequence_parallel else x
        out = torch.matmul(total, weight.t())
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        layer: _Linear = ctx.layer
        x, weight = ctx.saved_tensors
        dx = grad.matmul(weight)
        work = None
        out = dx
        if layer.sequence_parallel:
            out = torch.empty_like(x)
            work = dist.reduce_scatter_tensor(out, dx, group=layer.group, async_op=True)
        elif layer.reduce_input_gradient:
            work = dist.all_reduce(dx, group=layer.group, async_op=True)
        total = _gather(x, layer.group) if layer.sequence_parallel else x
        scores = layer.scores
        inputs, grads = total.reshape(-1, total.shape[-1]), grad.reshape(-1, grad.shape[-1])
        scores.gradients.matrix(scores, layer.weight_name, inputs, grads)
        if scores.tied_ids is not None and layer.is_tied_output:
            scores.tied_rows = _tied_rows(scores, inputs, grads)
        if layer.bias_name is not None:
            _vector_gradient(scores, layer.bias_name, grads, scores.pack.segments, "owned")
        if work is not None:
            work.wait()
        return out, None, None, None


@dataclass(frozen=True)
class _Linear:
    """Constants of one call of a linear layer."""

    scores: PackScores
    weight_name: str
    bias_name: str | None
    is_tied_output: bool
    sequence_parallel: bool
    reduce_input_gradient: bool
    group: dist.ProcessGroup


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


class _ScoredNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, in fp32 inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, norm: _Norm) -> Any:
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.norm = norm
        return (x.float() * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        norm: _Norm = ctx.norm
        normalized = x.float() * rstd
        g = grad.float() * weight.float()
        dx = rstd * (g - normalized * (g * normalized).mean(-1, keepdim=True))
        tokens = x.shape[0]
        rows = (grad.float() * normalized).reshape(tokens, -1, weight.numel()).sum(1)
        segments = norm.scores.pack.segments[norm.offset(tokens) : norm.offset(tokens) + tokens]
        _vector_gradient(norm.scores, norm.name, rows, segments, norm.kind)
        return dx.to(x.dtype), None, None, None


@dataclass(frozen=True)
class _Norm:
    """Constants of one call of a norm."""

    scores: PackScores
    name: str
    kind: str
    sequence_rank: int  # position of this rank's tokens under sequence parallelism, else 0

    def offset(self, tokens: int) -> int:
        return self.sequence_rank * tokens


class _ScoredEmbedding(torch.autograd.Function):
    """Embedding lookup of this rank's share of the vocabulary; tokens of other ranks read as zeros."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, name: str, scores: PackScores) -> Any:
        """``ids`` int64 [T]: row of this rank's shard, -1 for a token of another rank."""
        ctx.save_for_backward(ids)
        ctx.shape, ctx.name, ctx.scores = weight.shape, name, scores
        out = torch.nn.functional.embedding(ids.clamp(min=0), weight)
        return out.masked_fill((ids < 0)[:, None], 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        scores: PackScores = ctx.scores
        vocabulary, width = ctx.shape
        mine = (ids >= 0) & (scores.pack.segments < scores.n)
        pair = scores.pack.segments[mine] * vocabulary + ids[mine]  # one row a (trajectory, token id)
        pairs, inverse = pair.unique(return_inverse=True)
        rows = grad.new_zeros(len(pairs), width, dtype=torch.float32).index_add_(0, inverse, grad[mine].float())
        owner, token = pairs // vocabulary, pairs % vocabulary
        squared = rows.double().square().sum(1)
        if scores.tied_rows is not None:  # |E_i + W_i|^2 = |E_i|^2 + |W_i|^2 + 2 <E_i, W_i>, pairs are sorted by owner
            squared += 2 * (rows * torch.cat(scores.tied_rows).float()).double().sum(1)
            scores.tied_rows = None
        scores.owned.index_add_(0, owner, squared)
        scores.gradients.rows(scores, ctx.name, owner, token, rows)
        return None, None, None, None


# --- attaching ---------------------------------------------------------------------------------


def attach(
    model: torch.nn.Module, switch: ScoreSwitch, tensor_group: dist.ProcessGroup, *, prefix: str, tied: bool
) -> dict[str, torch.nn.Parameter]:
    """Make ``model`` (one chunk of a GPTModel) separate its gradients while ``switch.current`` is set.

    Returns the parameters under the names by which ``WeightGradients`` knows them: ``prefix`` (unique
    for the chunk) + name. ``tied``: input and output embedding are one parameter of this chunk.
    UnsupportedLayer when a parameter belongs to a module of another kind, before anything was changed.
    """
    handled = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, RMSNorm))
        for parameter in module.parameters(recurse=False)
    }
    parameters = {prefix + name: parameter for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in parameters.items()}
    strange = [name for key, name in names.items() if key not in handled]
    if strange:
        raise UnsupportedLayer(f"no exact per-trajectory gradient for {', '.join(strange)}")
    for path, module in model.named_modules():
        if isinstance(module, RowParallelLinear) and module.bias is not None:
            raise UnsupportedLayer(f"no exact per-trajectory gradient for the bias of {path}")
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            _attach_linear(module, switch, names, tensor_group)
        elif isinstance(module, VocabParallelEmbedding):
            _attach_embedding(module, switch, names, tied)
        elif isinstance(module, RMSNorm):
            _attach_norm(module, switch, names, path, tensor_group)
    return parameters


def _attach_linear(module: Any, switch: ScoreSwitch, names: dict[int, str], group: dist.ProcessGroup) -> None:
    original = module._forward_impl
    is_tied_output = module.weight is None  # GPTModel then hands the embedding's weight over at every call

    def forward(
        self: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        allreduce_dgrad: bool = False, sequence_parallel: bool = False, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        scores = switch.active()
        if scores is None:
            return original(
                input=input, weight=weight, bias=bias, allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel, **kwargs,
            )  # fmt: skip
        layer = _Linear(
            scores, names[id(weight)], None if bias is None else names[id(bias)], is_tied_output,
            sequence_parallel, allreduce_dgrad, group,
        )  # fmt: skip
        return _ScoredLinear.apply(input, weight, bias, layer)

    module._forward_impl = types.MethodType(forward, module)


def _attach_embedding(module: Any, switch: ScoreSwitch, names: dict[int, str], tied: bool) -> None:
    original = module.forward
    name = names[id(module.weight)]

    def forward(self: Any, input_: torch.Tensor) -> torch.Tensor:
        scores = switch.active()
        if scores is None:
            return original(input_)
        ids = input_.reshape(-1)
        inside = (ids >= self.vocab_start_index) & (ids < self.vocab_end_index)
        ids = torch.where(inside, ids - self.vocab_start_index, -1)
        if tied:
            segments = (ids[scores.segment(i)] for i in range(scores.n))
            scores.tied_ids = [segment[segment >= 0].unique() for segment in segments]
        out = _ScoredEmbedding.apply(self.weight, ids, name, scores).view(*input_.shape, -1)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(out.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(out, group=self.tp_group)

    module.forward = types.MethodType(forward, module)


def _attach_norm(module: Any, switch: ScoreSwitch, names: dict[int, str], path: str, group: dist.ProcessGroup) -> None:
    original = module.forward
    parallel = dist.get_world_size(group) > 1
    sequence_parallel = parallel and module.weight.sequence_parallel
    of_heads = path.endswith(("q_layernorm", "k_layernorm"))  # sees this rank's heads only
    kind = "partial" if parallel and (sequence_parallel or of_heads) else "replicated"
    sequence_rank = dist.get_rank(group) if sequence_parallel and not of_heads else 0
    name = names[id(module.weight)]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        scores = switch.active()
        if scores is None:
            return original(x)
        return _ScoredNorm.apply(x, self.weight, self.eps, _Norm(scores, name, kind, sequence_rank))

    module.forward = types.MethodType(forward, module)
