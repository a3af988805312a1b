"""The one error that conversion raises for anything a user can cause."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 8
REMEDY = "download the model folder again in full (not as Git LFS pointers)"


class ConversionError(ValueError):
    """A model folder or configuration that cannot be converted; the message names the value and the place."""


def listed(names: Iterable[str]) -> str:
    """Names joined for a one-line message: the first few, then how many more."""
    names = list(names)
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
