"""A message that is cut ends after a whole word."""

from __future__ import annotations

import random
import textwrap
import time

import pytest

from vcpo_megatron.run.text import encodable, one_line, printable


def test_printable() -> None:
    assert printable("plain, é, 漢 😀") == "plain, é, 漢 😀"
    assert printable("a\x1b[2J\x07\n\x9b\u202e\udce9\x7f") == "a\\x1b[2J\\x07\\n\\x9b\\u202e\\udce9\\x7f"


def test_one_line() -> None:
    assert one_line(" one\ntwo  three ") == "one two three"
    assert one_line("one two three", 13) == "one two three"
    assert one_line("one two three", 12) == "one two ..."
    assert one_line("one two three", 10) == "one ..."
    assert one_line("x" * 20, 10) == "xxxxxx ..."
    assert one_line("raised: " + "x" * 40, 30) == "raised: " + "x" * 18 + " ..."  # what is said stays
    assert one_line("") == ""
    assert one_line(ValueError("a\tb")) == "a b"


def test_encodable() -> None:
    assert encodable("plain, é, 漢 😀\n") == "plain, é, 漢 😀\n"
    assert encodable("\ud83d and \udcff") == "\\ud83d and \\udcff"
    assert encodable("é 😀", "latin-1") == "é \\U0001f600"
    assert one_line("half \ud83d") == "half \\ud83d"


@pytest.mark.parametrize("limit", [10, 12, 13, 40, 300, 1000])
def test_a_line_is_as_that_of_the_whole_text(limit: int) -> None:
    """Cutting before wrapping changes nothing: as ``textwrap`` has it of all words."""
    draw = random.Random(limit)
    for _ in range(300):
        sizes = draw.choices([1, 3, 7, 30, 150, 1500], weights=[9, 9, 9, 3, 1, 0.2], k=draw.randrange(1, 80))
        words = ["".join(draw.choices("abc-.\ud83d", weights=[9, 9, 9, 2, 1, 0.1], k=size)) for size in sizes]
        text = "".join(word + draw.choice([" ", "\n", "  ", "\t", "\x1c", "\u2003"]) for word in words)
        line = encodable(" ".join(text.split()))
        short = line if len(line) <= limit else textwrap.shorten(line, limit, placeholder=" ...")
        assert one_line(text, limit) == (
            short if len(line) <= limit or len(short) >= limit // 2 else f"{line[: limit - 4]} ..."
        )


@pytest.mark.parametrize(("first", "rest"), [("", "x "), ("", "y"), ("", "a-"), ("word", " \n"), ("word ", "\ud83d")])
def test_a_huge_text_is_cut_before_it_is_wrapped(first: str, rest: str) -> None:
    text = first + rest * 10_000_000
    started = time.process_time()
    line = one_line(ValueError(text), 1000)
    assert time.process_time() - started < 2.0 and len(line) <= 1000
