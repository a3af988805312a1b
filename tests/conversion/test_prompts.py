"""Prompts of ``vcpo convert verify --prompts``: every bad line is named by its file and number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vcpo_megatron.conversion.errors import ConversionError
from vcpo_megatron.conversion.logprobs import read_prompts


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Digits are words, and there is no word for what is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def read(folder: Path, *lines: str) -> list[list[int]]:
    (folder / "p.jsonl").write_text("\n".join(lines) + "\n")
    return read_prompts(folder / "p.jsonl", folder, 10, 5)


def test_tokens_and_text(tokenizer: Path) -> None:
    assert read(tokenizer, '{"tokens": [0, 9]}', "", '{"text": "3 1 4", "note": 1}') == [[0, 9], [3, 1, 4]]


@pytest.mark.parametrize("first", ['{"tokens": [0, 9]}', '{"text": "0 9"}', "\n" + '{"tokens": [0, 9]}'])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tokenizer: Path, first: str) -> None:
    (tokenizer / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + first.encode() + b'\r\n{"tokens": [1, 2]}\r\n')
    assert read_prompts(tokenizer / "p.jsonl", tokenizer, 10, 5) == [[0, 9], [1, 2]]


def test_the_fixed_ones_fit_the_model(tmp_path: Path) -> None:
    assert read_prompts(None, tmp_path, 10, 3) == [[0, 9, 8], [1, 0, 9], [2, 1, 0]]


LONG = json.dumps({"text": ["x" * 100]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": null}', '"tokens" is null, not a list of token ids'),
        ('{"tokens": 5}', '"tokens" is 5, not a list of token ids'),
        ('{"tokens": "12"}', '"tokens" is "12", not a list of token ids'),
        ('{"tokens": [1, true]}', "token 1 is true, not an id from 0 to 9"),
        ('{"tokens": [1, 2.0]}', "token 1 is 2.0, not an id from 0 to 9"),
        ('{"tokens": [1, [2]]}', "token 1 is [2], not an id from 0 to 9"),
        ('{"tokens": [10, 1]}', "token 0 is 10, not an id from 0 to 9"),
        ('{"tokens": [1, -1]}', "token 1 is -1, not an id from 0 to 9"),
        ('{"tokens": [1]}', "1 tokens, where 2 to 5 are needed"),
        ('{"tokens": [1, 1, 1, 1, 1, 1]}', "6 tokens, where 2 to 5 are needed"),
        ('{"text": 5}', '"text" is 5, not a string'),
        ('{"text": null}', '"text" is null, not a string'),
        (LONG, f'"text" is ["{"x" * 35}..., not a string'),
        ('{"text": "1 2 z"}', "cannot encode the text: WordLevel error: Missing [UNK] token from the vocabulary"),
        ('{"text": "\\ud800"}', "cannot encode the text"),
        ('{"text": "1", "tokens": [1, 2]}', 'expected an object with either "text" or "tokens"'),
        ("{}", 'expected an object with either "text" or "tokens"'),
        ("[1, 2]", 'expected an object with either "text" or "tokens"'),
        ("{", "no JSON (Expecting property name"),
        ("[" * 100_000, "no JSON (maximum recursion depth"),
    ],
)
def test_a_bad_line_is_named(tokenizer: Path, line: str, message: str) -> None:
    with pytest.raises(ConversionError) as caught:
        read(tokenizer, '{"tokens": [1, 2]}', "", line)
    assert str(caught.value).startswith(f"{tokenizer / 'p.jsonl'}:3: ") and message in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    for lines, message in (([""], "holds no prompt"), (['{"text": "1 2"}'], r":1: .*tokenizer\.json: no such file")):
        with pytest.raises(ConversionError, match=message):
            read(tmp_path, *lines)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"tokenizer\.json: not a tokenizer"):
        read(tmp_path, '{"text": "1 2"}')
    (tmp_path / "p.jsonl").write_bytes(b"\xff")
    with pytest.raises(ConversionError, match=r"p\.jsonl cannot be read"):
        read_prompts(tmp_path / "p.jsonl", tmp_path, 10, 5)
