"""Executed on a rank of a test world of its own: steps without storage, one after another."""

from __future__ import annotations

from typing import Any

from vcpo_megatron.config.schema import RunConfig
from vcpo_megatron.types import Batch


def rehearse_each(cases: list[tuple[RunConfig, Batch, int, int]]) -> list[dict[str, Any]]:
    """For each (run, batch, rank, ranks): what the step asked of the device."""
    from vcpo_megatron.learner.rehearsal import rehearse

    found = []
    for config, batch, rank, ranks in cases:
        seen = rehearse(config, batch, rank=rank, ranks=ranks)
        assert seen.result is not None and not seen.result.skipped
        found.append(
            {
                "blocking": dict(seen.reads.blocking),
                "in schedule": dict(seen.reads.in_schedule),
                "asynchronous": dict(seen.reads.asynchronous),
                "awaited": dict(seen.reads.awaited),
                "unplanned": dict(seen.unplanned),
                "waiting": dict(seen.waiting),
                "operations": sum(seen.operations.values()),
                "parameters": seen.parameters,
            }
        )
    return found
