"""Single values of a Hugging Face config.json: each fault is one line, and reading goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keys whose layers or experts are gone through one by one, and a number that no model comes near to.
_COUNTED = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts"), 10_000)


def positive(values: Mapping[str, Any], key: str, problems: list[str]) -> int:
    """The positive integer ``key``; 1, and a line in ``problems``, when it is none."""
    value = values.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        if value <= _COUNTED.get(key, value):
            return value
        problems.append(f"{key} = {value} is more than any model has")
        return 1
    problems.append(f"{key} is missing" if value is None else f"{key} = {value!r} is not a positive integer")
    return 1  # only so that the remaining checks can run


def flag(values: Mapping[str, Any], key: str, problems: list[str]) -> bool:
    """``key``, false where it is absent or null; a line in ``problems`` when it is another thing than true or false."""
    value = values.get(key)
    if not isinstance(value, bool | None):
        problems.append(f"{key} = {value!r} is not true or false")
    return bool(value)


def layers(values: Mapping[str, Any], key: str, problems: list[str]) -> list[int]:
    """``key``, a list of numbers of layers; empty where it is absent or null, or, with a line, where it is no such."""
    value = values.get(key)
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    problems.append(f"{key} = {value!r} is no list of layers")
    return []


def positive_float(values: Mapping[str, Any], key: str, problems: list[str]) -> float:
    """The positive number ``key``; 1.0, and a line in ``problems``, when it is none."""
    value = values.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    problems.append(f"{key} is missing" if value is None else f"{key} = {value!r} is not a positive number")
    return 1.0
