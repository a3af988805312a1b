"""The model's tokenizer, read without transformers, whose import takes torch with it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from .base import EnvironmentSetupError


def load_tokenizer(path: Path) -> Tokenizer:
    """That of ``path``, a tokenizer.json; EnvironmentSetupError when it is missing or cannot be read."""
    if not path.is_file():
        raise EnvironmentSetupError(f"{path}: no such file; set model.path to a folder with a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for everything
        raise EnvironmentSetupError(
            f"{path}: not a tokenizer ({error}); take the tokenizer.json that came with the model"
        ) from error
