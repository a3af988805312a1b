"""Whether a server can be believed: what it says of the version of its weights, and of what it computes with them.

A label is held against the book, which is what the server was given and when. Whether it computes with the weights that
it took is asked once a load, beside its requests: answers wait for that. Whether its log-probs are those of a softmax
is asked where an answer makes one doubt it: log-probs of exactly 0.0 are those of a policy that is certain, or of a
server that computes none, and only a temperature at which no policy is certain tells the two apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from ...types import PolicyVersion
from ..client.back_off import BackOff
from ..client.http import ServerClient, ServerError, ServerUnavailable
from ..client.protocol import GenerateResult, ImpossibleLogprobs, SamplingParams

#: Tries of a question that a server does not answer for reasons of its own, and the pauses between them.
_TRIES = 3
_AGAIN_S = (0.1, 2.0)


class Held(NamedTuple):
    """The ``version`` that a server held when something was asked of it, and the number of the load that brought it: a
    fault of one load says nothing of the next."""

    version: PolicyVersion
    load: int


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a server cannot be believed. ``reason`` goes on from its name, in words; ``other_run``: whose version it
    named."""

    reason: str
    other_run: str | None = None


#: Asks a server something about its weights; a reason to doubt it, if the answer is one.
Question = Callable[[], Awaitable[Doubt | None]]
Asked = asyncio.Task[Doubt | None]


def label_doubt(label: str, held: PolicyVersion, given: Container[PolicyVersion] = ()) -> Doubt | None:
    """Whether ``label`` names weights that a server may have sampled with that held ``held`` when it was asked, and was
    ``given`` others since; None where it does."""
    try:
        version = PolicyVersion.parse(label)
    except ValueError:
        return Doubt(f"names its weights {label!r}, which is no version of a run: it has lost those that it was given")
    if version == held or (version.number >= held.number and version in given):
        return None
    if version.run != held.run:
        return Doubt(f"names its weights {label}, a version of another run", version.run or None)
    if version.attempt != held.attempt:
        return Doubt(f"names its weights {label}, of attempt {version.attempt}; this is attempt {held.attempt}")
    if version.number < held.number:
        return Doubt(f"names its weights {label}, older than {held}, which it had been given")
    return Doubt(f"names its weights {label}, which it was not given; it held {held}")


def is_certain(answer: GenerateResult, sampling: SamplingParams) -> bool:
    """Whether every token had all the probability, though others could have been sampled."""
    return bool(answer.logprobs) and not any(answer.logprobs) and sampling.temperature > 0 and not sampling.restricted


async def logprobs_doubt(client: ServerClient) -> Doubt | None:
    """Whether the server's log-probs are those of a softmax."""
    try:
        await client.check_logprobs()
    except ImpossibleLogprobs as error:
        return impossible(error)
    return None


def impossible(error: ImpossibleLogprobs) -> Doubt:
    return Doubt(f"answers log-probs that no softmax gives ({error})")


async def ask_again(question: Question) -> Doubt | None:
    """``question``, again where the server does not answer it for reasons of its own."""
    again = BackOff(*_AGAIN_S)
    for _ in range(_TRIES - 1):
        try:
            return await question()
        except (ServerError, ServerUnavailable):
            await asyncio.sleep(again.wait())
    try:
        return await question()
    except (ServerError, ServerUnavailable) as error:
        return Doubt(f"does not say what it computes with its weights ({error})")


async def ended_in_doubt(newest: Callable[[], Asked | None]) -> bool:
    """Wait for the ``newest`` question of a kind, which others wait for as well: whether one ended in a doubt
    meanwhile, or in nothing because the server was lost. False where nothing was asked. A later load asks anew, and a
    doubt of the one before is one of what was sampled until then."""
    given_up = False
    while (asked := newest()) is not None:
        if not asked.done():
            await asyncio.wait([asked])
        given_up = asked.cancelled()
        if not given_up and asked.result() is not None:
            return True
        if asked is newest():
            break
    return given_up
