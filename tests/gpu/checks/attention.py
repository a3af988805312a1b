"""Attention over a pack: its values, and by which kernels the device computes it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.gpu.checklist import Found, Missed, Place, require

#: Operations and kernels of attention, whoever's they are.
_ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|attention|attn|sdpa|mha_", re.IGNORECASE)
#: What holds all scores of a trajectory in memory.
_DENSE = re.compile(r"_scaled_dot_product_attention_math|_safe_softmax")
LIMITS = {"float32": 1e-5, "bfloat16": 0.02}


def values(place: Place) -> Found:
    """The learner's own attention module, as a model is built with it, against softmax in fp64 trajectory by trajectory:
    outputs and gradients."""
    import torch

    from vcpo_megatron.learner.batch.packing import PackLayout, Share
    from vcpo_megatron.learner.megatron.layers import PackParams

    from .bench import Bench

    lengths = [700, 33, 256, 11, 1] if place.large else [30, 5, 1]
    layout, figures, texts = PackLayout.of(lengths, Share()), {}, []
    for dtype, limit in LIMITS.items():
        bench = Bench(place, dtype)
        module = bench.trainable.chunks[0].decoder.layers[0].self_attention.core_attention
        megatron = bench.trainable.chunks[0].config
        heads, width = megatron.num_attention_heads, megatron.kv_channels
        device = next(bench.trainable.chunks[0].parameters()).device
        params = PackParams.of(layout, device)
        torch.manual_seed(1)
        drawn = [torch.randn(layout.total, heads, width, device=device).to(getattr(torch, dtype)) for _ in range(4)]
        *inputs, weights = drawn

        def ours(q: Any, k: Any, v: Any, module: Any = module, params: Any = params) -> Any:
            return module(q, k, v, None, packed_seq_params=params)

        found = _differentiated(ours, inputs, weights)
        expected = _differentiated(_softmax(lengths), [z.double() for z in inputs], weights.double())
        bench.close()
        worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
        figures[dtype] = worst
        texts.append(require(worst, limit, dtype))
    return Found(", ".join(texts), figures)


def _differentiated(attention: Any, inputs: list[Any], weights: Any) -> list[Any]:
    """Output [T, heads, d] and the gradients of q, k and v where that of the output is ``weights``."""
    leaves = [z.clone().requires_grad_() for z in inputs]
    out = attention(*leaves).reshape(weights.shape)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _softmax(lengths: list[int]) -> Any:
    """Causal attention of trajectories laid end to end, in plain formulas."""
    import torch

    def attention(q: Any, k: Any, v: Any) -> Any:
        pieces = []
        for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            scores = torch.einsum("thd,shd->hts", a, b) / a.shape[-1] ** 0.5
            future = torch.ones(len(a), len(a), device=a.device, dtype=torch.bool).triu(1)
            pieces.append(torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), c))
        return torch.cat(pieces)

    return attention


def kernels(place: Place) -> Found:
    """What a step runs, from the profiler: operations of attention, and the device's kernels with their time. In bfloat16
    none may hold all scores of a trajectory."""
    import torch

    from .bench import Bench

    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.large:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    figures, texts = {}, []
    for dtype in LIMITS:
        bench = Bench(place, dtype)
        step = bench.step({"method": "vcpo_ess_only"}, 4096)
        bench.take(step)  # what is chosen or compiled once
        with torch.profiler.profile(activities=activities) as profile:
            bench.take(step)
        layers = len(bench.trainable.chunks[0].decoder.layers)
        bench.close()
        found = _attention_events(profile)
        figures[dtype] = {"layers": layers, **found}
        if not found["operations"]:
            raise Missed(f"{dtype}: the profiler saw no operation of attention")
        if place.large and dtype == "bfloat16" and (dense := [n for n in found["operations"] if _DENSE.search(n)]):
            raise Missed(f"bfloat16: attention holds all scores: {', '.join(dense)}")
        shown = found["kernels"] or found["operations"]
        texts.append(f"{dtype}: " + ", ".join(f"{n} x{c['calls']}" for n, c in _most(shown)))
    return Found("; ".join(texts), figures)


def _most(found: dict[str, dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
    return sorted(found.items(), key=lambda item: -item[1]["ms"])[:3]


def _attention_events(profile: Any) -> dict[str, dict[str, dict[str, float]]]:
    """"operations" of the host and "kernels" of the device: name -> calls, milliseconds."""
    import torch

    calls: dict[str, Counter[str]] = {"operations": Counter(), "kernels": Counter()}
    spent: dict[str, Counter[str]] = {"operations": Counter(), "kernels": Counter()}
    for event in profile.events():
        if not _ATTENTION.search(event.name) or event.name.startswith("autograd::"):
            continue
        where = "kernels" if event.device_type == torch.autograd.DeviceType.CUDA else "operations"
        name = event.name.split("(")[0].split("<")[0].removeprefix("void ")[:80]
        calls[where][name] += 1
        spent[where][name] += event.time_range.elapsed_us()
    return {
        where: {name: {"calls": count, "ms": spent[where][name] / 1e3} for name, count in calls[where].items()}
        for where in calls
    }
