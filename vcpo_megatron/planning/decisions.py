"""What a configuration comes to, before anything starts: what its method decides, the sizes of its batches, and every
key that is not at its default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from ..config.load import flatten
from ..config.schema import RunConfig


def decisions(config: RunConfig) -> str:
    """Several lines, each with its subject before it."""
    parts = {
        "method": _method(config),
        "precision": _precision(config),
        "batch": _batch(config),
        "run": _run(config),
        "staleness": _staleness(config),
        "not default": _differences(config),
    }
    width = max(map(len, parts))
    lines = [(name if not number else "", line) for name, found in parts.items() for number, line in enumerate(found)]
    return "\n".join(f"{name:<{width}}  {line}" for name, line in lines)


def _method(config: RunConfig) -> Iterator[str]:
    """The preset with what the configuration overrides, one decision a line."""
    algorithm, preset = config.algorithm, config.algorithm.preset
    yield f"{algorithm.method}: {preset.summary}"
    given = {name for name in algorithm.model_fields_set if getattr(algorithm, name) is not None}
    mark = {field.name: " (given)" if field.name in given else "" for field in dataclasses.fields(preset)}
    yield f"baseline = {preset.baseline}{mark['baseline']}"
    bound = f", {preset.weights} at {algorithm.is_threshold:g}" if algorithm.is_threshold < math.inf else ", as it is"
    bound = bound if preset.is_level != "none" else ""
    if preset.bounded:
        bound += f", ratios from {preset.ratio_low:g} to {preset.ratio_high:g}"
    yield f"importance = {preset.is_level}{mark['is_level']}{bound}; surrogate = {preset.surrogate}"
    std = "divided by the group's standard deviation" if preset.normalize_std else "as they are"
    yield (
        f"advantages {std}{mark['normalize_std']}; normalization = {preset.loss_normalization}"
        f"{mark['loss_normalization']}"
    )
    base = f"{algorithm.base_ess_ratio:g}" if isinstance(algorithm.base_ess_ratio, float) else algorithm.base_ess_ratio
    rate = f"scaled by ESS, {algorithm.ess_rule}, base {base}" if preset.ess_scaling else "not scaled by ESS"
    yield f"learning rate {config.optimizer.lr:g}, {config.optimizer.schedule}; {rate}{mark['ess_scaling']}"
    bounds = [f"{preset.step_bound} at {algorithm.step_bound_target:g}{mark['step_bound']}"]
    bounds = bounds if preset.step_bound != "off" else []
    if preset.spike_clip:
        bounds.append(f"norms clipped at {preset.spike_clip:g} times the recent ones{mark['spike_clip']}")
    if bounds:
        yield f"step bounded: {', '.join(bounds)}"


def _precision(config: RunConfig) -> Iterator[str]:
    model = config.model
    logits = "float32" if model.upcasts_logits else model.dtype
    yield f"{model.dtype} parameters and activations, {logits} logits; float32 gradients and optimizer"


def _batch(config: RunConfig) -> Iterator[str]:
    groups, size, replicas = config.train.groups_per_update, config.train.group_size, max(1, config.data_parallel)
    whole, rest = divmod(groups * size, replicas)
    each = f"{whole}" if not rest else f"{whole} or {whole + 1}"
    yield (
        f"{groups} groups x {size} answers = {groups * size} trajectories a step, {each} a data-parallel replica "
        f"(replicas: {replicas}, learner ranks: {config.launch.learner_ranks})"
    )
    if (updates := config.train.updates_per_batch) > 1:
        yield f"{updates} steps a batch of {config.train.groups_per_step} groups; weights are sent after the last"


def _run(config: RunConfig) -> Iterator[str]:
    steps, groups, size = config.train.steps, config.train.groups_per_update, config.train.group_size
    yield (
        f"{steps} steps: {steps * groups} groups, {steps * groups * size} trajectories of at most "
        f"{config.rollout.max_new_tokens} sampled tokens"
    )
    every = {"evaluation": config.train.eval_every, "checkpoint": config.checkpoint.every}
    yield ", ".join(f"{name} every {n} steps" if n else f"no {name} on the way" for name, n in every.items())


def _staleness(config: RunConfig) -> Iterator[str]:
    lag = config.staleness.max_staleness
    ahead = (lag + 1) * config.train.groups_per_update * config.train.group_size
    how = "exactly" if config.staleness.lag == "exact" else "at most"
    yield f"{how} {lag} versions; at most {ahead} trajectories sampled ahead; servers: {config.rollout.fleet_size}"


def _differences(config: RunConfig) -> Iterator[str]:
    """Keys whose values are not the schema's defaults; those without a default are always there."""
    values = {key: value for key, value in flatten(config).items() if key != "model.dtype"}  # has a line of its own
    found = [line for key, value in values.items() if (line := _difference(config, key, value)) is not None]
    yield from found or ["nothing"]


def _difference(config: RunConfig, key: str, value: Any) -> str | None:
    section, _, name = key.partition(".")
    model: BaseModel = getattr(config, section)
    field = type(model).model_fields[name]
    if field.is_required():
        return f"{key} = {_shown(value)}"
    default = field.get_default(call_default_factory=True)
    return None if value == default else f"{key} = {_shown(value)}  (default {_shown(default)})"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
