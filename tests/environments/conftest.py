"""A tokenizer folder for environments: the digits, "=", and whatever a test asks for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[[str], Path]:
    """``make_tokenizer(characters)`` writes a one-token-a-character tokenizer.json and returns its folder."""

    def make(characters: str = "0123456789=") -> Path:
        last = max(20, len(characters) - 1)  # ids are not the digits
        vocabulary = {character: last - index for index, character in enumerate(characters)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return make
