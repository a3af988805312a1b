"""Rotary positions as config.json describes them. The frequencies themselves are computed where torch is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import flag

#: rope_type -> keys that it needs, and keys that it may have.
_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Base frequency and scaling of rotary positions, with transformers' meaning of every number.

    kind      "default", "linear", "dynamic" (which equals "default" up to max_position_embeddings, and
              nothing longer is ever trained), "llama3" or "yarn"; fields of other kinds keep their defaults
    original  positions that the model was pretrained with (llama3, yarn)
    attention_factor  cosines and sines are multiplied by it (yarn)
    mscale_all_dim  latent attention multiplies its scores by yarn's factor for it, squared (0: by 1); others ignore it
    truncate  yarn's range of interpolated dimensions is rounded outwards to whole ones
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale_all_dim: float = 0.0


def read_rope(values: Mapping[str, Any], context: int, problems: list[str]) -> Rope:
    """Rope of a config.json with defaults filled in; adds to ``problems`` what cannot be honoured.

    transformers 5 keeps all of it in ``rope_parameters``, older versions in ``rope_theta`` and ``rope_scaling``.
    """
    merged: dict[str, Any] = {name: values.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    place, kind = "rope_scaling", "default"
    old, new = values.get("rope_scaling"), values.get("rope_parameters")
    if old and new and old != new:
        # Versions of transformers differ in which of them counts.
        problems.append("rope_scaling and rope_parameters are both given and differ: keep one of them")
    for name in ("rope_scaling", "rope_parameters"):
        found = {} if values.get(name) is None else values[name]
        if not isinstance(found, Mapping):
            problems.append(f"{name} = {found!r} is not an object")
            continue
        if any(isinstance(value, Mapping) for value in found.values()):
            problems.append(f"{name} differs between kinds of layers ({', '.join(found)}): not supported")
            continue
        merged.update(found)
        if (stated := found.get("rope_type", found.get("type"))) is not None:
            place, kind = name, stated
    if not isinstance(kind, str) or kind not in _KEYS:
        problems.append(f"{place}.rope_type = {kind!r} is not supported (only {', '.join(map(repr, _KEYS))})")
        kind = "default"
    if merged.get("partial_rotary_factor") not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor = {merged['partial_rotary_factor']!r} is not supported (only 1.0)")
    needed, optional = _KEYS[kind]
    numbers = {key: _number(merged, key, place, problems) for key in ("rope_theta", *needed)}
    numbers |= {
        key: _number(merged, key, place, problems)
        for key in optional
        if merged.get(key) is not None and key != "truncate"
    }
    return _rope(kind, numbers, merged, values, context, problems)


def _rope(
    kind: str,
    numbers: Mapping[str, float],
    merged: Mapping[str, Any],
    values: Mapping[str, Any],
    context: int,
    problems: list[str],
) -> Rope:
    rope = Rope(theta=numbers["rope_theta"], kind=kind, factor=numbers.get("factor", 1.0))
    if kind not in ("llama3", "yarn"):
        return rope
    # transformers lets a value beside rope_parameters win, and falls back to max_position_embeddings
    outside = values.get("original_max_position_embeddings")
    if outside is not None:
        outside = _number(values, "original_max_position_embeddings", "", problems)
    original = int(outside or numbers.get("original_max_position_embeddings") or context)
    if kind == "llama3":
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        if low >= high:
            problems.append(f"high_freq_factor = {high:g} must exceed low_freq_factor = {low:g}")
        return Rope(rope.theta, kind, rope.factor, low, high, original)
    attention = numbers.get("attention_factor")
    if attention is None:
        mscale, all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
        attention = _mscale(rope.factor, 1.0)
        if mscale and all_dim:
            attention = _mscale(rope.factor, mscale) / _mscale(rope.factor, all_dim)
    return Rope(
        rope.theta,
        kind,
        rope.factor,
        original=original,
        attention_factor=attention,
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        truncate=flag({"truncate": True, **merged}, "truncate", problems),
        mscale_all_dim=numbers.get("mscale_all_dim", 0.0),
    )


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's attention factor, https://arxiv.org/abs/2309.00071, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(merged: Mapping[str, Any], key: str, place: str, problems: list[str]) -> float:
    value = merged.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    name = key if key == "rope_theta" or not place else f"{place}.{key}"
    problems.append(f"{name} is missing" if value is None else f"{name} = {value!r} is not a positive number")
    return 1.0
