"""A model's tokenizer.json, read by the tokenizers library alone: transformers would import torch with it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


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


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of ``text``, with the special tokens that the tokenizer adds; TokenizerError."""
    try:
        return list(tokenizer.encode(text).ids)
    except Exception as error:  # fault boundary: as above; for a word outside a vocabulary without UNK
        raise TokenizerError(f"the model's tokenizer cannot encode the text: {error}") from None
