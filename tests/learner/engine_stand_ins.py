"""What stands for TransformerEngine's layers: Megatron's signatures of them, in plain torch.

Attention knows of a pack what TransformerEngine is told, the boundaries, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: (kind, gradient_accumulation_fusion, disable_parameter_transpose_cache) of every layer built.
LINEARS: list[tuple[str, bool, bool]] = []
#: (format, mask, largest length agrees with the boundaries) of every call of attention.
FORMATS: list[tuple[str, str, bool]] = []


class _Linear(nn.Module):
    kind = ""

    def __init__(self, input_size: int, output_size: int, config: Any, bias: bool, skip_bias_add: bool) -> None:
        super().__init__()
        LINEARS.append((self.kind, config.gradient_accumulation_fusion, config.disable_parameter_transpose_cache))
        assert not (bias and skip_bias_add)
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(output_size, dtype=config.params_dtype)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight, self.bias), None


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
