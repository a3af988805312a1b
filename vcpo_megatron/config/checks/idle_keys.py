"""Keys of the method and the schedule that would have no effect: refused by name, since whoever sets one expects it.

A key is idle when it was given another value than its default and nothing in the run reads it. Defaults are never
refused, so one file serves several methods as long as it says only what all of them use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..schema import RunConfig


def idle_keys(config: RunConfig) -> Iterator[str]:
    """One line for every key that has no effect."""
    algorithm, row = config.algorithm, config.algorithm.row
    method = f'method = "{algorithm.method}"'
    no_norms = f'baseline = "{row.baseline}" takes no gradient norms'
    mode = f'opob_mode = "{algorithm.opob_mode}"'
    opob = row.needs_norms
    #: section.key -> (it has an effect, why it has none)
    reads = {
        "algorithm.ratio_low": (row.bounded, f"{method} does not bound ratios"),
        "algorithm.ratio_high": (row.bounded, f"{method} does not bound ratios"),
        "algorithm.second_moment": (row.statistic == "second_moment", f"{method} does not bound it"),
        "algorithm.opob_mode": (opob, no_norms),
        "algorithm.opob_weights": (
            opob and row.is_level == "sequence",
            f'is_level = "{row.is_level}" has no weight of a trajectory' if opob else no_norms,
        ),
        "algorithm.opob_accumulators": (
            opob and algorithm.opob_mode in ("accumulate", "deferred"),
            f"{mode} keeps nothing of a group in flight" if opob else no_norms,
        ),
        "algorithm.opob_accumulator_dtype": (
            opob and algorithm.opob_mode == "accumulate",
            f'only opob_mode = "accumulate" with an OPOB baseline has accumulators; {mode}',
        ),
        "algorithm.ess_rule": (row.ess_scaling, "ess_scaling = false"),
        "algorithm.base_ess_ratio": (row.ess_scaling, "ess_scaling = false"),
        "optimizer.min_lr": (config.optimizer.schedule != "constant", 'schedule = "constant" does not end anywhere'),
    }
    for key, (has_effect, why) in reads.items():
        name, _, field = key.partition(".")
        section = getattr(config, name)
        value, usual = getattr(section, field), type(section).model_fields[field].default
        if not has_effect and value != usual:
            yield f"{key} = {json.dumps(value)}: has no effect, since {why}; remove it"
