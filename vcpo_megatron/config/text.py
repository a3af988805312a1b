"""Foreign text as one line of a message."""

from __future__ import annotations

import textwrap


def one_line(text: object, limit: int = 300) -> str:
    """``text`` without line breaks; what is longer than ``limit`` characters ends after a whole word, with "..."."""
    line = " ".join(str(text).split())
    if len(line) <= limit:
        return line
    short = textwrap.shorten(line, limit, placeholder=" ...")
    return short if short != "..." else f"{line[: limit - 4]} ..."  # one endless word
