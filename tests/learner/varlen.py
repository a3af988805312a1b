"""What stands for ``torch.nn.attention.varlen.varlen_attn``, which needs a GPU: its signature, demands and meaning.

Written from its documentation and from the checks in torch's sources (flash_api.cpp), with loops and a full softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """What a call was told: tokens and sequences, window, and the storage of the boundaries."""

    tokens: int
    lengths: tuple[tuple[int, int], ...]
    window: tuple[int, int]
    boundaries: int


CALLS: list[Call] = []


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: None = None,
    block_table: None = None,
    num_splits: int | None = None,
) -> Tensor:
    """query [T, heads, d], key and value [S, kv heads, d]; [T, heads, d]. Sequence i has the queries and the keys that
    the boundaries int32 [n + 1] say. With n queries and m keys query i is at position p = m - n + i, and sees keys
    p - window[0] to p + window[1]; -1 is no bound."""
    lengths = tuple(zip(cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist(), strict=True))
    _check(query, key, value, cu_seq_q, cu_seq_k, enable_gqa)
    assert type(max_q) is type(max_k) is int, "lengths are numbers of the host"
    assert (max_q, max_k) == (max(n for n, _ in lengths), max(m for _, m in lengths))
    assert isinstance(window_size, tuple) and scale is not None
    CALLS.append(Call(len(query), lengths, window_size, cu_seq_q.data_ptr()))
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    starts = zip(cu_seq_q.tolist(), cu_seq_k.tolist(), lengths, strict=False)
    for start_q, start_k, (n, m) in starts:
        q = query[start_q : start_q + n]
        k, v = (z[start_k : start_k + m].repeat_interleave(repeats, 1) for z in (key, value))
        offset = torch.arange(m)[None] - torch.arange(m - n, m)[:, None]
        left, right = window_size
        seen = torch.ones(n, m, dtype=torch.bool)
        if left >= 0:
            seen &= offset >= -left
        if right >= 0:
            seen &= offset <= right
        logits = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hnm,mhd->nhd", weights, v.float()).to(query.dtype))
    return torch.cat(outputs)


def _check(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, enable_gqa: bool) -> None:
    """What the kernel refuses."""
    assert query.dtype == key.dtype == value.dtype
    assert all(z.dim() == 3 and z.stride(-1) == 1 for z in (query, key, value))
    assert query.shape[2] == key.shape[2] == value.shape[2] <= 256 and query.shape[2] % 8 == 0
    assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    for boundaries, rows in ((cu_seq_q, query), (cu_seq_k, key)):
        assert boundaries.dtype is torch.int32 and boundaries.is_contiguous()
        assert int(boundaries[0]) == 0 and int(boundaries[-1]) == len(rows)
