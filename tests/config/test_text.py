"""A message that is cut ends after a whole word."""

from __future__ import annotations

from vcpo_megatron.config.text import one_line


def test_one_line() -> None:
    assert one_line(" one\ntwo  three ") == "one two three"
    assert one_line("one two three", 13) == "one two three"
    assert one_line("one two three", 12) == "one two ..."
    assert one_line("one two three", 10) == "one ..."
    assert one_line("x" * 20, 10) == "xxxxxx ..."
    assert one_line("") == ""
    assert one_line(ValueError("a\tb")) == "a b"
