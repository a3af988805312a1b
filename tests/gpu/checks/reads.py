"""Whether the host waits for the device inside forward and backward."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu.checklist import NEEDS_A_GPU, Found, Missed, Place, Skipped

WAYS: dict[str, dict[str, str]] = {
    "plain": {"method": "vcpo_ess_only"},
    "accumulate": {"opob_mode": "accumulate"},
    "deferred": {"opob_mode": "deferred"},
    "two_pass": {"opob_mode": "two_pass"},
    "proxy": {"opob_mode": "proxy"},
}
#: As torch says it; turning its check on says something of synchronizing, too.
_SYNCHRONIZES = re.compile("called a synchronizing")


def none_in_the_schedule(place: Place) -> Found:
    """Megatron's schedule of every mode under torch's own check of synchronizing calls: first as a warning, which finds
    all of them, then as an error."""
    from .bench import Bench

    bench = Bench(place, "bfloat16")
    found: dict[str, dict[str, int]] = {}
    entered = 0
    for name, keys in WAYS.items():
        step = bench.step(keys, 2048 if place.large else 64)
        bench.take(step)  # what is compiled, chosen or allocated once
        with watched_schedule("warn", place.large) as watch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bench.take(step)
        entered += watch.entered
        found[name] = dict(Counter(_place(w) for w in caught if _SYNCHRONIZES.search(str(w.message))))
    if not entered:
        raise Missed("no schedule ran under the check: it is entered by another name than passes.run_schedule")
    if not place.large:
        bench.close()
        raise Skipped(NEEDS_A_GPU)
    refused = next((f"{name}: {text}" for name, keys in WAYS.items() if (text := _error(bench, keys))), "")
    bench.close()
    total = sum(count for places in found.values() for count in places.values())
    if total or refused:
        worst = max(found, key=lambda name: sum(found[name].values()))
        where = ", ".join(f"{at} x{count}" for at, count in Counter(found[worst]).most_common(6))
        raise Missed(f"{total} calls wait for the device inside the schedule; {worst}: {where}; first, {refused}")
    return Found(f"none in {entered} schedules of {len(WAYS)} modes", {"reads": found})


class Watch:
    """``entered``: how many schedules ran."""

    entered = 0


@contextlib.contextmanager
def watched_schedule(mode: str, gpu: bool) -> Iterator[Watch]:
    """torch.cuda.set_sync_debug_mode(mode) inside every schedule of a step, and nowhere else."""
    import torch

    from vcpo_megatron.learner.step import passes

    original, watch = passes.run_schedule, Watch()

    def run_schedule(*arguments: Any, **keywords: Any) -> None:
        watch.entered += 1
        if gpu:
            torch.cuda.set_sync_debug_mode(mode)
        try:
            original(*arguments, **keywords)
        finally:
            if gpu:
                torch.cuda.set_sync_debug_mode("default")

    passes.run_schedule = run_schedule  # type: ignore[assignment]
    try:
        yield watch
    finally:
        passes.run_schedule = original


def _place(warning: warnings.WarningMessage) -> str:
    path = Path(warning.filename)
    return f"{'/'.join(path.parts[-2:])}:{warning.lineno}"


def _error(bench: Any, keys: dict[str, str]) -> str:
    """Where the first synchronizing call of a schedule is, as an error; "" where there is none."""
    step = bench.step(keys, 2048)
    bench.take(step)
    try:
        with watched_schedule("error", True):
            bench.take(step)
    except RuntimeError as error:
        if not _SYNCHRONIZES.search(str(error)):
            raise
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if "torch" not in Path(frame.filename).parts
        ]
        last = frames[-1]
        return f"{Path(last.filename).name}:{last.lineno} {last.line}"
    return ""
