"""Sums in a chat: literal prompts, literal answers, and a split that holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments.arithmetic import Arithmetic, parse_answer
from vcpo_megatron.environments.base import Action, EnvironmentSetupError
from vcpo_megatron.environments.chat import ChatTemplate


@pytest.fixture
def folder(chat_folder: Path) -> Path:
    return chat_folder


def make(folder: Path, **options: Any) -> Arithmetic:
    return Arithmetic(EnvironmentConfig(name="arithmetic", options=options), folder, 0)


def reward(environment: Arithmetic, pair: tuple[int, int], text: str) -> float:
    episode = environment.episode(type(environment.train_example(0))("x", {"pair": pair}))
    return asyncio.run(episode.step(Action((), text, "stop"))).reward


def test_prompt(folder: Path) -> None:
    environment = make(folder, prompt="{a}+{b}=")
    tokens = environment.prompt_tokens((7, 12))
    text = environment._chat.tokenizer.decode(list(tokens), skip_special_tokens=False)
    assert text == "<s>user 7+12=</s><s>assistant "
    assert tokens[0] == 95 and tokens[1:6] == tuple(map(lambda c: ord(c) - 32, "user "))
    assert environment.max_prompt_tokens == len(tokens) + 1  # 20+20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("19", 19),
        ("The answer is 19.", 19),
        ("7 + 12 = 19", 19),
        ("7 + 12 = 20", 20),
        ("", None),
        ("nineteen", None),
        ("7 + 12 = 19\n\n7 is a number", 19),
        ("x = 3 + 4 = 7", 7),
        ("= 1,234", 1234),
        ("-3", -3),
        ("1,019", 1019),
        ("1, 2, 3", 3),
        ("\u22125", -5),
        ("19\n", 19),
    ],
)
def test_answers(text: str, value: int | None) -> None:
    assert parse_answer(text) == value


def test_reward(folder: Path) -> None:
    environment = make(folder)
    assert reward(environment, (7, 12), "It is 19") == 1.0
    assert reward(environment, (7, 12), "It is 18") == 0.0
    assert reward(environment, (7, 12), "no idea") == 0.0


def test_no_training_prompt_is_held_out(folder: Path) -> None:
    environment = make(folder, largest=5, heldout=9)
    heldout = {example.data["pair"] for example in environment.heldout()}
    assert len(heldout) == 9
    drawn = {environment.train_example(index).data["pair"] for index in range(500)}
    swapped = {(b, a) for a, b in heldout}
    assert not drawn & (heldout | swapped)
    assert drawn == {(a, b) for a in range(6) for b in range(6)} - heldout - swapped


def test_bad_settings(folder: Path) -> None:
    for options, message in (
        ({"largest": 1}, "largest"),
        ({"prompt": "{a}"}, "must hold {a} and {b}"),
        ({"heldout": 500}, "a quarter"),
        ({"digits": 3}, "digits"),
    ):
        with pytest.raises(EnvironmentSetupError, match=message.replace("{", r"\{")):
            make(folder, **options)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(EnvironmentSetupError, match="no chat template"):
        make(folder)


def test_templates(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert ChatTemplate(folder).render(messages, generation_prompt=False) == "<s>user hi</s>"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}{{ messages | tojson }}{{ raise_exception('no') }}")
    with pytest.raises(EnvironmentSetupError, match="refuses these messages: no"):
        ChatTemplate(folder).render(messages)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(EnvironmentSetupError, match="no valid Jinja2"):
        ChatTemplate(folder)
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(EnvironmentSetupError, match="unsafe"):
        ChatTemplate(folder).render(messages)
