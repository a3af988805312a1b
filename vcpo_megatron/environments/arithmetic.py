"""Sums of two integers in a chat: small enough for a small instruction-tuned model to get right now and then.

    user: What is 7 + 12?      assistant: 7 + 12 = 19      reward 1

The integer after the last equals sign counts, or without one the last integer. Held-out sums are drawn once from
``seed``; a training prompt never equals one of them, in either order of the two numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..config.schema import EnvironmentConfig
from .base import Action, EnvironmentSetupError, Example, Observation, Outcome, Problems, fingerprint, parse_options
from .chat import ChatTemplate

NAME = "arithmetic"

Pair = tuple[int, int]


class ArithmeticOptions(BaseModel):
    """``environment.options``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    largest: int = Field(20, ge=2, le=10**6, description="the largest number that is added")
    heldout: int = Field(32, ge=1, le=1024, description="held-out sums")
    prompt: str = Field("What is {a} + {b}?", description="must hold {a} and {b}")


def draw_pair(stream: str, index: int, largest: int) -> Pair:
    """Pair ``index`` of a stream: two uniform numbers from 0 to ``largest``, a function of its arguments alone."""
    hashed = hashlib.blake2b(f"{stream}/{index}/{largest}".encode(), digest_size=32).digest()
    size = largest + 1
    return int.from_bytes(hashed[:16], "little") % size, int.from_bytes(hashed[16:], "little") % size


_INTEGER = r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)"


def parse_answer(text: str) -> int | None:
    """The integer after the last "=", else the last integer of ``text``; None when there is none.

    Thousands may be separated by commas.
    """
    found = re.findall(rf"=\s*({_INTEGER})(?!\s*[-+*/=])", text) or re.findall(rf"(?<![\d.,]){_INTEGER}", text)
    return int(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


class ArithmeticEpisode:
    """One answer, then the reward."""

    def __init__(self, environment: Arithmetic, pair: Pair) -> None:
        self._environment, self._pair = environment, pair

    async def reset(self) -> Observation:
        return Observation(self._environment.prompt_tokens(self._pair))

    async def step(self, action: Action) -> Outcome:
        answer = parse_answer(action.text)
        return Outcome(float(answer == sum(self._pair)), {"answered": float(answer is not None)})

    async def close(self) -> None:
        pass


class Arithmetic:
    """The environment "arithmetic"."""

    name = NAME

    def __init__(self, config: EnvironmentConfig, tokenizer_dir: Path, seed: int) -> None:
        """Raises EnvironmentSetupError with all problems of options and model folder together."""
        problems = Problems()
        options = ArithmeticOptions()
        with problems.collect():
            options = _parse_options(config)
        with problems.collect():
            self._chat = ChatTemplate(tokenizer_dir)
        problems.raise_if_any()
        self._options, self._seed = options, seed
        self._heldout = _draw_heldout(options, seed)
        self._excluded = {pair for a, b in self._heldout for pair in ((a, b), (b, a))}
        self.fingerprint = fingerprint(NAME, options.model_dump(), seed, self.prompt_tokens((1, 2)))
        self.sampling: Mapping[str, Any] = {}
        widest = options.largest
        round_ones = [10**k for k in range(len(str(widest)))]
        self.max_prompt_tokens = max(len(self.prompt_tokens((n, n))) for n in (widest, *round_ones))

    def train_example(self, index: int) -> Example:
        pair = draw_pair(f"train/{self._seed}", index, self._options.largest)
        retry = 0
        while pair in self._excluded:
            pair = draw_pair(f"train/{self._seed}/{index}", retry, self._options.largest)
            retry += 1
        return Example(f"train/{index}", {"pair": pair})

    def heldout(self) -> Sequence[Example]:
        return [Example(f"heldout/{row}", {"pair": pair}) for row, pair in enumerate(self._heldout)]

    def episode(self, example: Example) -> ArithmeticEpisode:
        a, b = example.data["pair"]
        return ArithmeticEpisode(self, (a, b))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._chat.decode(token_ids)

    def prompt_tokens(self, pair: Pair) -> tuple[int, ...]:
        content = self._options.prompt.replace("{a}", str(pair[0])).replace("{b}", str(pair[1]))
        return self._chat.tokens([{"role": "user", "content": content}])


def _parse_options(config: EnvironmentConfig) -> ArithmeticOptions:
    options = parse_options(ArithmeticOptions, config.options, NAME)
    problems = [
        f"environment.{key}: {NAME} makes its own prompts; remove it"
        for key in ("data", "heldout")
        if getattr(config, key) is not None
    ]
    if not {"{a}", "{b}"} <= set(re.findall(r"\{[ab]\}", options.prompt)):
        problems.append(f"environment.options.prompt = {options.prompt!r}: must hold {{a}} and {{b}}")
    if 4 * options.heldout > (options.largest + 1) ** 2:
        problems.append(
            f"environment.options.heldout = {options.heldout}: more than a quarter of the "
            f"{(options.largest + 1) ** 2} sums there are; lower it or raise environment.options.largest"
        )
    if problems:
        raise EnvironmentSetupError(*problems)
    return options


def _draw_heldout(options: ArithmeticOptions, seed: int) -> list[Pair]:
    """Distinct pairs of the held-out stream."""
    found: dict[Pair, None] = {}
    index = 0
    while len(found) < options.heldout:
        found[draw_pair(f"heldout/{seed}", index, options.largest)] = None
        index += 1
    return list(found)
