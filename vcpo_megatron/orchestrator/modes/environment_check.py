"""A run's environment before the run: made as a run makes it, asked for prompts, played with a stand-in of the policy.

The stand-in answers with random tokens, a function of the seed and the request, or first with a reference answer where
the environment has one. Whatever is wrong is one line; nothing that a user's code does takes the command down, since it
runs in a worker process.
"""

from __future__ import annotations

import asyncio
import difflib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from ...config.schema import RunConfig
from ...environments.base import EnvironmentSetupError
from ...environments.client import Description, EnvironmentClient, Prompt
from ...environments.workers.pool import WorkerPool
from ...environments.workers.setup import WorkerSetup
from ...models.folder import read_model, stop_tokens
from ...models.tokenizer import load_tokenizer
from ...rollout.agent_loop import EpisodeError, run_episode
from ...rollout.client.protocol import GenerateResult, ProtocolError, SamplingParams, Span
from ...rollout.fleet.router import sampling_problem
from ...run.tasks import RunError, run_beside
from ...types import PolicyVersion

#: Training prompts whose names are compared.
_NAMED = 8
#: An answer of the stand-in that ends by itself has at most so many tokens.
_LONGEST = 48
_VERSION = str(PolicyVersion(1, 0))


class _StandInError(RuntimeError):
    """What the environment gave the policy cannot be sent to a server."""


@dataclass(frozen=True)
class Exchange:
    """What the policy read, all of it, and what it answered."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode. ``policy``: who answered; ``failure``: why there is no reward."""

    prompt: Prompt
    policy: str
    exchanges: tuple[Exchange, ...]
    reward: float | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...], str | None]]:
        """(prompt, answer or observation; its tokens; the finish reason of an answer), in order."""
        read = 0
        for exchange in self.exchanges:
            yield "observation" if read else "prompt", exchange.tokens[read:], None
            yield "answer", exchange.answer, exchange.finish_reason
            read = len(exchange.tokens) + len(exchange.answer)


@dataclass(frozen=True)
class Model:
    """What a policy may write: tokens that are ``allowed``, ``stops`` among those that end an answer."""

    vocab_size: int
    context_length: int
    allowed: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, config: RunConfig) -> Model:
        """ConfigError, TokenizerError: the model's folder cannot be used."""
        shape = read_model(config.model.path)
        tokenizer = load_tokenizer(config.model.path / "tokenizer.json")
        words = set(tokenizer.get_vocab(with_added_tokens=False).values())
        special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        allowed = tuple(sorted(token for token in words - special if token < shape.vocab_size))
        context = config.rollout.context_length or shape.max_position_embeddings
        return cls(shape.vocab_size, context, allowed or (0,), stop_tokens(config.model.path, shape))


class _StandIn:
    """Answers of one episode: ``first``, where it is not empty, then random tokens of ``allowed``."""

    def __init__(self, model: Model, seed: int, first: Sequence[int]) -> None:
        self._model, self._seed, self._first = model, seed, tuple(first)
        self.exchanges: list[Exchange] = []

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams, request_id: str) -> GenerateResult:
        for position, token in enumerate(tokens):
            if token >= self._model.vocab_size:
                what = "prompt" if not self.exchanges else "sequence with its observations"
                raise _StandInError(
                    f"token {token} at position {position} of its {what} is none of the model's, whose vocab_size is "
                    f"{self._model.vocab_size}; make tokens with the tokenizer of model.path"
                )
        answer, reason = self._answer(sampling, random.Random(f"{self._seed}/{request_id}"))
        self.exchanges.append(Exchange(tuple(tokens), answer, reason))
        return GenerateResult(answer, (0.0,) * len(answer), (Span(0, len(answer), _VERSION),), reason)

    def _answer(self, sampling: SamplingParams, draw: random.Random) -> tuple[tuple[int, ...], str]:
        limit = sampling.max_new_tokens
        stops = () if sampling.ignore_eos else (*sampling.stop_token_ids, *self._model.stops)
        if self._first and not self.exchanges:
            whole = (*self._first, *stops[:1])
            return whole[:limit], "stop" if stops and len(whole) <= limit else "length"
        if not stops:
            return tuple(draw.choices(self._model.allowed, k=limit)), "length"
        size = draw.randrange(min(_LONGEST, limit))
        return (*draw.choices(self._model.allowed, k=size), stops[0]), "stop"


# --- what an environment says of itself -------------------------------------------------------


def description_problems(said: Description, config: RunConfig, vocab_size: int, context_length: int) -> Iterator[str]:
    """What of ``said`` does not go with the run or with the model; ``context_length``: its longest sequence."""
    wrong, answer = f"environment {said.name}: ", said.sampling.get("max_new_tokens", 1)
    yield from (wrong + problem for problem in _sampling_problems(said.sampling, config, vocab_size))
    if isinstance(answer, int) and said.max_prompt_tokens + answer > context_length:
        yield (
            f"{wrong}a prompt of {said.max_prompt_tokens} tokens and an answer of {answer} exceed the model's context "
            f"of {context_length}; shorten the prompts or take a model with a longer context"
        )
    if config.train.eval_every and config.rollout.engine != "replay" and not said.heldout:
        yield (
            f"{wrong}it has no held-out prompts, and train.eval_every = {config.train.eval_every} evaluates on them; "
            "give it some, or set train.eval_every = 0"
        )
    yield from (wrong + problem for problem in _name_problems("heldout", said.heldout))


def _sampling_problems(sampling: Mapping[str, Any], config: RunConfig, vocab_size: int) -> Iterator[str]:
    known = [parameter.name for parameter in fields(SamplingParams)]
    if unknown := sorted(set(sampling) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, 1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        yield f"sampling has {unknown[0]!r}, which is unknown; {meant}"
        return
    rollout = config.rollout
    try:
        given = replace(SamplingParams(rollout.max_new_tokens, rollout.temperature), **sampling)
    except ProtocolError as error:
        yield f"sampling: {error}"
        return
    if outside := [token for token in given.stop_token_ids if token >= vocab_size]:
        yield f"sampling has the stop token {outside[0]}, and the model's vocab_size is {vocab_size}; correct it"
    if given.max_new_tokens > rollout.max_new_tokens:
        yield (
            f"its answers have up to {given.max_new_tokens} tokens (max_new_tokens of its sampling), and "
            f"rollout.max_new_tokens = {rollout.max_new_tokens} cuts them off; raise it to {given.max_new_tokens}"
        )
    if rollout.router is not None and (problem := sampling_problem(sampling)) is not None:
        yield problem


def _name_problems(where: str, prompts: Sequence[Prompt], others: Sequence[Prompt] = ()) -> Iterator[str]:
    """Prompts of one name, among ``prompts`` and with ``others``, the held-out ones."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if (other := first.setdefault(prompt.prompt_id, prompt)) is not prompt:
            yield (
                f"prompts {other.index} and {prompt.index} of {where} have one prompt_id, {prompt.prompt_id!r}; "
                "give every prompt a name of its own"
            )
            return
    if shared := sorted(first.keys() & {prompt.prompt_id for prompt in others}):
        yield f"the prompt_id {shared[0]!r} is that of a training and of a held-out prompt; give each its own"


# --- playing ----------------------------------------------------------------------------------


class Examined(EnvironmentClient, Protocol):
    """An environment that can be asked for right answers."""

    async def reference(self, prompt: Prompt) -> tuple[int, ...]:
        """Tokens of one to ``prompt``, none where the environment does not say; RunError."""
        ...


@dataclass(frozen=True)
class Examination:
    """What is done: ``episodes`` training and held-out prompts are played, with random tokens and with the reference
    answer where there is one; ``show`` gets each episode, ``note`` what the environment has to say."""

    episodes: int = 0
    show: Callable[[PlayedEpisode], None] = lambda episode: None
    note: Callable[[str], None] = lambda text: None


def check_environment(config: RunConfig, examination: Examination) -> list[str]:
    """Everything that is wrong with the environment of ``config``, a line each. Call it from the main thread: worker
    processes end with the thread that started them.

    ConfigError, TokenizerError: the model's folder cannot be used.
    """
    model = Model.of(config)
    folder = Path(tempfile.mkdtemp(prefix="vcpo-environment-"))
    found: list[str] = []
    try:
        found = asyncio.run(_check(config, model, examination, folder))
    except EnvironmentSetupError as error:
        found = list(error.problems)
    except RunError as error:
        found = [str(error)]
    finally:
        if not any(str(folder) in line for line in found):  # a log that is to be read stays
            shutil.rmtree(folder, ignore_errors=True)
    return found


async def _check(config: RunConfig, model: Model, examination: Examination, folder: Path) -> list[str]:
    pool = WorkerPool(
        WorkerSetup.of(config),
        workers=1,
        start_timeout_s=config.launch.timeout_s,
        log=lambda index: folder / f"environment.{index}.log",
    )
    async with pool as environment:
        return await run_beside(ask_and_play(config, model, examination, environment), environment.supervise())


async def ask_and_play(config: RunConfig, model: Model, examination: Examination, environment: Examined) -> list[str]:
    """As ``check_environment``, of an environment that was made."""
    said, episodes = environment.description, examination.episodes
    for note in said.notes:
        examination.note(note)
    found = list(description_problems(said, config, model.vocab_size, model.context_length))
    training = [await environment.train_prompt(index) for index in range(max(_NAMED, episodes))]
    named = _name_problems("train_example", training[:_NAMED], said.heldout)  # later ones may come round again
    found += [f"environment {said.name}: {line}" for line in named]
    if found:
        return found
    played = [*training[:episodes], *said.heldout[:episodes]]
    told = False
    for number, prompt in enumerate(played):
        reference = await environment.reference(prompt)
        if not told and (cut := _cut_off(said, config, prompt, reference)) is not None:
            examination.note(cut)
            told = True
        for first in dict.fromkeys([(), reference]):
            episode = await _play(config, model, environment, prompt, number, first)
            examination.show(episode)
            if episode.failure is not None:
                found.append(episode.failure)
    return list(dict.fromkeys(found))


def _cut_off(said: Description, config: RunConfig, prompt: Prompt, reference: Sequence[int]) -> str | None:
    """That no answer may be as long as the reference one. No fault: the text of a data set may say more than the
    answer that its reward looks for."""
    limits = {f"rollout.max_new_tokens = {config.rollout.max_new_tokens}": config.rollout.max_new_tokens}
    if isinstance(own := said.sampling.get("max_new_tokens"), int):
        limits[f"max_new_tokens = {own} of its sampling"] = own
    name = min(limits, key=lambda name: limits[name])
    if len(reference) <= limits[name]:
        return None
    return (
        f"environment {said.name}, prompt {prompt.prompt_id}: its reference answer has {len(reference)} tokens, and "
        f"{name} cuts answers off before that; raise it to {len(reference)} if they have to be so long"
    )


async def _play(
    config: RunConfig, model: Model, environment: Examined, prompt: Prompt, number: int, first: Sequence[int]
) -> PlayedEpisode:
    stand_in = _StandIn(model, config.train.seed, first)
    policy = "the reference answer" if first else "random tokens"
    name = f"environment {environment.description.name}, prompt {prompt.prompt_id}"
    try:
        trajectory = await run_episode(
            stand_in.generate,
            environment,
            prompt,
            group_id=number,
            sample_index=0,
            sampling=SamplingParams(config.rollout.max_new_tokens, config.rollout.temperature),
            context_length=model.context_length,
            seed_for_turn=lambda turn: None,
        )
    except EpisodeError as error:
        failure = str(error)
    except _StandInError as error:
        failure = f"{name}: {error}"
    else:
        return PlayedEpisode(prompt, policy, tuple(stand_in.exchanges), trajectory.reward, trajectory.info)
    return PlayedEpisode(prompt, policy, tuple(stand_in.exchanges), failure=failure)
