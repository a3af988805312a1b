"""A model's chat template: its arguments, and what stands between two answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.environments.conftest import CHATML
from vcpo_megatron.environments.base import Action, EnvironmentSetupError
from vcpo_megatron.environments.chat import ChatTemplate

ASKED = [{"role": "user", "content": "2+2?"}]
AGAIN = [{"role": "user", "content": "Sure?"}]


def template(folder: Path, source: str, **arguments: bool) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source, "eos_token": "</s>"}))
    return ChatTemplate(folder, arguments)


def ids(chat: ChatTemplate, text: str) -> tuple[int, ...]:
    return tuple(chat.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("answer", "reason", "between"),
    [
        ("4</s>", "stop", "<s>user Sure?</s><s>assistant "),  # its end was sampled
        ("4", "length", "</s><s>user Sure?</s><s>assistant "),  # it was cut off
        ("4</s>", "length", "</s><s>user Sure?</s><s>assistant "),
        ("4", "stop", "</s><s>user Sure?</s><s>assistant "),  # ended by a token that is no part of the turn
        ("", "length", "</s><s>user Sure?</s><s>assistant "),
    ],
)
def test_what_stands_between_two_answers(chat_folder: Path, answer: str, reason: str, between: str) -> None:
    chat = ChatTemplate(chat_folder)
    found = chat.next_turn(ASKED, Action(ids(chat, answer), answer, reason), AGAIN)
    assert chat.tokenizer.decode(list(found), skip_special_tokens=False) == between
    if reason == "stop" and answer.endswith("</s>"):  # all of it is what the template writes of the whole conversation
        said = [*ASKED, {"role": "assistant", "content": "4"}, *AGAIN]
        assert chat.tokens(ASKED) + ids(chat, answer) + found == chat.tokens(said)


def test_an_end_of_several_tokens_is_sampled_in_part(chat_folder: Path) -> None:
    chat = template(chat_folder, CHATML.replace("</s>", "</s>.;"))
    action = Action(ids(chat, "4</s>."), "4.", "stop")
    found = chat.next_turn(ASKED, action, AGAIN)
    assert chat.tokenizer.decode(list(found), skip_special_tokens=False) == ";<s>user Sure?</s>.;<s>assistant "


@pytest.mark.parametrize(
    ("source", "times"),
    [
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "0 times"),
        ("{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}", "2 times"),
    ],
)
def test_a_template_that_does_not_write_an_answer_as_it_is(chat_folder: Path, source: str, times: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=f"writes an answer {times}; several turns"):
        template(chat_folder, source).next_turn(ASKED, Action((1,), "4", "stop"), AGAIN)


def test_arguments_reach_the_template(chat_folder: Path) -> None:
    source = "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    assert template(chat_folder, source).render(ASKED) == "2+2?"
    assert template(chat_folder, source, enable_thinking=False).render(ASKED) == "2+2?!"
