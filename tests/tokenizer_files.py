"""A tokenizer.json that has a token for each of some characters, from the format's description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def character_tokenizer(
    vocabulary: Mapping[str, int], *, unknown: str, special: Sequence[str] = (), pattern: str = "."
) -> dict[str, Any]:
    """Its content: ids by ``vocabulary``, then the ``special`` ones; texts are split at every match of ``pattern``."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = len(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [{"id": first + i, "content": token, **flags} for i, token in enumerate(special)],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": dict(vocabulary), "unk_token": unknown},
    }
