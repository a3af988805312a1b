"""Attention over packs by either of torch's kernels, against one sequence at a time with everything written out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from vcpo_megatron.learner.batch.packing import AttentionPlan, PackLayout, Share
from vcpo_megatron.learner.megatron.attention import FlashPackedAttention, PackedAttention, has_varlen
from vcpo_megatron.learner.megatron.layers import PackParams

from .. import varlen as stand_in
from ..scenarios import make_batch, make_config, make_model_folder, oracle_step
from ..test_layouts import FULL, SELECTIVE, SP, assert_equals_the_oracle
from ..world import run_world

#: (family, [parallel], other sections) on two ranks, each the step of the oracle; the others are slow.
DEFAULT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen2", {"tensor": 2}, {}),
    ("windowed", {"context": 2}, {}),
]
OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("latent", {"context": 2, "expert": 2}, {}),
    ("qwen3", {"context": 2}, {"algorithm": {"opob_mode": "deferred"}}),
    ("windowed", SP, FULL),
    ("windowed", {"context": 2}, SELECTIVE),
    ("qwen2", {"pipeline": 2, "virtual_pipeline": 2}, {}),
    ("moe", {"expert": 2}, {"algorithm": {"opob_mode": "two_pass"}}),
    ("latent", {**SP, "expert": 2}, SELECTIVE),
]
#: Context ranks -> sequences of a pack, which two ranks cut into four chunks each.
LENGTHS = {1: [13, 5, 1, 24, 5], 2: [16, 8, 4, 24, 4]}
KINDS = [PackedAttention, FlashPackedAttention]


def module(kind: type[PackedAttention], window: int | None, ranks: int, scale: float | None) -> PackedAttention:
    config = SimpleNamespace(
        context_parallel_size=ranks,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=None if window is None else [1],
    )
    return kind(config, 1, None, "self", softmax_scale=scale, pg_collection=SimpleNamespace(cp=None))


def run_ranks(kind: type[PackedAttention], inputs: list[Tensor], window: int | None, ranks: int) -> Tensor:
    """[T, heads v] of a pack whose tokens ``ranks`` context-parallel ranks hold, in the order of the pack."""
    layouts = [PackLayout.of(LENGTHS[ranks], Share(rank, ranks)) for rank in range(ranks)]
    takes = [torch.from_numpy(layout.take) for layout in layouts]
    whole = []
    for layout, take in zip(layouts, takes, strict=True):
        attention = module(kind, window, ranks, 0.3)
        if ranks > 1:
            attention._group = object()  # what a collective gathers is put together here
            attention._all_ranks = lambda x: x  # type: ignore[method-assign]
        query, key, value = inputs[0][take], *(z[torch.cat(takes) if ranks > 1 else take] for z in inputs[1:])
        params = PackParams.of(AttentionPlan.of(layout, torch.device("cpu")), torch.from_numpy(layout.positions))
        whole.append(attention(query, key, value, None, packed_seq_params=params))
    out = torch.empty_like(torch.cat(whole))
    return out.index_copy(0, torch.cat(takes), torch.cat(whole))


def written_out(inputs: list[Tensor], lengths: list[int], window: int | None) -> Tensor:
    """The same in fp64, one token at a time."""
    query, key, value = inputs
    rows, start = [], 0
    for length in lengths:
        for t in range(length):
            first = start if window is None else max(start, start + t + 1 - window)
            k, v = (z[first : start + t + 1].double().repeat_interleave(2, 1) for z in (key, value))
            weights = (torch.einsum("hd,mhd->hm", query[start + t].double(), k) * 0.3).softmax(-1)
            rows.append(torch.einsum("hm,mhd->hd", weights, v).reshape(-1))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("dims", [(8, 8), (14, 10)], ids=["equal heads", "latent heads"])
def test_both_kernels_compute_causal_attention(
    kind: type[PackedAttention],
    ranks: int,
    window: int | None,
    dims: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and gradients of query, key and value, four query heads on two key heads."""
    monkeypatch.setattr(varlen, "varlen_attn", stand_in.varlen_attn)
    stand_in.CALLS.clear()
    torch.manual_seed(3)
    tokens = sum(LENGTHS[ranks])
    shapes = [(tokens, 4, dims[0]), (tokens, 2, dims[0]), (tokens, 2, dims[1])]
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    weights = torch.randn(tokens, 4 * dims[1])
    found, expected = run_ranks(kind, inputs, window, ranks), written_out(inputs, LENGTHS[ranks], window)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6)
    ours = torch.autograd.grad((found * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert len(stand_in.CALLS) == (ranks if kind is FlashPackedAttention else 0)  # one a pack
    assert {call.window for call in stand_in.CALLS} <= {(-1 if window is None else window - 1, 0)}


def test_the_call_fits_the_installed_torch() -> None:
    """Its parameters are those of the stand-in; from 2.12 on it wants to be told of fewer key heads, in 2.11 not."""
    import inspect

    real, ours = (inspect.signature(function).parameters for function in (varlen.varlen_attn, stand_in.varlen_attn))
    assert [(p.name, p.kind, p.default) for p in real.values()] == [(p.name, p.kind, p.default) for p in ours.values()]
    assert has_varlen()


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchs_own_call_reads_nothing_on_the_host(ranks: int) -> None:
    """On tensors without storage the real operation is registered, forward and backward; a read of numbers raises."""
    nowhere = torch.device("meta")
    plan = AttentionPlan.of(PackLayout.of(LENGTHS[ranks], Share(0, ranks)), nowhere)
    attention = module(FlashPackedAttention, 9, ranks, None)
    if ranks > 1:
        attention._group = object()
        attention._all_ranks = lambda x: torch.cat([x, x])  # type: ignore[method-assign]
    tokens = sum(LENGTHS[ranks]) // ranks
    inputs = [torch.randn(tokens, n, d, device=nowhere).requires_grad_() for n, d in ((4, 12), (2, 12), (2, 10))]
    out = attention(*inputs, None, packed_seq_params=PackParams.of(plan, torch.arange(tokens)))
    assert out.shape == (tokens, 40)
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


def test_an_older_torch_is_asked_without_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_2_11(query: Tensor, key: Tensor, value: Tensor, *lengths: Any, scale: float, window_size: Any) -> Tensor:
        return stand_in.varlen_attn(query, key, value, *lengths, scale=scale, window_size=window_size, enable_gqa=True)

    monkeypatch.setattr(varlen, "varlen_attn", of_2_11)
    assert has_varlen()
    attention = module(FlashPackedAttention, None, 1, None)
    params = PackParams.of(AttentionPlan.of(PackLayout.of([3], Share()), torch.device("cpu")), torch.arange(3))
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    plain = module(PackedAttention, None, 1, None)(q, k, v, None, packed_seq_params=params)
    torch.testing.assert_close(attention(q, k, v, None, packed_seq_params=params), plain)
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, is_causal=False: query)
    assert not has_varlen()  # 2.10


@pytest.mark.timeout(500)
@pytest.mark.parametrize("rows", [DEFAULT, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["default", "others"])
def test_the_step_of_the_oracle_with_one_call_a_layer_and_pack(rows: list[Any], tmp_path: Path) -> None:
    """All layouts' attention through the variable-length call; boundaries reach the device once a pack."""
    models = {family: make_model_folder(tmp_path / family, family) for family in {row[0] for row in rows}}
    cases = [
        (make_config(models[family], 2, parallel=parallel, **sections), [make_batch(models[family])])
        for family, parallel, sections in rows
    ]
    found = run_world(2, "learner.run_layouts:with_flash_attention", {"cases": cases}, timeout_s=400, alone=True)
    for (family, parallel, _), (config, (batch,)), outcome, seen in zip(rows, cases, *found.values(), strict=True):
        assert_equals_the_oracle(outcome, oracle_step(models[family], batch, config))
        layers = 4 // parallel.get("pipeline", 1)
        # every plan has served its layers in forwards alone and once more at least, or in more forwards
        assert seen["calls"] % layers == 0 and seen["plans"] * layers <= seen["calls"]
        assert seen["windows"] == ({(-1, 0), (5, 0)} if family == "windowed" else {(-1, 0)})
        assert seen["chunked"] == ("context" in parallel) and seen["stray"] == 0
