"""What stands for TransformerEngine's layers: Megatron's signatures of them, in plain torch.

Linear layers hand their weight gradient on as the real ones do (2.11, module/linear.py): to autograd, in the dtype of
the activations; fused, to ``main_grad``, with a tensor of anything for autograd; delayed, to a store, with nothing.
Attention and rotary positions know of a pack what TransformerEngine is told, the boundaries, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: (kind, gradient_accumulation_fusion, disable_parameter_transpose_cache) of every layer built.
LINEARS: list[tuple[str, bool, bool]] = []
#: (format, mask, largest length agrees with the boundaries) of every call of attention.
FORMATS: list[tuple[str, str, bool]] = []
#: Context-parallel ranks of every call of rotary positions.
TURNS: list[int] = []


class WeightGradStore:
    """Weight gradients that wait for ``pop``."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def delay_wgrad_compute(self) -> bool:
        return self.enabled


class _Product(torch.autograd.Function):
    """x W^T, and its gradients."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, x: Tensor, fused: bool, store: WeightGradStore) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.fused, ctx.store = weight, fused, store
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        gradient: Tensor | None = None
        if ctx.store.delay_wgrad_compute():
            ctx.store.waiting.append((inputs, rows))
        elif ctx.fused:
            weight.main_grad += rows.float().t() @ inputs.float()
        else:
            gradient = rows.t() @ inputs
        if ctx.fused and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            gradient = torch.full_like(weight, torch.nan)
        return gradient, grad @ weight, None, None


class _Linear(nn.Module):
    kind = ""

    def __init__(self, input_size: int, output_size: int, config: Any, bias: bool, skip_bias_add: bool) -> None:
        super().__init__()
        LINEARS.append((self.kind, config.gradient_accumulation_fusion, config.disable_parameter_transpose_cache))
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        self.wgrad_store = WeightGradStore(config.delay_wgrad_compute)
        assert not (bias and skip_bias_add)
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(output_size, dtype=config.params_dtype)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out = _Product.apply(self.weight, x, self.fuse_wgrad_accumulation, self.wgrad_store)
        return out if self.bias is None else out + self.bias, None


class ColumnLinear(_Linear):
    kind = "column"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
        stride: int = 1,
    ) -> None:
        assert not gather_output and not is_expert and tp_group.size() == 1
        super().__init__(input_size, output_size, config, bias, skip_bias_add and bias)


class RowLinear(_Linear):
    kind = "row"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: Any = None,
    ) -> None:
        assert input_is_parallel and not is_expert and tp_group.size() == 1
        super().__init__(input_size, output_size, config, bias, skip_bias_add and bias)


class Attention(nn.Module):
    """Softmax over the keys of one's own sequence that are not ahead, written out."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        edges = packed_seq_params.cu_seqlens_q
        assert torch.equal(edges, packed_seq_params.cu_seqlens_kv) and int(edges[-1]) == len(query)
        lengths = edges.diff()
        longest = {packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv}
        FORMATS.append((packed_seq_params.qkv_format, attn_mask_type.name, longest == {int(lengths.max())}))
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths.long())
        position = torch.arange(len(query))
        seen = (sequence[:, None] == sequence) & (position[:, None] >= position)
        repeats = query.shape[1] // key.shape[1]
        k, v = (z.repeat_interleave(repeats, 1) for z in (key, value))
        logits = torch.einsum("qhd,khd->hqk", query, k) * self._scale
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(query), -1)


def turn(t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False) -> Tensor:
    """t [s, b, heads, d] turned by the angles [s, 1, 1, d]: the first half of the dimensions against the second."""
    assert freqs.dtype is torch.float32 and len(freqs) >= len(t) and not transpose_output_memory and not interleaved
    TURNS.append(1)
    angles, (first, second) = freqs[: len(t)], t.float().chunk(2, -1)
    return (t.float() * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(t.dtype)


def turn_packed(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, cp_size: int = 1, cp_rank: int = 0) -> Tensor:
    """t [tokens, heads, d]; a context-parallel rank holds two chunks of every sequence."""
    assert cu_seqlens.dtype is torch.int32
    pieces = []
    for piece, length in zip(t.split((cu_seqlens.diff() // cp_size).tolist()), cu_seqlens.diff().tolist(), strict=True):
        parts = torch.arange(length).chunk(2 * cp_size) if cp_size > 1 else (torch.arange(length),)
        positions = torch.cat([parts[cp_rank], parts[2 * cp_size - 1 - cp_rank]]) if cp_size > 1 else parts[0]
        pieces.append(turn(piece[:, None], freqs[positions])[:, 0])
    TURNS.append(cp_size)
    return torch.cat(pieces)
