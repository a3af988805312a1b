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

from ..megatron.output_layer import has_fp32_logits, logits_of
from .pack_scores import PackScores, ScoreSwitch, TokenShards, gather_rows
from .tied import send_tied_rows


@dataclass(frozen=True)
class LinearCall:
    """Constants of one call of a linear layer.

    The parameters are no inputs of the autograd function: their gradients go straight to where Megatron
    sums them up in fp32, instead of through a tensor of the parameter's size and dtype.
    """

    scores: PackScores
    tokens: TokenShards
    weight_name: str
    weight: Parameter
    bias_name: str | None
    bias: Parameter | None
    is_tied_output: bool
    sequence_parallel: bool
    reduce_input_gradient: bool
    group: dist.ProcessGroup
    dtype: torch.dtype
    fp32_output: bool = False


class ScoredLinear(torch.autograd.Function):
    """A tensor-parallel linear layer: Megatron's forward and input gradient, our weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: LinearCall) -> Any:
        ctx.call = call
        ctx.save_for_backward(x)
        total = gather_rows(x, call.group) if call.sequence_parallel else x
        if call.fp32_output:
            return logits_of(total, call.weight)
        out = torch.matmul(total.to(call.dtype), call.weight.to(call.dtype).t())
        return out if call.bias is None else out + call.bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        call: LinearCall = ctx.call
        (x,) = ctx.saved_tensors
        grad = grad.to(call.dtype)  # float32 where the output is
        dx = grad.matmul(call.weight.to(call.dtype)).to(x.dtype)
        work, out = None, dx
        if call.sequence_parallel:
            out = torch.empty_like(x)
            work = dist.reduce_scatter_tensor(out, dx, group=call.group, async_op=True)
        elif call.reduce_input_gradient:
            work = dist.all_reduce(dx, group=call.group, async_op=True)
        total = gather_rows(x, call.group) if call.sequence_parallel else x
        inputs, grads = total.reshape(-1, total.shape[-1]).to(call.dtype), grad.reshape(-1, grad.shape[-1])
        call.scores.gradients.matrix(call.scores, call.tokens, call.weight_name, call.weight, inputs, grads)
        if call.is_tied_output:
            send_tied_rows(call.scores, inputs, grads)
        if call.bias is not None and call.bias_name is not None:
            call.scores.add_vector(call.bias_name, call.bias, grads, call.scores.dense, "owned")
        if work is not None:
            work.wait()
        return out, None


def attach_linear(
    module: Any,
    switch: ScoreSwitch,
    names: dict[int, str],
    group: dist.ProcessGroup,
    *,
    is_tied_output: bool,
    tokens: Callable[[PackScores], TokenShards],
) -> None:
    """Column- or row-parallel; ``tokens`` gives the trajectories of the rows of the call at hand."""
    original = module._forward_impl

    def forward(
        self: Any,
        input: Tensor,
        weight: Parameter,
        bias: Parameter | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        scores = switch.active()
        if scores is None:
            return original(
                input=input,
                weight=weight,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                **kwargs,
            )
        call = LinearCall(
            scores,
            tokens(scores),
            names[id(weight)],
            weight,
            None if bias is None else names[id(bias)],
            bias,
            is_tied_output,
            sequence_parallel,
            allreduce_dgrad,
            group,
            weight.dtype,
            fp32_output=has_fp32_logits(self),
        )
        return ScoredLinear.apply(input, call)

    module._forward_impl = types.MethodType(forward, module)


def _gate(
    scores: PackScores,
    names: dict[int, str],
    weight: Parameter,
    x: Tensor,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> Tensor:
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
