"""Sliding-window attention as config.json describes it: layers in which a token sees the last few tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .values import flag


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a token sees, itself included, in the ``layers`` (counted from 0) that have a window."""

    tokens: int
    layers: tuple[int, ...]


def read_window(values: Mapping[str, Any], kind: str, sizes: Mapping[str, int], problems: list[str]) -> Window | None:
    """The window by transformers' own rules; None when every layer sees the whole context.

    ``kind`` is ``ConfigRules.window``. Adds to ``problems`` what cannot be honoured.
    """
    if kind == "none" or (kind != "width" and not flag(values, "use_sliding_window", problems)):
        return None
    context, count, kinds = sizes["max_position_embeddings"], sizes["num_hidden_layers"], values.get("layer_types")
    tokens, first = (0 if values.get(key) is None else values[key] for key in ("sliding_window", "max_window_layers"))
    for key, value in (("sliding_window", tokens), ("max_window_layers", first)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            problems.append(f"{key} = {value!r}, no integer from 0 on")
            return None
    if not tokens:
        return None
    if kind == "width":
        layers = tuple(range(count))
    elif kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != count or any(name not in known for name in kinds):
            problems.append(f"layer_types = {kinds!r}, no list of {' or '.join(known)} for {count} layers")
            return None
        layers = tuple(layer for layer, name in enumerate(kinds) if name == "sliding_attention")
    elif kind == "on":
        problems.append("use_sliding_window without layer_types is not supported (an active sliding window)")
        return None
    else:
        layers = tuple(range(first, count))
    return Window(tokens, layers) if layers and tokens < context else None
