"""Attention over packs: causal inside each trajectory, by one of torch's kernels (``attention_kernels`` says which)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ..batch.packing import AttentionPlan
from .layers import PackParams


class PackedAttention(MegatronModule):
    """Causal attention inside each trajectory of a pack, by torch's scaled dot product: a call a trajectory.

    query [T, heads, d], key [T, kv heads, d], value [T, kv heads, v]; returns [T, heads * v]. Trajectories never see
    each other, and padding at the end of the pack attends to itself alone. Under context parallelism the
    keys and values of all ranks are gathered once a pack; rank r's two chunks of a trajectory attend to the
    prefixes that end with them. In a layer with a sliding window a token sees the last ``window`` tokens only.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window: int | None = config.window_size[0] + 1 if windowed else None
        self._group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "the learner feeds packs only"
        plan = packed_seq_params.attention
        if self._group is not None:
            assert plan.rows is not None, "a plan of several context-parallel ranks"
            key, value = (self._all_ranks(z).index_select(0, plan.rows) for z in (key, value))
        return self._attend(query, key, value, plan).reshape(query.shape[0], -1)

    def _all_ranks(self, x: Tensor) -> Tensor:
        """Rows of all context-parallel ranks, one rank's after another's; their gradients are summed over the ranks."""
        return gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=self._group)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        """[T, heads, v]; the spans of keys and values lie end to end, as those of queries do."""
        (n, m), *others = plan.spans
        if n == m and not any(span != (n, m) for span in others):  # one call for the whole pack
            q, k, v = (z.reshape(len(plan.spans), n, *z.shape[1:]).transpose(1, 2) for z in (query, key, value))
            return self._attend_span(q, k, v).transpose(1, 2)
        queries, keys = [n for n, _ in plan.spans], [m for _, m in plan.spans]
        pieces = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
        return torch.cat([self._attend_span(*(z.transpose(0, 1)[None] for z in p))[0].transpose(0, 1) for p in pieces])

    def _attend_span(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [spans, heads, n, d], k and v [spans, kv heads, m, ...]."""
        n, m = q.shape[2], k.shape[2]
        mask = None
        if n != m or (self._window is not None and m > self._window):
            distance = torch.arange(m - n, m, device=q.device)[:, None] - torch.arange(m, device=q.device)
            mask = distance >= 0 if self._window is None else (distance >= 0) & (distance < self._window)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )


class FlashPackedAttention(PackedAttention):
    """The same by torch's variable-length flash attention: one call, without a mask, whatever the pack holds."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        from torch.nn.attention import varlen

        self._varlen: Any = varlen
        # torch 2.11 takes fewer key heads than query heads unasked; later ones want to be told
        self._options = {"enable_gqa": True} if "enable_gqa" in _parameters(varlen.varlen_attn) else {}
        # the tokens before the own one that are seen, and those after it
        self._sees = (-1, 0) if self._window is None else (self._window - 1, 0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        d, size = query.shape[-1], value.shape[-1]
        # zeros add nothing to a product: the kernel wants one head dimension for all, a multiple of 8
        width = -(-max(d, size) // 8) * 8
        out = self._varlen.varlen_attn(
            *(_widened(z, width) for z in (query, key, value)),
            plan.queries,
            plan.keys,
            plan.longest_queries,
            plan.longest_keys,
            scale=d**-0.5 if self.softmax_scale is None else self.softmax_scale,
            window_size=self._sees,
            **self._options,
        )
        return out[..., :size]


def has_varlen() -> bool:
    """True where this torch has the variable-length call that ``FlashPackedAttention`` makes."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return False
    return {"window_size", "scale"} <= _parameters(varlen.varlen_attn)


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _widened(x: Tensor, width: int) -> Tensor:
    """``x`` with zeros up to ``width`` in its last dimension."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
