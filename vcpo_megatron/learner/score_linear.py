"""Matrices: tensor-parallel linear layers, of the dense part and of experts, and routers."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn import Parameter

from .score_state import PackScores, ScoreSwitch, Tokens, gather_rows, main_gradient
from .score_tied import send_tied_rows


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32, whatever their dtype."""
    if a.dtype is torch.float32:
        return a @ b
    if a.is_cuda:  # the matrix units accumulate in fp32: keep what they have
        return torch.bmm(a, b, out_dtype=torch.float32) if a.dim() == 3 else torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total in fp32."""
    if a.dtype is torch.float32:
        total.addmm_(a, b)
    else:
        total.add_(_product(a, b))


def _rows(values: Tensor, positions: Tensor) -> Tensor:
    """values [R, d] at positions [m, t] -> [m, t, d]; position R reads as zeros."""
    if not len(values):
        return values.new_zeros(*positions.shape, values.shape[1])
    inside = positions < values.shape[0]
    picked = values[positions.clamp(max=values.shape[0] - 1)]
    return picked if bool(inside.all()) else picked * inside[..., None]


def add_matrix_gradient(
    scores: PackScores, tokens: Tokens, name: str, weight: Parameter, inputs: Tensor, grads: Tensor
) -> None:
    """Add sum_i r_i W_i to the gradient, sum_i q_i W_i to S_g and |W_i|^2 to the norms; W_i = G_i^T A_i.

    inputs A [R, d_in], grads G [R, d_out], rows as ``tokens`` says. A trajectory shorter than
    d_in d_out / (d_in + d_out) is cheaper by Gram matrices, |G^T A|^2 = <A A^T, G G^T>, a longer one by
    forming W_i. Where ranks hold different tokens of a trajectory, the same length decides what travels:
    rows of A and G for a short one (every rank multiplies its rows with all), or a reduce-scatter of W_i.
    """
    assert scores.coefficients is not None and scores.sums is not None
    d_in, d_out = inputs.shape[1], grads.shape[1]
    limit = d_in * d_out // (d_in + d_out)
    r, q = scores.coefficients.gradient, scores.coefficients.sums
    targets = ((r, main_gradient(weight)), (q, scores.sums[name]))
    buckets = tokens.buckets(limit)
    if buckets:
        all_inputs, all_grads = tokens.gather(inputs), tokens.gather(grads)
        for members, local, whole in buckets:
            gram = _product(_rows(inputs, local), _rows(all_inputs, whole).transpose(1, 2))
            gram *= _product(_rows(grads, local), _rows(all_grads, whole).transpose(1, 2))
            scores.owned.index_add_(0, members, gram.sum((1, 2), dtype=torch.float64))
        short = torch.zeros(scores.n + 1)  # one more: rows of no trajectory
        short[torch.cat([members for members, _, _ in buckets]).cpu()] = 1.0
        for coefficient, total in targets:
            per_row = (torch.nn.functional.pad(coefficient.float(), (0, 1)) * short).to(grads.device)[tokens.local.ids]
            _add_product(total, (grads.float() * per_row[:, None]).to(grads.dtype).t(), inputs)
    for i, length in enumerate(tokens.whole.counts):
        if length > limit:
            rows = tokens.local.rows(i)
            w = _product(grads[rows].t(), inputs[rows])
            scores.owned[i] += tokens.squared_norm(w)
            for coefficient, total in targets:
                total.add_(w, alpha=float(coefficient[i]))


@dataclass(frozen=True)
class LinearCall:
    """Constants of one call of a linear layer.

    The parameters are no inputs of the autograd function: their gradients go straight to where Megatron
    sums them up in fp32, instead of through a tensor of the parameter's size and dtype.
    """

    scores: PackScores
    tokens: Tokens
    weight_name: str
    weight: Parameter
    bias_name: str | None
    bias: Parameter | None
    is_tied_output: bool
    sequence_parallel: bool
    reduce_input_gradient: bool
    group: dist.ProcessGroup
    dtype: torch.dtype


class ScoredLinear(torch.autograd.Function):
    """A tensor-parallel linear layer: Megatron's forward and input gradient, our weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: LinearCall) -> Any:
        ctx.call = call
        ctx.save_for_backward(x)
        total = gather_rows(x, call.group) if call.sequence_parallel else x
        out = torch.matmul(total.to(call.dtype), call.weight.to(call.dtype).t())
        return out if call.bias is None else out + call.bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: LinearCall = ctx.call
        (x,) = ctx.saved_tensors
        dx = grad.matmul(call.weight.to(call.dtype)).to(x.dtype)
        work, out = None, dx
        if call.sequence_parallel:
            out = torch.empty_like(x)
            work = dist.reduce_scatter_tensor(out, dx, group=call.group, async_op=True)
        elif call.reduce_input_gradient:
            work = dist.all_reduce(dx, group=call.group, async_op=True)
        total = gather_rows(x, call.group) if call.sequence_parallel else x
        inputs, grads = total.reshape(-1, total.shape[-1]).to(call.dtype), grad.reshape(-1, grad.shape[-1])
        add_matrix_gradient(call.scores, call.tokens, call.weight_name, call.weight, inputs, grads)
        if call.is_tied_output:
            send_tied_rows(call.scores, inputs, grads)
        if call.bias is not None and call.bias_name is not None:
            call.scores.add_vector(call.bias_name, call.bias, grads, call.scores.dense, "owned")
        if work is not None:
            work.wait()
        return out, None


def attach_linear(
    module: Any, switch: ScoreSwitch, names: dict[int, str], group: dist.ProcessGroup, *, is_tied_output: bool,
    tokens: Callable[[PackScores], Tokens],
) -> None:  # fmt: skip
    """Column- or row-parallel; ``tokens`` says whose rows the layer sees in the call at hand."""
    original = module._forward_impl

    def forward(
        self: Any, input: Tensor, weight: Parameter, bias: Parameter | None = None, allreduce_dgrad: bool = False,
        sequence_parallel: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        scores = switch.active()
        if scores is None:
            return original(
                input=input, weight=weight, bias=bias, allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel, **kwargs,
            )  # fmt: skip
        call = LinearCall(
            scores, tokens(scores), names[id(weight)], weight, None if bias is None else names[id(bias)], bias,
            is_tied_output, sequence_parallel, allreduce_dgrad, group, weight.dtype,
        )  # fmt: skip
        return ScoredLinear.apply(input, call)

    module._forward_impl = types.MethodType(forward, module)


def _gate(
    scores: PackScores, names: dict[int, str], weight: Parameter, x: Tensor, group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x W^T for a small matrix that is the same on every tensor rank, of the tokens outside of tensor regions."""
    call = LinearCall(
        scores, scores.router_tokens, names[id(weight)], weight, None, None, False, False, False, group, dtype
    )
    return ScoredLinear.apply(x, call)


def attach_router(module: Any, switch: ScoreSwitch, names: dict[int, str], group: dist.ProcessGroup) -> None:
    """The router of a mixture of experts."""
    original = module.gating
    dtypes = {"fp32": torch.float32, "fp64": torch.float64}

    def gating(self: Any, input: Tensor) -> Tensor:
        scores = switch.active()
        if scores is None:
            return original(input)
        dtype = dtypes.get(self.config.moe_router_dtype, input.dtype)
        return _gate(scores, names, self.weight, input, group, dtype)

    module.gating = types.MethodType(gating, module)


def attach_shared_gate(module: Any, switch: ScoreSwitch, names: dict[int, str], group: dist.ProcessGroup) -> None:
    """The sigmoid gate of a shared expert, whose matrices are linear layers like any other."""
    original = module.forward
    if module.gate_weight is None:
        return

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        scores = switch.active()
        if scores is None:
            return original(hidden_states)
        output, _ = MLP.forward(self, hidden_states)
        gate = _gate(scores, names, self.gate_weight, hidden_states, group, hidden_states.dtype)
        return output * torch.sigmoid(gate)

    module.forward = types.MethodType(forward, module)
