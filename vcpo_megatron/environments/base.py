"""What a task is: asynchronous, multi-turn, token-in token-out.

An ``Environment`` is made once a run and shared by all episodes; it owns the prompts. An
``Episode`` is one attempt at one prompt. The agent loop drives it:

    observation = await episode.reset()            the prompt, as token ids
    loop: action = what the policy sampled
          result = await episode.step(action)
          Observation -> its tokens follow the answer, masked out of training; sample again
          Outcome     -> the reward; the episode is over
    await episode.close()                          always, also after an error or a cancellation

Tokens never pass through text on their way to the trainer: what the policy saw and wrote is what
is trained on. ``Action.text`` is for parsers only.

An ``Action`` without tokens and with ``finish_reason`` "length" says that no room is left for
another answer (token budget or context): ``step`` must then return an ``Outcome``.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..run.text import encodable


class EnvironmentSetupError(ValueError):
    """The environment cannot be made as configured. ``problems``: one line each, with its remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Example:
    """One prompt. ``prompt_id`` is unique in a run; ``data`` is what the environment keeps about it."""

    prompt_id: str
    data: Mapping[str, Any]

    def __post_init__(self) -> None:
        """The id goes into messages, request ids and the store, all of them UTF-8: it is escaped once, here."""
        if isinstance(self.prompt_id, str):  # what else a user gives is refused by name, where it is asked for
            object.__setattr__(self, "prompt_id", encodable(self.prompt_id))


@dataclass(frozen=True)
class Action:
    """What the policy sampled in one turn, stop token included; ``finish_reason`` "stop" or "length"."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Observation:
    """Tokens that the policy reads next: the prompt, a tool's output, the opening of the next turn."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """End of an episode. ``info`` holds numbers worth averaging beside the reward."""

    reward: float
    info: Mapping[str, float] = field(default_factory=dict)


class Episode(Protocol):
    """One attempt at one prompt. Exceptions end this trajectory as failed, not the run."""

    async def reset(self) -> Observation: ...

    async def step(self, action: Action) -> Observation | Outcome: ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """A task with its prompts.

    name               as in ``environment.name``
    fingerprint        changes whenever the same index could give another example (compared on resume)
    sampling           sampling parameters that the task needs beside the run's (``ignore_eos``,
                       ``stop_token_ids``, ...); ``max_new_tokens`` in it caps every single answer
    max_prompt_tokens  length of the longest prompt
    """

    name: str
    fingerprint: str
    sampling: Mapping[str, Any]
    max_prompt_tokens: int

    def train_example(self, index: int) -> Example:
        """Example ``index`` = 0, 1, 2, ... of an endless seeded stream, in any order of calls."""
        ...

    def heldout(self) -> Sequence[Example]:
        """The prompts of every evaluation; none of them is a training prompt."""
        ...

    def episode(self, example: Example) -> Episode: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, for ``Action.text``."""
        ...

    # An environment may also have ``reference(example)``, the tokens of a right answer, () for none, which a check
    # before a run plays (``vcpo env check``), and ``notes``, lines that a user is told at the start.


class Problems:
    """Collects the problems of several independent checks, so that a user sees all of them at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Note what the block's ``EnvironmentSetupError`` says, but for what is noted already, and go on."""
        try:
            yield
        except EnvironmentSetupError as error:
            self.found.extend(problem for problem in error.problems if problem not in self.found)

    def raise_if_any(self) -> None:
        if self.found:
            raise EnvironmentSetupError(*self.found)


_Options = TypeVar("_Options", bound=BaseModel)


def parse_options(
    model: type[_Options], options: Mapping[str, Any], owner: str, key: str = "environment.options"
) -> _Options:
    """``options``, which stand under ``key``, as ``model``; EnvironmentSetupError names each bad value, and what
    ``owner`` allows."""
    try:
        return model(**options)
    except ValidationError as error:
        allowed = ", ".join(model.model_fields)
        raise EnvironmentSetupError(
            *(f"{_explain(model, item, key)} (options of {owner}: {allowed or 'none'})" for item in error.errors())
        ) from error


def _explain(model: type[BaseModel], item: ErrorDetails, key: str) -> str:
    name = ".".join(map(str, (key, *item["loc"])))
    if item["type"] == "missing":
        return f"{name}: missing; add it"
    if item["type"] != "extra_forbidden":
        return f"{name} = {item['input']!r}: {item['msg'].lower().removeprefix('value error, ')}"
    near = difflib.get_close_matches(str(item["loc"][-1]), model.model_fields, 1)
    return f"{name}: unknown key" + (f"; did you mean {key}.{near[0]}?" if near else "")


def fingerprint(*parts: object) -> str:
    """16 hex digits over ``parts``; a Path stands for the content of its file, None for itself."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:16]
