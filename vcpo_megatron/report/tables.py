"""Tables of text: cells that are right-aligned, and no wider than the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ..run.text import printable


def cell(value: Any, form: str) -> str:
    """``value`` in a format; "-" for None. Text, which may be a user's or a policy's, is ``printable``."""
    return "-" if value is None else format(value, form) if form else printable(str(value))


def aligned(table: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """One line a row, columns as wide as their widest cell. Last columns that do not fit ``width`` characters are left
    out whole; the first one always stays."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    while width is not None and len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > width:
        widths.pop()
    return ["  ".join(text.rjust(size) for text, size in zip(row, widths, strict=False)) for row in table]


def terminal_width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none, and lines may have any length."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None
