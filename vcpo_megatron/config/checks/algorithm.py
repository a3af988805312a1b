"""The method and the optimizer: what cannot be combined, and keys that would have no effect."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from ..methods import ORDERED_SURROGATES, SECOND_MOMENTS, TRUNCATED_SURROGATES
from ..schema import AlgorithmConfig, RunConfig


def algorithm_problems(config: RunConfig) -> Iterator[str]:
    """Combinations of method, baseline, weights and staleness that have no meaning, or are not correct."""
    algorithm, staleness = config.algorithm, config.staleness
    preset = algorithm.preset
    if not preset.corrected and staleness.max_staleness > 0 and not algorithm.allow_uncorrected:
        named = f'method = "{algorithm.method}"' if algorithm.is_level is None else 'is_level = "none"'
        yield (
            f"algorithm.{named}: with staleness.max_staleness = {staleness.max_staleness} off-policy data "
            "would be trained on without a correction; set is_level, max_staleness = 0, or allow_uncorrected = true"
        )
    if preset.needs_norms and not preset.linear:
        yield (
            f'algorithm.baseline = "{preset.baseline}": the gradient of method = "{algorithm.method}" is not linear in '
            "the advantage, so no optimal baseline exists; use group_mean, leave_one_out or zero"
        )
    if not preset.linear and algorithm.is_level not in (None, "none"):
        yield (
            f'algorithm.is_level = "{algorithm.is_level}": method = "{algorithm.method}" weighs ratios in its own '
            "way; remove is_level"
        )
    bands = preset.weights == "band"
    if algorithm.mismatch == "recorded" and (bands or not preset.linear or preset.is_level == "none"):
        named = f'method = "{algorithm.method}"' if algorithm.is_level is None else f'is_level = "{algorithm.is_level}"'
        why = "masks tokens by their whole ratio" if bands else "has no weight to split into lag and mismatch"
        yield f'algorithm.mismatch = "recorded": {named} {why}; use mismatch = "none", or vcpo or one of its kin'
    if algorithm.mismatch_threshold < 1:
        yield (
            f"algorithm.mismatch_threshold = {algorithm.mismatch_threshold}: every token's ratio would be cut, 1, that "
            "of engines that agree, included; at least 1"
        )
    if preset.ratio_low >= preset.ratio_high:
        yield f"algorithm.ratio_low = {preset.ratio_low}: must be below ratio_high = {preset.ratio_high}"
    elif preset.bounded and not preset.ratio_low <= 1 <= preset.ratio_high:
        name = "ratio_high" if preset.ratio_high < 1 else "ratio_low"
        yield (
            f"algorithm.{name} = {getattr(preset, name)}: ratio_low and ratio_high bound the ratio itself, and 1, "
            "on-policy, is not between them; give 1 - epsilon and 1 + epsilon"
        )
    if algorithm.is_threshold < 1:
        yield (
            f"algorithm.is_threshold = {algorithm.is_threshold}: every weight would be cut, 1, that of an on-policy "
            "trajectory, included; at least 1"
        )
    if 0 < preset.spike_clip < 1:
        yield (
            f"algorithm.spike_clip = {preset.spike_clip}: every gradient would be cut below those before it; 0, or at "
            "least 1"
        )
    yield from _opob_mode(config)
    if (algorithm.kl_coef > 0) != (algorithm.kl_reference != "none"):
        yield (
            f'algorithm.kl_coef = {algorithm.kl_coef}: with kl_reference = "{algorithm.kl_reference}" it has no '
            "effect; set both or neither"
        )
    base = algorithm.base_ess_ratio
    if base == "auto":
        if staleness.lag == "exact":
            yield 'algorithm.base_ess_ratio = "auto": needs staleness.lag = "bounded"; give a number for "exact"'
        if algorithm.mismatch == "recorded":
            yield (
                'algorithm.base_ess_ratio = "auto": follows the mismatch in the ratio, of which mismatch = "recorded" '
                "leaves nothing; give a number"
            )
    elif not 0 < base <= 1:
        yield f'algorithm.base_ess_ratio = {base}: must be "auto" or a number above 0 and at most 1'


def _opob_mode(config: RunConfig) -> Iterator[str]:
    algorithm, preset, parallel = config.algorithm, config.algorithm.preset, config.parallel
    if (preset.statistic or preset.surrogate in ORDERED_SURROGATES) and parallel.context > 1:
        yield (
            f'algorithm.method = "{algorithm.method}": needs a trajectory\'s tokens on one rank, which '
            f"parallel.context = {parallel.context} does not give; use context = 1"
        )
    if preset.needs_norms and algorithm.opob_mode == "proxy" and parallel.expert > 1:
        yield (
            f'algorithm.opob_mode = "proxy": groups are spread over ranks with parallel.expert = {parallel.expert}, '
            'where no rank sees a whole one; use "accumulate", "deferred" or "two_pass"'
        )
    if preset.needs_norms and algorithm.opob_mode == "proxy" and parallel.virtual_pipeline > 1:
        yield (
            f'algorithm.opob_mode = "proxy": its packs do not come in multiples of the {parallel.pipeline} stages that '
            f"parallel.virtual_pipeline = {parallel.virtual_pipeline} needs; use another mode or 1"
        )
    if preset.baseline == "opob_leave_one_out" and algorithm.opob_mode == "accumulate":
        yield (
            'algorithm.baseline = "opob_leave_one_out": one sum a group cannot carry a baseline for each trajectory; '
            'use opob_mode = "deferred" or "two_pass"'
        )


def training_problems(config: RunConfig) -> Iterator[str]:
    """The optimizer, its schedule and the size of groups."""
    train, optimizer = config.train, config.optimizer
    if train.group_size == 1:
        yield "train.group_size = 1: rewards of a group of one have no variance, nothing would be trained; at least 2"
    length = optimizer.schedule_steps or train.steps
    named = f"{'optimizer.schedule_steps' if optimizer.schedule_steps else 'train.steps'} = {length}"
    if optimizer.warmup_steps >= length:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps}: must be below {named}, the learning rate would never "
            "be reached"
        )
    if optimizer.lr * optimizer.weight_decay >= 1:
        yield (
            f"optimizer.weight_decay = {optimizer.weight_decay}: a step of optimizer.lr = {optimizer.lr} would take "
            f"more than a weight off it; below 1 / lr = {1 / optimizer.lr:g}"
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr = {optimizer.min_lr}: above optimizer.lr = {optimizer.lr}"
    if (optimizer.schedule == "wsd") != (optimizer.decay_steps is not None):
        yield f'optimizer.decay_steps = {optimizer.decay_steps}: belongs to schedule = "wsd", which needs it; set both'
    elif optimizer.decay_steps is not None and optimizer.warmup_steps + optimizer.decay_steps > length:
        yield (
            f"optimizer.decay_steps = {optimizer.decay_steps}: with warmup_steps = {optimizer.warmup_steps} more than "
            f"{named}"
        )
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"optimizer.betas = {list(optimizer.betas)}: each must be at least 0 and below 1"


def idle_keys(config: RunConfig) -> Iterator[str]:
    """Keys that would have no effect beside the others, one line each: whoever sets one expects it.

    A key is idle when it was given another value than its default and nothing in the run reads it. Defaults are never
    refused, so one file serves several methods as long as it says only what all of them use.
    """
    algorithm, preset = config.algorithm, config.algorithm.preset
    method = f'method = "{algorithm.method}"'
    no_norms = f'baseline = "{preset.baseline}" takes no gradient norms'
    mode = f'opob_mode = "{algorithm.opob_mode}"'
    opob = preset.needs_norms
    weighs = (preset.linear and preset.is_level != "none" and preset.weights != "band") or (
        preset.surrogate in TRUNCATED_SURROGATES
    )
    one_failure = (config.staleness.lag == "bounded", 'lag = "exact" ends with the first failure')
    named_files = config.environment.data is not None or config.environment.heldout is not None
    #: section.key -> (it has an effect, why it has none)
    reads = {
        "algorithm.ratio_low": (preset.bounded, f"{method} does not bound ratios"),
        "algorithm.ratio_high": (preset.bounded, f"{method} does not bound ratios"),
        "algorithm.is_threshold": (
            weighs,
            f'is_level = "{preset.is_level}" has no weight to truncate'
            if preset.linear and preset.is_level == "none"
            else f"{method} truncates no weight",
        ),
        "algorithm.is_threshold_length": (
            weighs and preset.is_level in ("sequence", "turn") and 1 < algorithm.is_threshold < math.inf,
            _why_it_does_not_grow(algorithm),
        ),
        "algorithm.mismatch_threshold": (algorithm.mismatch == "recorded", 'mismatch = "none" has no such ratio'),
        "algorithm.second_moment": (preset.statistic in SECOND_MOMENTS, f"{method} does not bound it"),
        "algorithm.opob_mode": (opob, no_norms),
        "algorithm.opob_weights": (
            opob and preset.is_level == "sequence",
            f'is_level = "{preset.is_level}" has no weight of a trajectory' if opob else no_norms,
        ),
        "algorithm.opob_accumulators": (
            opob and algorithm.opob_mode in ("accumulate", "deferred"),
            f"{mode} keeps nothing of a group in flight" if opob else no_norms,
        ),
        "algorithm.opob_accumulator_dtype": (
            opob and algorithm.opob_mode == "accumulate",
            f'only opob_mode = "accumulate" with an OPOB baseline has accumulators; {mode}',
        ),
        "algorithm.record_norms": (not opob or algorithm.opob_mode == "proxy", f"{mode} records them in any case"),
        "algorithm.ess_rule": (preset.ess_scaling, "ess_scaling = false"),
        "algorithm.base_ess_ratio": (preset.ess_scaling, "ess_scaling = false"),
        "algorithm.step_bound_target": (preset.step_bound != "off", 'step_bound = "off"'),
        "optimizer.min_lr": (config.optimizer.schedule != "constant", 'schedule = "constant" does not end anywhere'),
        "optimizer.schedule_steps": (config.optimizer.schedule != "constant", 'schedule = "constant" has no length'),
        "train.start_optimizer": (config.train.start_from is not None, "train.start_from is not set"),
        "staleness.adaptive_ess": (config.staleness.adaptive, "staleness.adaptive = false"),
        "rollout.servers": (not config.rollout.addresses, "the servers of rollout.addresses are joined"),
        "rollout.sync_wave": (config.staleness.lag == "bounded", 'lag = "exact" updates all servers together'),
        "rollout.bucket_bytes": (config.rollout.sync != "disk", 'sync = "disk" writes whole folders'),
        "rollout.max_prompt_failures": one_failure,
        "rollout.max_failure_ratio": one_failure,
        "environment.fields": (
            named_files or ":" in config.environment.name,
            "environment.data and environment.heldout are not set",
        ),
    }
    for key, (has_effect, why) in reads.items():
        name, _, field = key.partition(".")
        section = getattr(config, name)
        declared = type(section).model_fields[field]
        value, usual = getattr(section, field), declared.get_default(call_default_factory=True)
        if not has_effect and value != usual:
            yield f"{key} = {json.dumps(value)}: has no effect, since {why}; remove it"


def _why_it_does_not_grow(algorithm: AlgorithmConfig) -> str:
    """Why ``is_threshold_length`` has no effect, where it has none."""
    preset = algorithm.preset
    if not preset.linear or preset.weights == "band":
        return f'method = "{algorithm.method}" truncates no weight of a trajectory or a turn'
    if preset.is_level not in ("sequence", "turn"):
        return f'is_level = "{preset.is_level}" has no weight of a trajectory or a turn'
    return f"is_threshold = {algorithm.is_threshold} is the same at every length"
