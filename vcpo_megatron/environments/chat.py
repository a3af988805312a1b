"""Chat messages as a model's own template writes them, and their tokens: tokenizers and Jinja2, no transformers.

A template is a Jinja2 program that comes with the model. It runs in a sandbox, with the names and the extensions that
transformers gives it, but for the time: what it prints as today is the day of the run's start, at midnight, so that
prompts do not change while the run goes on, or when it is resumed.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..models.tokenizer import TokenizerError, end_tokens, load_tokenizer
from ..run.json_file import JsonFileError, read_json_object
from .base import Action, EnvironmentSetupError

Message = Mapping[str, Any]

#: What stands for an answer where the template is asked what follows one.
_ANSWER = "an answer"
#: The day that templates print, and the templates that were made, while an environment is made.
_making: ContextVar[tuple[datetime.date, list[ChatTemplate]] | None] = ContextVar("making", default=None)


@contextmanager
def making(date: datetime.date | None) -> Iterator[list[ChatTemplate]]:
    """Templates that are made inside print ``date`` as today (None: the day it is), and are in what is returned."""
    made: list[ChatTemplate] = []
    token = _making.set((date or datetime.date.today(), made))
    try:
        yield made
    finally:
        _making.reset(token)


class ChatTemplate:
    """Tokenizer and chat template of a model folder; EnvironmentSetupError when it has none. ``arguments``: what the
    template may ask for beside the messages (``enable_thinking``)."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any] = {}) -> None:
        self.folder = folder
        self._arguments = dict(arguments)
        try:
            self.tokenizer = load_tokenizer(folder / "tokenizer.json")
        except TokenizerError as error:
            raise EnvironmentSetupError(str(error)) from None
        settings = _settings(folder / "tokenizer_config.json")
        self._special = _special_tokens(folder, settings)
        source = _template_source(folder, settings)
        today, made = _making.get() or (datetime.date.today(), [])
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        midnight = datetime.datetime.combine(today, datetime.time())
        environment.globals["strftime_now"] = midnight.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise EnvironmentSetupError(f"{folder}: its chat template is no valid Jinja2 ({error})") from None
        made.append(self)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """Text of a conversation, ending (by default) where the model's answer begins."""
        # a key that is None is one that is not there: templates ask whether it is defined
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(
                messages=given,
                tools=None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._special | self._arguments,
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

    @property
    def end_of_turn(self) -> int | None:
        """Id of the token that the template writes after an answer; None where it writes none of the added tokens."""
        turn = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self.render(turn, generation_prompt=False)
        except EnvironmentSetupError:  # it wants other roles
            return None
        after = self.tokenizer.encode(text.rpartition(_ANSWER)[2], add_special_tokens=False).ids
        added = self.tokenizer.get_added_tokens_decoder()
        return next((token for token in after if token in added), None)

    def endless(self, sampling: Mapping[str, Any]) -> str | None:
        """Why answers that are sampled with ``sampling`` never end where the template ends a turn; None when they
        do."""
        end = self.end_of_turn
        if end is None or sampling.get("ignore_eos"):
            return None
        try:
            known = end_tokens(self.folder, _settings(self.folder / "config.json"))
        except (TokenizerError, EnvironmentSetupError):  # refused by name elsewhere
            return None
        if end in known or end in sampling.get("stop_token_ids", ()):
            return None
        ends = f"are {', '.join(map(str, sorted(known)))}" if known else "are none"
        return (
            f"{self.folder}: the chat template ends an answer with {self.tokenizer.id_to_token(end)} (id {end}), and "
            f"the ids that end sampling (eos_token_id) {ends}: answers go on to max_new_tokens; add {end} to "
            "eos_token_id in generation_config.json, or have the environment's sampling say stop_token_ids"
        )


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what the model wrote, which transformers can mark; the text is the
    same, and so is the scope of names that are set inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return str(caller())


def _settings(path: Path) -> Mapping[str, Any]:
    """Content of a JSON file of the tokenizer; none where there is no such file."""
    try:
        return read_json_object(path) if path.exists() else {}
    except JsonFileError as error:
        raise EnvironmentSetupError(f"{error}; correct the file") from None


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by the names that a template knows them under; those that are null have none."""
    named = dict(settings)
    if "added_tokens_decoder" not in settings:  # as older folders have it
        named |= _settings(folder / "special_tokens_map.json")
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        more = settings.get(key)
        named |= more if isinstance(more, dict) else {}
    texts = {key: _text(value) for key, value in named.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
