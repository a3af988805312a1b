"""Rows of data sets: what is read and checked of them, how a prompt becomes tokens, which rows are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...models.tokenizer import TokenizerError, load_tokenizer
from ...run.text import one_line
from ..base import EnvironmentSetupError
from ..chat import ChatTemplate
from ..datasets import read_records

#: Prompts that are tokenized at a time to learn their length.
_CHUNK = 1024


@dataclass(frozen=True)
class Row:
    """One row. ``number`` counts a file's rows from 0; ``values`` are by the environment's names, ``prompt`` and, where
    it is read, ``answer`` among them."""

    number: int
    where: str
    values: Mapping[str, Any]

    @property
    def prompt(self) -> str | list[Any]:
        return self.values["prompt"]

    @property
    def answer(self) -> Any:
        return self.values.get("answer")

    @property
    def identity(self) -> str:
        """Equal for rows of equal prompts, whatever a parquet file has in its messages (a time, say)."""
        return json.dumps(self.prompt, sort_keys=True, default=repr)


class PromptWriter:
    """Prompts as tokens: in the model's chat template, or as plain text. ``text`` holds {prompt}."""

    def __init__(
        self, tokenizer_dir: Path, *, chat: bool, system: str | None, text: str, arguments: Mapping[str, Any]
    ) -> None:
        """``arguments``: of the template. EnvironmentSetupError when the model folder has no tokenizer or template."""
        self._chat = ChatTemplate(tokenizer_dir, arguments) if chat else None
        self._system, self._text = system, text
        try:
            self.tokenizer: Tokenizer = self._chat.tokenizer if self._chat else _tokenizer(tokenizer_dir)
        except TokenizerError as error:
            raise EnvironmentSetupError(str(error)) from None

    def write(self, prompt: str | list[Any]) -> str:
        """The text that the policy reads; EnvironmentSetupError for a prompt that cannot be written."""
        if isinstance(prompt, str):
            text = self._text.replace("{prompt}", prompt)
            if self._chat is None:
                return text
            messages: list[Mapping[str, Any]] = [{"role": "user", "content": text}]
        elif self._chat is None:
            raise EnvironmentSetupError(
                "the prompt is no text; set environment.options.chat = true for lists of messages"
            )
        elif self._text != "{prompt}":
            raise EnvironmentSetupError(
                "the prompt is a list of messages: remove environment.options.text, which is for prompts that are texts"
            )
        else:
            messages = _messages(prompt)
        if self._system is not None:
            messages = [{"role": "system", "content": self._system}, *(m for m in messages if m["role"] != "system")]
        return self._chat.render(messages)

    def tokens(self, prompt: str | list[Any]) -> tuple[int, ...]:
        """Token ids of ``write``. Plain text gets what the tokenizer adds; a template has its own."""
        return tuple(self.tokenizer.encode(self.write(prompt), add_special_tokens=self._chat is None).ids)

    def lengths(self, rows: Sequence[Row]) -> Iterator[int]:
        """Tokens of every row's prompt; EnvironmentSetupError names the first row whose prompt cannot be written, or
        has no token that a policy could go on from."""
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            texts = [_of_row(row, lambda row: self.write(row.prompt)) for row in part]
            try:
                found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=self._chat is None)
            except Exception:  # fault boundary: the library raises bare Exception for everything
                for row in part:
                    _of_row(row, lambda row: self.tokens(row.prompt))
                raise
            for row, encoding in zip(part, found, strict=True):
                if not len(encoding):
                    raise EnvironmentSetupError(
                        f"{row.where}: its prompt, {one_line(repr(row.prompt), 80)}, has no tokens; correct the row"
                    )
                yield len(encoding)


def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "tokenizer.json")


def _of_row(row: Row, make: Callable[[Row], Any]) -> Any:
    """``make(row)``; whatever it raises names the row."""
    try:
        return make(row)
    except EnvironmentSetupError as error:
        raise EnvironmentSetupError(*(f"{row.where}: {line}" for line in error.problems)) from None
    except Exception as error:  # fault boundary: a template is a program that came with the model
        raise EnvironmentSetupError(
            f"{row.where}: its prompt cannot be written ({type(error).__name__}: {one_line(error)}); correct the row"
        ) from error


def _messages(prompt: Sequence[Any]) -> list[Mapping[str, Any]]:
    """A prompt's messages without what is null, as parquet fills in; EnvironmentSetupError for what is none."""
    for number, message in enumerate(prompt):
        content = isinstance(message, Mapping) and isinstance(message.get("content"), str)
        if not content or not isinstance(message.get("role"), str):
            raise EnvironmentSetupError(
                f"message {number} of its prompt is {one_line(repr(message), 80)}; "
                'give {"role": "user", "content": "..."}'
            )
    if not prompt or prompt[-1]["role"] == "assistant":
        ends = "an answer of the assistant" if prompt else "nothing"
        raise EnvironmentSetupError(f"its prompt ends with {ends}; the last message must be the user's")
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def read_rows(path: Path, wanted: Sequence[str], fields: Mapping[str, str], check: Callable[[Any], None]) -> list[Row]:
    """All rows of ``path``. ``check`` looks at a row's reference answer and raises ValueError for a bad one.

    EnvironmentSetupError names file and row of the first bad one.
    """
    rows = []
    for number, record in enumerate(read_records(path, wanted, fields)):
        row = Row(number, record.where, record.values)
        if not isinstance(row.prompt, str | list):
            raise EnvironmentSetupError(
                f"{row.where}: the prompt is {one_line(repr(row.prompt), 80)}; give a text or a list of messages"
            )
        try:
            check(row.answer)
        except ValueError as error:
            raise EnvironmentSetupError(
                f"{row.where}: {one_line(error)}; correct the row, or take another reward"
            ) from None
        rows.append(row)
    return rows


def hold_out(rows: Sequence[Row], share: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(to train on, held out): ``share`` of the distinct prompts, one at least, drawn by ``seed``, is held out.

    All rows of one prompt are on one side; of those held out the first stays.
    """
    first = {row.identity: row for row in reversed(rows)}

    def key(prompt: str) -> bytes:
        return hashlib.blake2b(f"{seed}/heldout/{prompt}".encode(errors="surrogatepass"), digest_size=16).digest()

    drawn = set(sorted(first, key=key)[: max(1, round(share * len(first)))])
    held = sorted((first[prompt] for prompt in drawn), key=lambda row: row.number)
    return [row for row in rows if row.identity not in drawn], held
