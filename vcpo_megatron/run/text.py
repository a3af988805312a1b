"""Foreign text as one line of a message."""

from __future__ import annotations

import re
import textwrap


def printable(text: str) -> str:
    """``text`` with what a terminal would obey or cannot show (control and format characters, bytes of a file name that
    are no UTF-8) escaped as in Python."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def one_line(text: object, limit: int = 300) -> str:
    """``text`` without line breaks (an exception that says nothing: its type); what is longer than ``limit``
    characters ends after a whole word, with "..."."""
    line = " ".join(str(text).split())
    if not line and isinstance(text, BaseException):
        line = type(text).__name__
    if len(line) <= limit:
        return line
    short = textwrap.shorten(line, limit, placeholder=" ...")
    return short if short != "..." else f"{line[: limit - 4]} ..."  # one endless word


def kind_of(message: str) -> str:
    """``message`` without what differs from one failure of a kind to the next: its prompt and its numbers."""
    return re.sub(r"\bprompt \S+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", message)
