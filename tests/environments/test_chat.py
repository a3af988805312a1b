"""Chat templates give what transformers gives, but for the day, which is that of the run's start."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.messages import assert_names
from tests.tokenizer_files import character_tokenizer
from vcpo_megatron.config.schema import EnvironmentConfig
from vcpo_megatron.environments import arithmetic, chat
from vcpo_megatron.environments.base import EnvironmentSetupError
from vcpo_megatron.environments.chat import ChatTemplate, making
from vcpo_megatron.environments.registry import make_environment

DAY = datetime.date(2026, 1, 31)
LETTERS = "".join(map(chr, range(32, 127))) + "\nö"
ADDED = ("<s>", "</s>", "<turn>", "<end>")
END = len(LETTERS) + 3
CHATML = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(template, eos=..., generation=..., **settings): a model's folder; a tokenizer of characters and ADDED."""

    def build(template: str = CHATML, *, eos: Any = None, generation: Any = None, **settings: Any) -> Path:
        vocabulary = {character: index for index, character in enumerate(LETTERS)}
        tokenizer = character_tokenizer(vocabulary, unknown=" ", special=ADDED, pattern="[\\s\\S]")
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
        written = {key: value for key, value in {**kind, **settings}.items() if value != "absent"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
        (tmp_path / "chat_template.jinja").write_text(template)
        (tmp_path / "config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        return tmp_path

    return build


def of_transformers(folder: Path, messages: Sequence[Any], generation_prompt: bool, monkeypatch: Any) -> str:
    """What transformers renders at midnight of DAY."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return datetime.datetime(DAY.year, DAY.month, DAY.day)

    monkeypatch.setattr(chat_template_utils, "datetime", Stopped)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)


TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is <b>ö</b>?"},
    {"role": "assistant", "content": "a letter", "tool_calls": None},
]
NULLS = {"bos_token": None, "eos_token": "</s>", "pad_token": None, "unk_token": None}
#: What differed from transformers, and what never did: template, settings.
TEMPLATES: list[tuple[str, dict[str, Any]]] = [
    (CHATML, {}),
    ("{{ bos_token }}" + CHATML, NULLS),
    ("{% if bos_token is defined %}{{ bos_token }}{% else %}none{% endif %}", NULLS),
    (
        "{{ bos_token }}|{{ eos_token }}|{{ add_bos_token }}|{{ image_token }}",
        {"bos_token": "<s>", "add_bos_token": True},
    ),
    ("{{ bos_token }}|{{ eos_token }}", {"bos_token": {"content": "<s>", "__type": "AddedToken", "lstrip": False}}),
    ("{{ image_token }}|{{ audio_token }}", {"image_token": "<turn>", "extra_special_tokens": {"audio_token": "<s>"}}),
    ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", {}),
    ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", {}),
    (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}\n  {%- generation -%}  {{ m.content }}<end>\n"
        "  {%- endgeneration -%}\n{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}",
        {},
    ),
    ("{{ messages | tojson }}", {}),
    ("{{ messages | tojson(ensure_ascii=True) }}", {}),
    ("{{ messages[1] | tojson(indent=2, ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}", {}),
    ("{{ strftime_now('%d %B %Y %H:%M') }}", {}),
    ("{% if tools is not none %}tools{% endif %}{% if documents is none %}none{% endif %}", {}),
    ("{% for m in messages %}{{ m.keys() | list }}{{ m.tool_calls is defined }}{% endfor %}", {}),
    ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}", {}),
]


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(("template", "settings"), TEMPLATES, ids=[row[0][:50] for row in TEMPLATES])
def test_as_transformers_renders_it(
    make: Make, template: str, settings: dict[str, Any], generation_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(template, **settings)
    with making(DAY):
        ours = ChatTemplate(folder).render(TURNS, generation_prompt=generation_prompt)
    assert ours == of_transformers(folder, TURNS, generation_prompt, monkeypatch)


def test_special_tokens_of_older_folders(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("{{ bos_token }}|{{ eos_token }}", added_tokens_decoder="absent", bos_token="<turn>")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    assert ChatTemplate(folder).render(TURNS) == "<s>|</s>" == of_transformers(folder, TURNS, True, monkeypatch)


# --- the day ----------------------------------------------------------------------------------

DATED = "{{ strftime_now('%Y-%m-%d') }} " + CHATML


class Later(datetime.date):
    """The process's clock after midnight."""

    @classmethod
    def today(cls) -> Later:
        return cls(2031, 5, 5)


def environment(folder: Path, date: datetime.date | None) -> Any:
    return make_environment(EnvironmentConfig(name="arithmetic", date=date), folder, 0)


def test_the_day_of_the_start_stays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(DATED)
    before = environment(folder, DAY)
    monkeypatch.setattr(datetime, "date", Later)
    after = environment(folder, DAY)
    assert before.prompt_tokens((1, 2)) == after.prompt_tokens((1, 2)) and before.fingerprint == after.fingerprint
    assert "2026-01-31" in after._chat.render([{"role": "user", "content": "x"}])
    assert environment(folder, None).fingerprint != before.fingerprint  # of the day it is


def test_one_that_a_user_s_factory_makes_has_it_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def factory(config: EnvironmentConfig, folder: Path, seed: int) -> Any:
        made.append(ChatTemplate(folder).render([{"role": "user", "content": "x"}]))
        return arithmetic.Arithmetic(config.model_copy(update={"name": "arithmetic"}), folder, seed)

    monkeypatch.setattr(chat, "factory", factory, raising=False)
    config = EnvironmentConfig(name="vcpo_megatron.environments.chat:factory", date=DAY)
    make_environment(config, make(DATED), 0)
    assert made[0].startswith("2026-01-31 ")


# --- the end of a turn ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, END),
        ("{% for m in messages %}{{ m.content }} </s>{% endfor %}", END - 2),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}", None),
    ],
)
def test_the_token_that_ends_an_answer(make: Make, template: str, end: int | None) -> None:
    assert ChatTemplate(make(template)).end_of_turn == end


@pytest.mark.parametrize(
    ("eos", "generation", "known"),
    [(None, None, "are none"), (1, None, "are 1"), (END, [1, 7], "are 1, 7"), ([1, END], 2, "are 2")],
)
def test_an_end_that_the_servers_do_not_know_is_warned_of(make: Make, eos: Any, generation: Any, known: str) -> None:
    folder, said = make(eos=eos, generation=generation), list[str]()
    config = EnvironmentConfig(name="arithmetic")
    make_environment(config, folder, 0, warn=said.append)
    (line,) = said
    assert_names(line, f"<end> (id {END})", f"(eos_token_id) {known}")
    assert f"add {END} to eos_token_id in generation_config.json" in line and str(folder) in line


@pytest.mark.parametrize(
    ("eos", "generation", "sampling"),
    [
        (END, None, {}),
        ([1, END], None, {}),
        (1, [2, END], {}),
        (1, None, {"stop_token_ids": (END,)}),
        (1, None, {"ignore_eos": True, "max_new_tokens": 3}),
    ],
)
def test_one_that_they_know_is_not(make: Make, eos: Any, generation: Any, sampling: dict[str, Any]) -> None:
    assert ChatTemplate(make(eos=eos, generation=generation)).endless(sampling) is None


def test_a_template_that_is_no_jinja_is_refused(make: Make) -> None:
    for broken in ("{% generation %}x", "{% endgeneration %}", "{% for %}"):
        with pytest.raises(EnvironmentSetupError, match="its chat template is no valid Jinja2"):
            ChatTemplate(make(broken))
