"""A model's tokenizer.json, read by the tokenizers library alone: transformers would import torch with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..run.json_file import JsonFileError, read_json_object


class TokenizerError(ValueError):
    """A tokenizer is missing or broken, or cannot encode a text; one line that names the file."""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in ``path``, a tokenizer.json; TokenizerError."""
    if not path.is_file():
        raise TokenizerError(f"{path}: no such file; give a model folder with a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # fault boundary: the library raises bare Exception for everything
        raise TokenizerError(
            f"{path}: not a tokenizer ({error}); take the tokenizer.json that came with the model"
        ) from None


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of ``text``, by default with the special tokens that the tokenizer adds; TokenizerError."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    except Exception as error:  # fault boundary: as above; for a word outside a vocabulary without UNK
        raise TokenizerError(f"the model's tokenizer cannot encode the text: {error}") from None


def end_tokens(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer: ``eos_token_id`` of generation_config.json where that has one, else of ``config``, the
    content of config.json; TokenizerError when it is none."""
    path = folder / "generation_config.json"
    try:
        value = read_json_object(path).get("eos_token_id") if path.is_file() else None
    except JsonFileError as error:
        raise TokenizerError(str(error)) from None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise TokenizerError(f"{folder}: eos_token_id = {value!r} is no token id or list of them")
    return frozenset(ids)
