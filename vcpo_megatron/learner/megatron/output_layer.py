"""The output layer of a 16-bit model with float32 logits: ``model.fp32_lm_head``.

Hidden states and weights stay as they are; what their product accumulates in fp32 is kept instead of being rounded to
the 16 bits of the model. bf16 keeps a logit z to within z / 256: noise in every log-prob that grows with how sure a
policy is, and that two engines, whose hidden states differ in the last bits, do not share.

The gradient is as everywhere else in the model: that of the logits is rounded to the model's dtype, element by element,
before it is multiplied, so the two products of the backward, norms by trajectory and tied rows have the inputs and cost
that they have without this. What it costs is memory: logits [T, V / tp] of 4 bytes an element instead of 2, whose own
gradient is written in their place (``logprobs``), and the 2 bytes of its rounded copy during the head's backward.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from .platform import fp32_product


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """float32 [..., V / tp] of hidden states [..., d] and a weight [V / tp, d] of one dtype."""
    return fp32_product(hidden.reshape(-1, hidden.shape[-1]), weight.t()).view(*hidden.shape[:-1], len(weight))


class _Logits(torch.autograd.Function):
    """``logits_of``, whose gradient is taken in the dtype of the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return logits_of(hidden, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        return grad.matmul(weight), rows.t().matmul(hidden.reshape(-1, hidden.shape[-1]))


def keep_fp32_logits(model: GPTModel) -> None:
    """Have the output layer of ``model``, the chunk of the last stage, answer in float32."""
    layer = model.output_layer

    def forward(
        self: Any, input: Tensor, weight: Tensor, allreduce_dgrad: bool, sequence_parallel: bool, **_: Any
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return _Logits.apply(input, weight)

    layer._forward_impl = types.MethodType(forward, layer)
    layer.fp32_logits = True


def has_fp32_logits(layer: torch.nn.Module) -> bool:
    """Whether ``keep_fp32_logits`` was called for the model of this layer, which is its output layer."""
    return getattr(layer, "fp32_logits", False)
