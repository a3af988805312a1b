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
    """Attention of the first layer, as a step computes it over its first pack, against softmax in fp64 trajectory by
    trajectory: output, and gradients of queries, keys and values."""
    from .bench import Bench

    figures, texts = {}, []
    for dtype, limit in LIMITS.items():
        bench = Bench(place, dtype)
        step = bench.step({"method": "vcpo_ess_only"}, 4096)
        seen = Seen()
        handle = (
            bench.trainable.chunks[0]
            .decoder.layers[0]
            .self_attention.core_attention.register_forward_hook(seen.look, with_kwargs=True)
        )
        bench.take(step)
        handle.remove()
        bench.close()
        expected = _softmax(seen)
        pairs = {name: float((seen.found[name].double() - e).norm() / e.norm()) for name, e in expected.items()}
        figures[dtype] = {"lengths": seen.lengths, **pairs}
        texts.append(require(max(pairs.values()), limit, dtype))
    return Found(", ".join(texts), figures)


class Seen:
    """What goes through an attention module in its first forward with gradients: ``found`` by name, [T, heads, d], and
    ``lengths`` of the sequences of the pack, padding included."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.lengths: list[int] = []
        self.scale: float | None = None

    def look(self, module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        """A forward hook of the module."""
        if self.found or not output.requires_grad:
            return
        self.scale = getattr(module, "softmax_scale", None)
        self.lengths = keywords["packed_seq_params"].cu_seqlens_q.diff().tolist()
        for name, tensor in zip(("query", "key", "value"), inputs, strict=False):
            self.found[name] = tensor.detach()
            tensor.register_hook(lambda gradient, name=name: self.found.update({f"gradient of {name}": gradient}))
        self.found["output"] = output.detach()
        output.register_hook(lambda gradient: self.found.update({"weights": gradient}))


def _softmax(seen: Seen) -> dict[str, Any]:
    """In plain formulas: what ``seen`` holds of output and gradients, fp64."""
    import torch

    leaves = [seen.found[name].double().requires_grad_() for name in ("query", "key", "value")]
    q, k, v = leaves
    pieces = []
    for a, b, c in zip(*(z.split(seen.lengths) for z in (q, k, v)), strict=True):
        b, c = (z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (b, c))  # heads that share keys and values
        scores = torch.einsum("thd,shd->hts", a, b) * (seen.scale or a.shape[-1] ** -0.5)
        future = torch.ones(len(a), len(a), device=a.device, dtype=torch.bool).triu(1)
        pieces.append(torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), c))
    output = torch.cat(pieces).reshape(seen.found["output"].shape)
    gradients = torch.autograd.grad(output, leaves, seen.found["weights"].double().reshape(output.shape))
    names = ("query", "key", "value")
    return {"output": output.detach(), **{f"gradient of {n}": g for n, g in zip(names, gradients, strict=True)}}


def kernels(place: Place) -> Found:
    """What a step runs, from the profiler: operations of attention, and the device's kernels with their time. In
    bfloat16 none may hold all scores of a trajectory."""
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
    """ "operations" of the host and "kernels" of the device: name -> calls, milliseconds."""
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
