"""A tokenizer is read by the tokenizers library; each of its plain exceptions becomes one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from vcpo_megatron.models.tokenizer import TokenizerError, encode_text, load_tokenizer


def test_it_is_read_and_encodes(tmp_path: Path) -> None:
    made = Tokenizer(WordLevel({"a": 3, "b": 5}))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert encode_text(tokenizer, "b a b") == [5, 3, 5]
    with pytest.raises(TokenizerError, match="cannot encode the text: WordLevel error"):
        encode_text(tokenizer, "a z")


def test_one_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(TokenizerError, match=f"^{path}: no such file"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(TokenizerError, match=f"^{path}: not a tokenizer"):
        load_tokenizer(path)
