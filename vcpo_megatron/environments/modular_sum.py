"""A chain of additions: the prompt is N digits and "=", the answer N tokens, its last one counts.

    3 1 4 1 5 9 2 6 =  ->  3 4 8 9 4 3 5 1        reward 1, since 31 mod 10 = 1

The running sums are how a model gets there; only the last token is looked at. Prompts come from a
seeded generator or from ``environment.data``; a prompt is one text field "prompt" of N digits. The
held-out prompts come from ``environment.heldout`` (one is shipped with the example) or, without it,
from the generator. A training prompt never equals a held-out one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from ..config.schema import EnvironmentConfig
from ..models.tokenizer import TokenizerError, load_tokenizer
from .base import Action, EnvironmentSetupError, Example, Observation, Outcome, Problems, fingerprint, parse_options
from .datasets import DatasetRecord, ShuffledOrder, read_records

NAME = "modular_sum"
HELDOUT_PROMPTS = 512


class ModularSumOptions(BaseModel):
    """``environment.options``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    digits: int = Field(8, ge=1, le=64, description="N, digits of a prompt and tokens of an answer")
    modulus: int = Field(10, ge=2, le=10, description="M, the sum is taken modulo this")


def draw_prompt(stream: str, index: int, digits: int) -> str:
    """Prompt ``index`` of the generator's ``stream``: ``digits`` uniform digits, a pure function of its arguments."""
    hashed = hashlib.blake2b(f"{stream}/{index}/{digits}".encode(), digest_size=64).digest()
    return f"{int.from_bytes(hashed, 'little') % 10**digits:0{digits}d}"


def draw_heldout(seed: int, digits: int) -> list[str]:
    """Distinct held-out prompts of the generator: 512, or half of all there are when that is less."""
    wanted = min(HELDOUT_PROMPTS, 10**digits // 2)
    found: dict[str, None] = {}
    index = 0
    while len(found) < wanted:
        found[draw_prompt(f"heldout/{seed}", index, digits)] = None
        index += 1
    return list(found)


def write_prompts(path: Path, prompts: Iterable[str]) -> None:
    """Write prompts as the JSONL that ``environment.data`` and ``environment.heldout`` take."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def read_prompts(path: Path, digits: int, fields: Mapping[str, str] | None = None) -> list[str]:
    """Prompts of a file, each of ``digits`` digits; EnvironmentSetupError names the first bad line."""
    return [_checked_prompt(record, digits) for record in read_records(path, ("prompt",), fields or {})]


def _checked_prompt(record: DatasetRecord, digits: int) -> str:
    prompt = record.values["prompt"]
    if not (isinstance(prompt, str) and len(prompt) == digits and prompt.isascii() and prompt.isdecimal()):
        raise EnvironmentSetupError(
            f"{record.where}: prompt {prompt!r} is not a text of {digits} digits; "
            "correct it, or set environment.options.digits"
        )
    return prompt


class ModularSumEpisode:
    """One answer, then the reward. An answer that is shorter than N tokens has none."""

    def __init__(self, environment: ModularSum, prompt: str) -> None:
        self._environment = environment
        self._prompt = prompt

    async def reset(self) -> Observation:
        return Observation(self._environment.prompt_tokens(self._prompt))

    async def step(self, action: Action) -> Outcome:
        return Outcome(self._environment.reward(self._prompt, action.token_ids))

    async def close(self) -> None:
        pass


class ModularSum:
    """The environment "modular_sum"."""

    name = NAME

    def __init__(self, config: EnvironmentConfig, tokenizer_dir: Path, seed: int) -> None:
        """Raises EnvironmentSetupError with all problems of options, tokenizer and files together."""
        problems = Problems()
        options = ModularSumOptions()
        with problems.collect():
            options = parse_options(ModularSumOptions, config.options, NAME)
        with problems.collect():
            self._tokenizer, self._ids = _tokens_of(tokenizer_dir)
        self._options = options
        self._seed = seed
        self._heldout: list[str] = []
        self._data: list[str] | None = None
        with problems.collect():
            self._heldout = _read_heldout(config, seed, options.digits)
        self._excluded = frozenset(self._heldout)
        with problems.collect():
            self._data = _read_data(config, options.digits, self._excluded)
        problems.raise_if_any()
        self._order = ShuffledOrder(len(self._data), seed) if self._data else None
        self.fingerprint = fingerprint(NAME, options.model_dump(), seed, self._data, self._heldout)
        self.sampling: Mapping[str, Any] = {"ignore_eos": True, "max_new_tokens": options.digits}
        self.max_prompt_tokens = options.digits + 1

    def train_example(self, index: int) -> Example:
        if self._order is not None and self._data is not None:
            epoch, row = self._order(index)
            return Example(f"train/{epoch}/{row}", {"prompt": self._data[row]})
        return Example(f"train/{index}", {"prompt": self._draw_train(index)})

    def heldout(self) -> Sequence[Example]:
        return [Example(f"heldout/{row}", {"prompt": prompt}) for row, prompt in enumerate(self._heldout)]

    def episode(self, example: Example) -> ModularSumEpisode:
        return ModularSumEpisode(self, example.data["prompt"])

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def prompt_tokens(self, prompt: str) -> tuple[int, ...]:
        return tuple(self._ids[character] for character in prompt + "=")

    def reward(self, prompt: str, answer: Sequence[int]) -> float:
        """1.0 when the N-th and last token is the digit of the prompt's sum mod M, else 0.0."""
        right = self._ids[str(sum(map(int, prompt)) % self._options.modulus)]
        return float(len(answer) == self._options.digits and answer[-1] == right)

    def _draw_train(self, index: int) -> str:
        """Prompt ``index`` of the training stream; what is held out is drawn again from a stream of its own."""
        prompt = draw_prompt(f"train/{self._seed}", index, self._options.digits)
        retry = 0
        while prompt in self._excluded:
            prompt = draw_prompt(f"train/{self._seed}/{index}", retry, self._options.digits)
            retry += 1
        return prompt


def _tokens_of(folder: Path) -> tuple[Tokenizer, dict[str, int]]:
    """The tokenizer and the token id of each of "0" ... "9" and "="."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = load_tokenizer(path)
    except TokenizerError as error:
        raise EnvironmentSetupError(str(error)) from None
    found = {character: tokenizer.token_to_id(character) for character in "0123456789="}
    ids = {character: token for character, token in found.items() if token is not None}
    if missing := [character for character in found if character not in ids]:
        raise EnvironmentSetupError(
            f"{path}: no single token for {', '.join(map(repr, missing))}; {NAME} needs a tokenizer with "
            "one token for every digit and '='"
        )
    return tokenizer, ids


def _read_heldout(config: EnvironmentConfig, seed: int, digits: int) -> list[str]:
    if config.heldout is None:
        return draw_heldout(seed, digits)
    prompts = read_prompts(config.heldout, digits, config.fields)
    if len(set(prompts)) < len(prompts):
        repeated = next(prompt for number, prompt in enumerate(prompts) if prompt in prompts[:number])
        raise EnvironmentSetupError(f"{config.heldout}: prompt {repeated!r} occurs more than once; keep it once")
    if config.data is None and len(prompts) >= 10**digits:
        raise EnvironmentSetupError(
            f"{config.heldout}: holds all prompts of {digits} digits, none is left to train on; hold out fewer"
        )
    return prompts


def _read_data(config: EnvironmentConfig, digits: int, excluded: frozenset[str]) -> list[str] | None:
    if config.data is None:
        return None
    prompts = read_prompts(config.data, digits, config.fields)
    if shared := [prompt for prompt in prompts if prompt in excluded]:
        raise EnvironmentSetupError(
            f"{config.data}: {len(shared)} prompt(s) are also held out, the first is {shared[0]!r}; remove them"
        )
    return prompts
