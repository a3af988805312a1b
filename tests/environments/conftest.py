"""Tokenizer folders for environments: the digits, "=", and whatever a test asks for; and one with a chat template."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.environments.in_process import forgotten_modules
from tests.tokenizer_files import character_tokenizer

CHATML = (
    "{% for message in messages %}<s>{{ message['role'] + ' ' + message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


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


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    """A tokenizer of single characters with <s> and </s>, and a template."""
    letters = "".join(map(chr, range(32, 127)))
    vocabulary = {character: index for index, character in enumerate(letters)}
    tokenizer = character_tokenizer(vocabulary, unknown=" ", special=("<s>", "</s>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "</s>"}))
    return tmp_path


@pytest.fixture(autouse=True)
def modules_are_forgotten() -> Iterator[None]:
    with forgotten_modules():
        yield
