"""Foreign text as one line of a message, and as text that any encoding of Unicode can hold."""

from __future__ import annotations

import re
import textwrap

#: How characters that an encoding does not have are written where text leaves the process: as Python escapes them.
ESCAPED = "backslashreplace"
_WORD = re.compile(r"\S+")
#: Characters beyond a limit that a line is cut to before it is wrapped.
_MARGIN = 100


def encodable(text: str, encoding: str = "utf-8") -> str:
    """``text`` with what ``encoding`` cannot hold escaped as in Python ("\\ud83d").

    In UTF-8 these are lone surrogates: half of a pair in what a policy wrote or a server answered, a byte of a file
    name that is no UTF-8. Files, messages and SQLite take none.
    """
    return text.encode(encoding, ESCAPED).decode(encoding)


def printable(text: str) -> str:
    """``text`` with what a terminal would obey or cannot show (control and format characters, bytes of a file name that
    are no UTF-8) escaped as in Python."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _beginning(text: str, length: int) -> str:
    """The words of ``text`` with one blank between them, all or more than ``length`` characters; what follows is not
    looked at, since an exception may hold all of a file."""
    words, size = list[str](), 0
    for match in _WORD.finditer(text):
        words.append(text[match.start() : min(match.end(), match.start() + length)])
        size += len(words[-1]) + 1
        if size > length + 1:
            break
    return " ".join(words)


def one_line(text: object, limit: int = 300) -> str:
    """``text`` without line breaks (an exception that says nothing: its type), ``encodable``; what is longer than
    ``limit`` characters ends after a whole word, or within one that would leave less than half of that, with "..."."""
    line = encodable(_beginning(str(text), limit + _MARGIN))
    if not line and isinstance(text, BaseException):
        line = type(text).__name__
    if len(line) <= limit:
        return line
    short = textwrap.shorten(line, limit, placeholder=" ...")
    return short if len(short) >= limit // 2 else f"{line[: limit - 4]} ..."  # else an endless word goes with all of it


def kind_of(message: str) -> str:
    """``message`` without what differs from one failure of a kind to the next: its prompt and its numbers."""
    return re.sub(r"\bprompt \S+|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", message)
