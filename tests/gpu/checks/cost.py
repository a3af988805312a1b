"""Memory and time of every mode beside a plain step, and how long an answer may be until memory is full."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np

from tests.gpu.checklist import Found, Place, require
from tests.gpu.models import trajectory

MODES = ("plain", "accumulate", "deferred", "two_pass", "proxy")
#: Tokens of the longest answer that is tried.
LONGEST = 65000


def beside_plain(place: Place) -> Found:
    """One table a length: seconds, over plain, bytes. accumulate keeps 4 bytes a parameter at most, deferred none."""
    from benchmarks import step as benchmark

    shape, groups, medians = ("500M", 8, (128, 1024)) if place.large else ("1M", 2, (48,))
    texts, figures = [], {}
    for median in medians:
        work = benchmark.Workload(shape, median, groups, groups, dtype="bfloat16")
        bench = benchmark.Bench(place.folder, work, MODES)
        compared = bench.compare(rounds=3 if place.large else 1)
        print(benchmark.table(compared), flush=True)
        _leave()
        peak = {outcome.name: outcome.transient for outcome in compared.outcomes}
        kept = {outcome.name: outcome.persistent / bench.parameters for outcome in compared.outcomes}
        extra = (peak["accumulate"] - peak["plain"]) / bench.parameters
        figures[f"median {median}"] = {"table": benchmark.table(compared).splitlines(), **compared.as_json()}
        texts.append(
            f"answers of {median}: {require(extra, 4.4, 'bytes a parameter beyond plain')}, "
            f"{require(kept['deferred'], 0.0, 'buffers of deferred')}, "
            + ", ".join(f"{name} {compared.ratio(name):.2f}x" for name in MODES[1:])
        )
    return Found("; ".join(texts), figures)


def what_fits(place: Place) -> Found:
    """Bytes a parameter between two steps, and each mode's longest answer, doubled until memory or time is out."""
    import torch
    from benchmarks import step as benchmark

    deadline = time.monotonic() + 0.8 * place.seconds
    shape, first, most = ("500M", 4096, LONGEST) if place.large else ("1M", 32, 128)
    names = ("plain", "accumulate", "deferred")
    work, figures, texts = benchmark.Workload(shape, first, 1, 2, dtype="bfloat16"), {}, []
    if place.large:
        figures["bytes of the device"] = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    for number, name in enumerate(names):
        own = time.monotonic() + (deadline - time.monotonic()) / (len(names) - number)
        bench = benchmark.Bench(place.folder, work, (name,))  # one that ran out of memory leaves half a step behind
        bench.step(name)  # makes the optimizer's state
        held = torch.cuda.memory_allocated() / bench.parameters if place.large else None
        figures[name] = {"bytes a parameter": held, **_double(bench, name, first, most, own)}
        figures["parameters"] = bench.parameters
        del bench
        _leave()
        texts.append(f"{name} {figures[name]['longest']:,} tokens ({figures[name]['ended by']})")
    return Found(f"{figures['parameters'] / 1e6:.0f}M parameters: " + ", ".join(texts), figures)


def _double(bench: Any, name: str, first: int, most: int, deadline: float) -> dict[str, Any]:
    """``longest`` answer whose step fits, why no longer one was tried, and the peak of each length."""
    import torch
    from benchmarks import step as benchmark

    tokens, longest, peaks = first, 0, {}
    while True:
        bench.batch = _two_answers(bench.batch, benchmark.SHAPES[bench.work.model][4], tokens)
        started = time.monotonic()
        try:
            peaks[tokens] = benchmark.peak_bytes(name, bench.step)
        except torch.OutOfMemoryError:
            ended = "memory"
            break
        longest = tokens
        if tokens >= most:
            ended = "longest tried"
            break
        if time.monotonic() + 4 * (time.monotonic() - started) > deadline:  # attention is quadratic
            ended = "time"
            break
        tokens = min(2 * tokens, most)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"longest": longest, "ended by": ended, "peak bytes": peaks}


def _two_answers(batch: Any, vocabulary: int, tokens: int) -> Any:
    """A batch of one group of two answers of ``tokens`` tokens, prompts included: each is a pack."""
    draw = np.random.default_rng(tokens)
    members = [
        trajectory(0, i, ids[:16], ids[16:], [-np.log(vocabulary)] * (tokens - 16), float(i))
        for i, ids in enumerate(draw.integers(0, vocabulary, (2, tokens)))
    ]
    return replace(batch, groups=(replace(batch.groups[0], group_id=0, trajectories=tuple(members)),))


def _leave() -> None:
    from tests.learner.world import leave_layout

    leave_layout()
