"""Rewards by name, ``environment.options.reward``: a built-in, your own function, or several that are added up.

    reward = "number"
    reward = [{ use = "math" }, { use = "format", pattern = ".*</think>.*", weight = 0.1 }]
    reward = [{ use = "rewards:judge", weight = 0.5, arguments = { url = "http://..." } }]

A function, sync or async, is called with keyword arguments, those that its parameters name:

    prompt         as the row has it: a text, or a list of messages
    response       text of the policy's answer
    token_ids      its tokens, the stop token included
    finish_reason  "stop" or "length"
    answer         the row's reference answer
    others         the row's field of that name; a parameter with a default value stays at it, unless
                   ``environment.fields`` names the field
    ``**``         all fields that ``environment.fields`` names

It returns a finite number, or {"reward": number, "info": {name: number, ...}}.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..base import EnvironmentSetupError, Outcome, Problems, parse_options
from ..modules import load_attribute
from ..workers import values
from .scoring import BUILT_IN, Answered, BuiltIn, Scoring

#: Arguments that every function may have: they are of the answer, not of the row.
OF_THE_ANSWER = ("prompt", "response", "token_ids", "finish_reason")
_KEY = "environment.options.reward"


class RewardError(RuntimeError):
    """A reward function raised, or returned no reward; the message names it. The trajectory is failed."""


class RewardTable(BaseModel):
    """What every reward of a list may have beside its own options. ``arguments``: fixed ones of your own function."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    use: str
    weight: float = Field(1.0, allow_inf_nan=False)
    name: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A reward, and numbers beside it."""

    reward: float
    info: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """One reward of the sum. ``fields``: those of a row that it needs; ``reads``: as of a ``BuiltIn``."""

    name: str
    weight: float
    score: Callable[[Answered, Mapping[str, Any]], Any]
    fields: frozenset[str]
    reads: Callable[[Any], object] | None = None


class Rewards:
    """All rewards of an environment. ``fields``: those of a row that they need."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = tuple(rewards)
        self.fields = frozenset[str]().union(*(reward.fields for reward in rewards))

    def check_reference(self, reference: Any) -> None:
        """ValueError when a reward cannot compare with this reference answer."""
        for reward in self._rewards:
            if reward.reads is not None:
                reward.reads(reference)

    async def score(self, answered: Answered, row: Mapping[str, Any]) -> Score:
        """The weighted sum; with several rewards ``info`` has each of them. RewardError."""
        found = [(reward, await _call(reward, answered, row)) for reward in self._rewards]
        total = math.fsum(reward.weight * score.reward for reward, score in found)
        if len(found) == 1:
            return Score(total, found[0][1].info)
        info = {reward.name: score.reward for reward, score in found}
        info |= {f"{reward.name}/{key}": value for reward, score in found for key, value in score.info.items()}
        return Score(total, info)


async def _call(reward: Reward, answered: Answered, row: Mapping[str, Any]) -> Score:
    try:
        value = reward.score(answered, row)
        if inspect.isawaitable(value):
            value = await value
    except Exception as error:  # fault boundary: a user's function; it fails this trajectory, which is counted
        raise RewardError(f"reward {reward.name!r} raised {type(error).__name__}: {error}") from error
    return _score(value, reward.name)


def _score(value: Any, name: str) -> Score:
    """What a function returned, checked."""
    try:
        if not isinstance(value, Mapping):
            return Score(values.number(value))
        if unknown := sorted(set(map(str, value)) - {"reward", "info"}):
            raise values.BadValue(f"a mapping with {', '.join(unknown)}; it may have reward and info")
        return Score(*values.outcome(Outcome(value.get("reward"), value.get("info", {}))))  # type: ignore[arg-type]
    except values.BadValue as error:
        raise RewardError(f"reward {name!r} returned {str(error).removeprefix('returned ')}") from None


# --- from the configuration -------------------------------------------------------------------


def make_rewards(given: str | Sequence[Mapping[str, Any]], modules: Path | None, mapped: Sequence[str]) -> Rewards:
    """The rewards that ``environment.options.reward`` describes; EnvironmentSetupError with everything that is wrong.

    ``modules``: the folder of a user's own; ``mapped``: the names in ``environment.fields``.
    """
    tables = [{"use": given}] if isinstance(given, str) else given
    if not tables:
        raise EnvironmentSetupError(f"{_KEY} = []: give at least one reward")
    problems, rewards = Problems(), list[Reward]()
    for number, table in enumerate(tables):
        with problems.collect():
            key = _KEY if isinstance(given, str) else f"{_KEY}[{number}]"
            rewards.append(_make_reward(table, key, modules, frozenset(mapped)))
    names = [reward.name for reward in rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.found.append(f"{_KEY}: two rewards are called {twice[0]!r}; give each a name of its own, name = ...")
    problems.raise_if_any()
    return Rewards(rewards)


def _make_reward(given: Mapping[str, Any], key: str, modules: Path | None, mapped: frozenset[str]) -> Reward:
    table = parse_options(RewardTable, given, "a reward", key)
    options = dict(table.model_extra or {})
    if ":" in table.use:
        if options:
            raise EnvironmentSetupError(f"{key}: {', '.join(options)} is for arguments of {table.use}: put it there")
        return _of_function(table, key, modules, mapped)
    if table.use not in BUILT_IN:
        raise EnvironmentSetupError(
            f"{key}: {table.use!r} is unknown; known are {', '.join(BUILT_IN)}, and your own as 'module:function'"
        )
    if table.arguments:
        raise EnvironmentSetupError(f"{key}.arguments: only for your own functions; remove it")
    built_in: BuiltIn = BUILT_IN[table.use]
    try:
        scoring: Scoring = built_in.make(parse_options(built_in.options, options, table.use, key))
    except EnvironmentSetupError as error:
        raise EnvironmentSetupError(
            *(line if line.startswith(key) else f"{key}: {line}" for line in error.problems)
        ) from None
    fields = frozenset({"answer"} if built_in.reads else ())
    return Reward(table.name or table.use, table.weight, lambda answered, _: scoring(answered), fields, built_in.reads)


def _of_function(table: RewardTable, key: str, modules: Path | None, mapped: frozenset[str]) -> Reward:
    function = load_attribute(table.use, modules, key)
    try:
        parameters = inspect.signature(function).parameters if callable(function) else None
    except (TypeError, ValueError):  # of something built in
        parameters = None
    if parameters is None:
        raise EnvironmentSetupError(f"{key}: {table.use} is no function that can be called; name one")
    wanted = frozenset(_wanted(parameters.values(), f"{key}: {table.use}", set(table.arguments), mapped))
    if wrong := sorted(set(table.arguments) - set(parameters)) if not _takes_all(parameters.values()) else []:
        raise EnvironmentSetupError(f"{key}.arguments: {table.use} has no parameter {wrong[0]}; correct the name")

    def score(answered: Answered, row: Mapping[str, Any]) -> Any:
        known = {"response": answered.response, "token_ids": answered.token_ids}
        known |= {"finish_reason": answered.finish_reason, "answer": answered.reference}
        return function(**{name: known[name] if name in known else row[name] for name in wanted}, **table.arguments)

    fields = wanted - set(OF_THE_ANSWER)
    return Reward(table.name or table.use.partition(":")[2], table.weight, score, fields)


def _takes_all(parameters: Any) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _wanted(parameters: Any, label: str, given: set[str], mapped: frozenset[str]) -> Iterator[str]:
    """Names of the arguments that a function is called with, beside those that the configuration gives."""
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise EnvironmentSetupError(
                f"{label} has the positional parameter {parameter.name}; rewards are called with keywords alone"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from {"response", "prompt", "token_ids", "finish_reason", *mapped} - given
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            known = parameter.name in OF_THE_ANSWER or parameter.name in mapped
            if parameter.name not in given and (known or parameter.default is parameter.empty):
                yield parameter.name
