"""A message that is cut ends after a whole word."""

from __future__ import annotations

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
    assert one_line("") == ""
    assert one_line(ValueError("a\tb")) == "a b"


def test_encodable() -> None:
    assert encodable("plain, é, 漢 😀\n") == "plain, é, 漢 😀\n"
    assert encodable("\ud83d and \udcff") == "\\ud83d and \\udcff"
    assert encodable("é 😀", "latin-1") == "é \\U0001f600"
    assert one_line("half \ud83d") == "half \\ud83d"
