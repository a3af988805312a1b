"""Prompts and reference answers from JSONL or parquet files, one answer each, and rewards by name.

    [environment]                          user: 12 bags of 34 nuts. How many?
    name = "dataset"                       assistant: 12 x 34 = 408           reward 1: 408 is the row's answer
    data = "train.jsonl"
    heldout = "heldout.jsonl"
    fields = { prompt = "question" }
    [environment.options]
    reward = "number"

A row's prompt is a text or a list of chat messages. Held-out rows come from a file or are a seeded share of the data; a
row whose prompt is held out is never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ...config.schema import EnvironmentConfig
from ...models.tokenizer import TokenizerError, encode_text
from ..base import Action, EnvironmentSetupError, Example, Observation, Outcome, Problems, fingerprint, parse_options
from ..datasets import ShuffledOrder
from .rewards import OF_THE_ANSWER, Rewards, make_rewards
from .rows import PromptWriter, Row, hold_out, read_rows
from .scoring import Answered, references

NAME = "dataset"


def _name_or_tables(value: Any) -> Any:
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise ValueError("give a reward's name, or a list of tables { use = ... }")
    return value


_NameOrTables = Annotated[str | list[dict[str, Any]], BeforeValidator(_name_or_tables)]


class DatasetOptions(BaseModel):
    """``environment.options``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    reward: _NameOrTables = Field("exact_match", description="a reward's name, or a list of tables")
    chat: bool = Field(True, description="write prompts in the model's chat template; false: as plain text")
    template_arguments: dict[str, Any] = Field({}, description="arguments of the chat template")
    system: str | None = Field(None, description="system prompt, in place of a row's own")
    text: str = Field("{prompt}", description="what a prompt that is a text is put into; must hold {prompt}")
    max_prompt_tokens: int | None = Field(None, ge=1, description="rows with longer prompts are left out")
    heldout_share: float = Field(0.0, ge=0, lt=1, description="share of the data that is held out, without a file")


class DatasetEpisode:
    """One answer, then the reward."""

    def __init__(self, environment: Dataset, row: Row) -> None:
        self._environment, self._row = environment, row

    async def reset(self) -> Observation:
        return Observation(self._environment.prompt_tokens(self._row))

    async def step(self, action: Action) -> Outcome:
        answered = Answered(action.text, action.token_ids, action.finish_reason, self._row.answer)
        score = await self._environment.rewards.score(answered, self._row.values)
        return Outcome(score.reward, score.info)

    async def close(self) -> None:
        pass


class Dataset:
    """The environment "dataset"."""

    name = NAME

    def __init__(self, config: EnvironmentConfig, tokenizer_dir: Path, seed: int) -> None:
        """Raises EnvironmentSetupError with all problems of options, rewards, model folder and files together."""
        options, self._writer, self.rewards, rows, held = _prepare(config, tokenizer_dir)
        if options.heldout_share:
            rows, held = hold_out(rows, options.heldout_share, seed)
        self.notes = list[str]()
        rows = self._without_long(rows, options.max_prompt_tokens, config.data)
        held = self._without_long(held, options.max_prompt_tokens, config.heldout or config.data)
        self._rows, self._held = self._without_held_out(rows, held, config.data), held
        if not self._rows:
            raise EnvironmentSetupError(
                f"{config.data}: no row is left to train on ({'; '.join(self.notes) or 'all are held out'})"
            )
        self._order = ShuffledOrder(len(self._rows), seed)
        self.sampling: Mapping[str, Any] = {}
        self.max_prompt_tokens = max(self._writer.lengths((*self._rows, *held)))  # names a row that cannot be written
        contents = [(row.number, dict(row.values)) for row in (*self._rows, *held)]
        first = self.prompt_tokens(self._rows[0])
        self.fingerprint = fingerprint(NAME, options.model_dump(), seed, len(held), contents, first)

    def _without_long(self, rows: Sequence[Row], limit: int | None, path: Path | None) -> list[Row]:
        if limit is None:
            return list(rows)
        kept = [row for row, length in zip(rows, self._writer.lengths(rows), strict=True) if length <= limit]
        if len(kept) < len(rows):
            self.notes.append(
                f"{path}: {len(rows) - len(kept)} of {len(rows)} prompts are left out: longer than "
                f"environment.options.max_prompt_tokens = {limit}"
            )
        return kept

    def _without_held_out(self, rows: Sequence[Row], held: Sequence[Row], path: Path | None) -> list[Row]:
        prompts = {row.identity for row in held}
        kept = [row for row in rows if row.identity not in prompts]
        if len(kept) < len(rows):
            self.notes.append(f"{path}: {len(rows) - len(kept)} of {len(rows)} rows are left out: held out as well")
        return kept

    def train_example(self, index: int) -> Example:
        epoch, position = self._order(index)
        return Example(f"train/{epoch}/{self._rows[position].number}", {"row": position, "heldout": False})

    def heldout(self) -> Sequence[Example]:
        return [
            Example(f"heldout/{row.number}", {"row": position, "heldout": True})
            for position, row in enumerate(self._held)
        ]

    def episode(self, example: Example) -> DatasetEpisode:
        return DatasetEpisode(self, self._row(example))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._writer.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def reference(self, example: Example) -> tuple[int, ...]:
        """Tokens of the row's reference answer; none where it has none that is a text or a number, or none that the
        tokenizer can write: "1.0" may be equal to what a policy with the digits alone answers."""
        try:
            (text, *_) = references(self._row(example).answer)
        except ValueError:
            return ()
        try:
            return tuple(encode_text(self._writer.tokenizer, text, add_special_tokens=False))
        except TokenizerError:
            return ()

    def prompt_tokens(self, row: Row) -> tuple[int, ...]:
        return self._writer.tokens(row.prompt)

    def _row(self, example: Example) -> Row:
        return (self._held if example.data["heldout"] else self._rows)[example.data["row"]]


def _prepare(
    config: EnvironmentConfig, tokenizer_dir: Path
) -> tuple[DatasetOptions, PromptWriter, Rewards, list[Row], list[Row]]:
    """Options, prompts, rewards, and the rows of data and heldout; EnvironmentSetupError with all problems."""
    problems, options, rewards = Problems(), DatasetOptions(), None
    with problems.collect():
        options = parse_options(DatasetOptions, config.options, NAME)
    problems.found += _option_problems(config, options)
    with problems.collect():
        writer = PromptWriter(
            tokenizer_dir,
            chat=options.chat,
            system=options.system,
            text=options.text,
            arguments=options.template_arguments,
        )
    with problems.collect():
        rewards = make_rewards(options.reward, config.modules, [*config.fields])
    files = list[list[Row]]()
    for path in (config.data, config.heldout) if rewards is not None else ():
        with problems.collect():
            wanted = sorted({"prompt", *rewards.fields, *({"answer"} & config.fields.keys())})
            files.append(read_rows(path, wanted, config.fields, rewards.check_reference) if path else [])
    problems.raise_if_any()
    assert rewards is not None
    return options, writer, rewards, files[0], files[1]


def _option_problems(config: EnvironmentConfig, options: DatasetOptions) -> list[str]:
    found = []
    if config.data is None:
        found.append(f"environment.data: missing; {NAME} needs the file of the prompts, .jsonl or .parquet")
    if config.heldout is not None and options.heldout_share:
        found.append(
            "environment.options.heldout_share: environment.heldout has the held-out prompts; remove one of them"
        )
    if "{prompt}" not in options.text:
        found.append(f"environment.options.text = {options.text!r}: must hold {{prompt}}")
    if options.template_arguments and not options.chat:
        found.append("environment.options.template_arguments: plain text has no template; remove them")
    if options.system is not None and not options.chat:
        found.append(
            "environment.options.system: plain text has no system prompt; write it into environment.options.text"
        )
    if taken := sorted(config.fields.keys() & set(OF_THE_ANSWER[1:])):
        found.append(f"environment.fields.{taken[0]}: rewards get the policy's own under this name; take another")
    return found
