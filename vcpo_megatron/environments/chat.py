"""Chat messages as a model's own template writes them, and their tokens: tokenizers and Jinja2, no transformers.

A template is a Jinja2 program that comes with the model. It runs in a sandbox, with the names that
transformers gives it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..models.tokenizer import TokenizerError, load_tokenizer
from ..run.json_file import JsonFileError, read_json_object
from .base import Action, EnvironmentSetupError

Message = Mapping[str, Any]


class ChatTemplate:
    """Tokenizer and chat template of a model folder; EnvironmentSetupError when it has none. ``arguments``: what the
    template may ask for beside the messages (``enable_thinking``)."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any] = {}) -> None:
        self._arguments = dict(arguments)
        try:
            self.tokenizer = load_tokenizer(folder / "tokenizer.json")
        except TokenizerError as error:
            raise EnvironmentSetupError(str(error)) from None
        settings = _settings(folder / "tokenizer_config.json")
        self._special = {key: _text(value) for key, value in settings.items() if key.endswith("_token")}
        source = _template_source(folder, settings)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise EnvironmentSetupError(f"{folder}: its chat template is no valid Jinja2 ({error})") from None

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """Text of a conversation, ending (by default) where the model's answer begins."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=generation_prompt, **self._special | self._arguments
            )
        except jinja2.TemplateError as error:
            raise EnvironmentSetupError(f"the chat template refuses these messages: {error}") from None

    def tokens(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> tuple[int, ...]:
        """Token ids of ``render``; the template writes special tokens itself, none are added."""
        text = self.render(messages, generation_prompt=generation_prompt)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def next_turn(self, messages: Sequence[Message], action: Action, new: Sequence[Message]) -> tuple[int, ...]:
        """Tokens between two answers: the end of the assistant's turn, as far as ``action`` has not sampled it, the
        ``new`` messages (the user's, a tool's), and the opening of the next answer.

        ``messages`` is the conversation before the answer. EnvironmentSetupError when the template does not write an
        answer as it is.
        """
        mark = "\ue000answer\ue000"  # private characters: in no conversation
        text = self.render([*messages, {"role": "assistant", "content": mark}, *new])
        if text.count(mark) != 1:
            raise EnvironmentSetupError(
                f"the chat template writes an answer {text.count(mark)} times; several turns need it once"
            )
        after = tuple(self.tokenizer.encode(text.partition(mark)[2], add_special_tokens=False).ids)
        if action.finish_reason != "stop":
            return after
        sampled = range(min(len(after), len(action.token_ids)), 0, -1)
        return after[next((size for size in sampled if action.token_ids[-size:] == after[:size]), 0) :]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens without special ones."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


def _settings(path: Path) -> Mapping[str, Any]:
    """Content of tokenizer_config.json; none where there is no such file."""
    try:
        return read_json_object(path) if path.exists() else {}
    except JsonFileError as error:
        raise EnvironmentSetupError(f"{error}; correct the file") from None


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str:
    """chat_template.jinja, as transformers 5 writes it, else ``chat_template`` of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    if not isinstance(found, str):
        raise EnvironmentSetupError(
            f"{folder}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
            "take an instruction-tuned model"
        )
    return found


def _text(token: Any) -> Any:
    """Older tokenizer_config.json files describe a special token as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
